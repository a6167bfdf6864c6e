"""Trains with one release on as many ranks as asked, again and again, and hands back outcomes.

A release takes seconds to import, so one process per source tree imports it once and forks its
ranks for every run. :class:`RankServer` is the near end; ``main`` is the far one, which is started
with the tree before everything else on its path.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from tests.functional_tests.backport.recipe import Outcome, Run

REPOSITORY = Path(__file__).resolve().parents[3]
RUN_LIMIT_S = 120.0
GRACE_S = 2.0


class RunFailed(RuntimeError):
    """A rank raised; the message is its last line, ``trace`` the whole traceback."""

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


class RankServer:
    """Trains with the release at ``tree``, a folder that holds ``megatron``."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(tree), str(REPOSITORY))),
            "OMP_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", "-m", __name__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def run(self, run: Run) -> list[Outcome]:
        """Outcomes by rank.

        Raises:
            RunFailed: If a rank raised, died or hung.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        _send(self._process.stdin, run)
        answer = _receive(self._process.stdout)
        if answer is None:
            raise RunFailed(f"the process for {self.tree} ended, see its messages above")
        if isinstance(answer, tuple):
            raise RunFailed(*answer)
        return list(answer)

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def __enter__(self) -> RankServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _send(stream: IO[bytes], value: Any) -> None:
    data = pickle.dumps(value)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    head = stream.read(8)
    return pickle.loads(stream.read(struct.unpack("<Q", head)[0])) if len(head) == 8 else None


def _import_release() -> None:
    """Imports the Megatron-core that comes first on the path, with stand-ins for what it lacks."""
    import logging

    import torch

    from tests.functional_tests.backport import cuda_names, muon_stand_in, recipe

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    cuda_names.install()
    muon_stand_in.install()
    with cuda_names.triton_names():
        recipe.release("optimizer.layer_wise_optimizer")
        recipe.release("transformer")
    recipe.pretend_to_have_transformer_engine()


def _be_a_rank(run: Run, rank: int, folder: Path) -> None:
    import traceback

    import torch.distributed as dist

    from tests.functional_tests.backport import recipe

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(run.ranks))
    answer: Any
    try:
        store = dist.FileStore(str(folder / "store"), run.ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=run.ranks)
        answer = recipe.train(run)
    except BaseException as error:  # whatever it was, it is the answer
        text = f"{type(error).__name__}: {error}".rstrip(": ")
        answer = (text, traceback.format_exc())
    partial = folder / f"{rank}.partial"
    partial.write_bytes(pickle.dumps(answer))
    partial.rename(folder / str(rank))


def _train_on_ranks(run: Run) -> Any:
    """Outcomes by rank, or message and traceback of the first rank that failed."""
    with tempfile.TemporaryDirectory() as name:
        folder, ranks = Path(name), {}
        for rank in range(run.ranks):
            child = os.fork()
            if child == 0:
                _be_a_rank(run, rank, folder)
                os._exit(0)
            ranks[child] = rank
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + RUN_LIMIT_S
        while ranks and time.monotonic() < deadline:
            child, _ = os.waitpid(-1, os.WNOHANG)
            if child == 0:
                time.sleep(0.005)
                continue
            rank = ranks.pop(child)
            file = folder / str(rank)
            died = (f"rank {rank} died", "")
            answers[rank] = pickle.loads(file.read_bytes()) if file.exists() else died
            if isinstance(answers[rank], tuple):
                # Its peers may wait for it for ever.
                deadline = min(deadline, time.monotonic() + GRACE_S)
        for child in ranks:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        failures = [answer for _, answer in sorted(answers.items()) if isinstance(answer, tuple)]
        if failures:
            # A peer's lost connection tells less than what made the first rank leave.
            return min(failures, key=lambda failure: "onnection" in failure[0])
        if ranks:
            return (f"ranks {sorted(ranks.values())} gave no answer in {RUN_LIMIT_S:.0f} s", "")
        return [answers[rank] for rank in range(run.ranks)]


def main() -> None:
    """Serves runs that come on standard input until it ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a release prints is no answer
    _import_release()
    while (run := _receive(sys.stdin.buffer)) is not None:
        _send(answers, _train_on_ranks(run))


if __name__ == "__main__":
    main()
