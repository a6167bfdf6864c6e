"""One error per job, wherever it starts, and an end within seconds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.training.failure import PlainError, errors_are_the_users, one_error_per_job

from .command_line import command_line

ROOT = Path(__file__).parents[3]

# Far above what an end takes, far below the ten minutes after which a collective gives up.
PROMPT_S = 60.0


def run_job(
    script: str, ranks: int, flags: list[str], **environment: str
) -> tuple[int, str, float]:
    """Runs a job under torchrun; returns exit code, standard error, and seconds."""
    started = time.monotonic()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(ranks), script, *flags),
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=PROMPT_S,
    )
    return done.returncode, done.stderr, time.monotonic() - started


JOB = command_line("--mock-data", "--train-iters", "50", "--global-batch-size", "12")


def test_a_rank_that_raises_ends_the_job_with_its_error_alone() -> None:
    code, errors, _ = run_job(
        "tests/functional_tests/failing_job.py", 3, JOB, FAILURE="raise", FAILING_RANK="1"
    )
    assert code != 0
    lines = [line for line in errors.splitlines() if "Traceback" in line]
    # The failing rank's, and the launcher's own.
    assert len(lines) == 2 and lines[0].startswith("rank 1: ")
    assert "rank 1: RuntimeError: the injected failure" in errors
    assert "rank 0: " not in errors and "rank 2: " not in errors


def test_a_killed_rank_ends_the_job() -> None:
    code, errors, _ = run_job(
        "tests/functional_tests/failing_job.py", 2, JOB, FAILURE="kill", FAILING_RANK="1"
    )
    assert code != 0
    assert "SIGKILL" in errors
    assert "gloo" not in errors, "a survivor's traceback says nothing about the cause"


def test_what_the_user_can_put_right_is_one_sentence(tmp_path: Path) -> None:
    flags = command_line("--data-path", str(tmp_path / "missing"))
    code, errors, _ = run_job("pretrain_gpt.py", 2, flags)
    assert code != 0
    said = [line for line in errors.splitlines() if "error: " in line and "rank " in line]
    assert len(said) == 1 and "missing" in said[0]
    assert errors.count("Traceback") == 1, "the launcher's own"


@pytest.mark.parametrize(
    ("error", "expected"),
    [(ValueError("a"), "error: a"), (OSError(2, "gone", "f"), "gone"), (ImportError("b"), "b")],
)
def test_alone_the_exit_code_is_1(
    error: Exception, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_, one_error_per_job(), errors_are_the_users():
        raise error
    assert exit_.value.code == 1
    message = capsys.readouterr().err
    assert expected in message and "Traceback" not in message


def test_other_errors_keep_their_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_, one_error_per_job():
        raise RuntimeError("deep inside")
    assert exit_.value.code == 1
    message = capsys.readouterr().err
    assert "Traceback" in message and "RuntimeError: deep inside" in message


def test_control_c_is_not_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_, one_error_per_job():
        raise KeyboardInterrupt
    assert exit_.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_only_expected_kinds_are_the_users() -> None:
    with pytest.raises(PlainError, match="no such file"), errors_are_the_users():
        raise FileNotFoundError("no such file")
    with pytest.raises(RuntimeError), errors_are_the_users():
        raise RuntimeError("a defect")
