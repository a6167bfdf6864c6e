"""Trains with releases on as many ranks as asked, again and again, and hands back outcomes.

Importing PyTorch and a release takes seconds, so it is done once and forked: one process imports
PyTorch, forks one process for every source tree, which imports that tree's release and forks the
ranks of every run. :class:`RankServer` is the near end of the first process.
"""

from __future__ import annotations

import contextlib
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
GRACE_S = 1.0


class RunFailed(RuntimeError):
    """A rank raised; the message is its last line, ``trace`` the whole traceback."""

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


class RankServer:
    """Trains with any release, given as a folder that holds ``megatron``."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", "-m", __name__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def run(self, tree: Path, *runs: Run) -> list[list[Outcome]]:
        """Trains every run, one after another, in the same rank processes.

        Args:
            tree: The release.
            runs: What to train; all with the same number of ranks.

        Returns:
            Outcomes by run and rank.

        Raises:
            RunFailed: If a rank raised, died or hung.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        _send(self._process.stdin, (str(tree), runs))
        answer = _receive(self._process.stdout)
        if answer is None:
            raise RunFailed("the process that starts the ranks ended, see its messages above")
        if isinstance(answer, tuple):
            raise RunFailed(*answer)
        return [list(outcomes) for outcomes in zip(*answer, strict=True)]

    def close(self) -> None:
        """Ends all processes."""
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


def _import_release(tree: str) -> None:
    """Imports the Megatron-core at ``tree``, with stand-ins for what it lacks here."""
    from tests.functional_tests.backport import cuda_names, muon_stand_in, recipe

    sys.path.insert(0, tree)
    cuda_names.install()
    muon_stand_in.install()
    with cuda_names.triton_names():
        recipe.release("optimizer.layer_wise_optimizer")
        recipe.release("transformer")
        with contextlib.suppress(ImportError):
            recipe.release("models.mimo.model.base")  # imported where an optimizer is built
    recipe.pretend_to_have_transformer_engine()


def _be_a_rank(runs: tuple[Run, ...], rank: int, folder: Path) -> None:
    import traceback

    import torch.distributed as dist

    from tests.functional_tests.backport import recipe

    size = runs[0].ranks
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    answer: Any
    try:
        store = dist.FileStore(str(folder / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        recipe.release("parallel_state").initialize_model_parallel(create_gloo_process_groups=False)
        answer = [recipe.train(run) for run in runs]
    except BaseException as error:  # whatever it was, it is the answer
        text = f"{type(error).__name__}: {error}".rstrip(": ")
        answer = (text, traceback.format_exc())
    partial = folder / f"{rank}.partial"
    partial.write_bytes(pickle.dumps(answer))
    partial.rename(folder / str(rank))


def _train_on_ranks(runs: tuple[Run, ...]) -> Any:
    """Outcomes by rank and run, or message and traceback of the first rank that failed."""
    size = runs[0].ranks
    with tempfile.TemporaryDirectory() as name:
        folder, ranks = Path(name), {}
        for rank in range(size):
            child = os.fork()
            if child == 0:
                _be_a_rank(runs, rank, folder)
                os._exit(0)
            ranks[child] = rank
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + RUN_LIMIT_S * len(runs)
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
            return (f"ranks {sorted(ranks.values())} gave no answer in time", "")
        return [answers[rank] for rank in range(size)]


def _serve_tree(tree: str, requests: IO[bytes], answers: IO[bytes]) -> None:
    _import_release(tree)
    while (runs := _receive(requests)) is not None:
        _send(answers, _train_on_ranks(runs))


def _fork_for_tree(tree: str) -> tuple[IO[bytes], IO[bytes]]:
    """A process for this tree: the stream of requests to it, and that of its answers."""
    requests_out, requests_in = os.pipe()
    answers_out, answers_in = os.pipe()
    if os.fork() == 0:
        # Other trees' processes end when their requests do, so none may be held open here.
        os.closerange(requests_in, requests_in + 1)
        try:
            _serve_tree(tree, os.fdopen(requests_out, "rb"), os.fdopen(answers_in, "wb"))
        except BaseException:
            sys.excepthook(*sys.exc_info())
        os._exit(0)
    os.close(requests_out)
    os.close(answers_in)
    return os.fdopen(requests_in, "wb"), os.fdopen(answers_out, "rb")


def main() -> None:
    """Serves requests that come on standard input until it ends."""
    import logging

    import torch
    import torch.distributed.tensor

    torch.set_num_threads(1)
    # The first optimizer imports much of PyTorch, which every rank would do again.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    logging.disable(logging.WARNING)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a release prints is no answer
    os.setpgrp()
    trees: dict[str, tuple[IO[bytes], IO[bytes]]] = {}
    while (request := _receive(sys.stdin.buffer)) is not None:
        tree, runs = request
        if tree not in trees:
            trees[tree] = _fork_for_tree(tree)
        _send(trees[tree][0], runs)
        answer = _receive(trees[tree][1])
        if answer is None:
            answer = (f"the process for {tree} ended, see its messages above", "")
        _send(answers, answer)
    os.killpg(0, signal.SIGKILL)  # its own group: the processes for trees, and itself


if __name__ == "__main__":
    main()
