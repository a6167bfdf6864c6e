"""A pool of real worker processes for tests of collective code.

Importing torch takes longer than most tests, so the workers start once per test session and are
sent functions to run. Each call of :func:`run_ranks` gets a fresh world of the size it asks
for, which is taken down when the call ends.

A function sent to the ranks must be importable (module level, not a lambda), as must its arguments
and its result. Tensors travel as numpy-free pickles, so they may be of any dtype.

Under ``pytest --device cuda`` ranks find a GPU, which they share: a world of one uses NCCL, larger ones
gloo, as NCCL takes one rank a GPU. Otherwise they find none, on whatever machine.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import multiprocessing as mp
import os
import pickle
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

MAX_RANKS = 8


class RankError(AssertionError):
    """A function failed on at least one rank; the message holds that rank's traceback."""


def on_cuda() -> bool:
    """Whether ranks keep their tensors on a GPU."""
    return os.environ.get("TEST_DEVICE", "cpu") == "cuda"


def _worker(connection: Connection) -> None:
    if not on_cuda():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Read by cuBLAS when it is first used, which may be before a job asks for repeatable sums.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            payload = connection.recv_bytes()
        except EOFError:
            return
        rank, world_size, store_path, job = pickle.loads(payload)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        try:
            function, args, kwargs = pickle.loads(job)
            store = dist.FileStore(store_path, world_size)
            backend = "nccl" if on_cuda() and world_size == 1 else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
            reply: tuple[bool, Any] = (True, function(*args, **kwargs))
        except BaseException:  # the traceback is the test's failure message, whatever was raised
            reply = (False, traceback.format_exc())
        # Only now are the failed function's objects free, and with them the connections that its
        # peers may be waiting on.
        _leave_world()
        connection.send_bytes(_dump(reply))


def _leave_world() -> None:
    import torch.distributed as dist

    gc.collect()
    with contextlib.suppress(ImportError):
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def _dump(value: Any) -> bytes:
    """Pickles by value: torch's default reducer would share memory that dies with the worker."""
    buffer = io.BytesIO()
    pickle.Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


class _Pool:
    def __init__(self) -> None:
        self._context = mp.get_context("spawn")
        self._workers: list[tuple[mp.process.BaseProcess, Connection]] = []

    def _grow(self, size: int) -> None:
        while len(self._workers) < size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_worker, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def stop(self) -> None:
        """Ends every worker; the next run starts new ones."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers = []

    def run(self, job: bytes, world_size: int, timeout_s: float) -> list[Any]:
        self._grow(world_size)
        with tempfile.TemporaryDirectory() as folder:
            store_path = os.path.join(folder, uuid.uuid4().hex)
            pending = {}
            for rank in range(world_size):
                connection = self._workers[rank][1]
                connection.send_bytes(pickle.dumps((rank, world_size, store_path, job)))
                pending[connection] = rank
            return self._collect(pending, world_size, timeout_s)

    def _collect(
        self, pending: dict[Connection, int], world_size: int, timeout_s: float
    ) -> list[Any]:
        results: list[Any] = [None] * world_size
        errors: list[str] = []
        deadline = time.monotonic() + timeout_s
        while pending:
            # After a first failure the peers may wait for the failed rank for ever: give them a
            # moment to fail by themselves, then end the pool.
            limit = 2.0 if errors else max(deadline - time.monotonic(), 0.0)
            ready = wait(list(pending), timeout=limit)
            if not ready:
                break
            for connection in ready:
                rank = pending.pop(connection)  # type: ignore[arg-type, call-overload]
                try:
                    succeeded, value = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    succeeded, value = False, "the worker process died"
                if succeeded:
                    results[rank] = value
                else:
                    errors.append(f"rank {rank} of {world_size}:\n{value}")
        if pending:
            self.stop()
        if errors:
            raise RankError("\n".join(errors))
        if pending:
            raise RankError(f"no answer within {timeout_s} s from ranks {sorted(pending.values())}")
        return results


_POOL = _Pool()
atexit.register(_POOL.stop)


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120.0,
    **kwargs: Any,
) -> list[Any]:
    """Calls ``function(*args, **kwargs)`` on every rank of a new world.

    Args:
        function: An importable function; it finds ``torch.distributed`` initialised.
        world_size: Number of ranks, 1 to 8.
        timeout_s: Seconds until a missing answer counts as a hang.

    Returns:
        The results, by rank.

    Raises:
        RankError: If any rank raised, died or hung.
    """
    if not 1 <= world_size <= MAX_RANKS:
        raise ValueError(f"world_size must be 1 to {MAX_RANKS}, got {world_size}")
    return _POOL.run(pickle.dumps((function, args, kwargs)), world_size, timeout_s)
