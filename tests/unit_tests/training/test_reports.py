"""Log line, metrics file, progress bar."""

from __future__ import annotations

import argparse
import io
import json
import math
import re
from pathlib import Path

import pytest

from megatron.training.failure import PlainError
from megatron.training.reports import MetricsFile, ProgressBar, Reporter
from megatron.training.step import StepResult

METRICS = (
    "iteration",
    "lm_loss",
    "grad_norm",
    "learning_rate",
    "consumed_samples",
    "elapsed_ms",
    "skipped",
)


def arguments(folder: Path, **changes: object) -> argparse.Namespace:
    values = {
        "rank": 0,
        "train_iters": 4,
        "global_batch_size": 8,
        "log_interval": 2,
        "tensorboard_dir": None,
        "tensorboard_log_interval": 1,
        "metrics_jsonl": str(folder / "metrics.jsonl"),
    }
    return argparse.Namespace(**(values | changes))


def report(args: argparse.Namespace, results: list[StepResult]) -> list[dict[str, object]]:
    reporter = Reporter(args)
    for index, result in enumerate(results):
        reporter.iteration(index + 1, result, 0.1, 1.0, 12.5, index + 1 == len(results))
    reporter.finish("ab" * 32)
    lines = Path(args.metrics_jsonl).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def step(loss: float, skipped: bool = False, zeros: int | None = None) -> StepResult:
    return StepResult({"lm loss": loss}, skipped, 1.0 / 3.0, zeros)


def test_metrics_hold_every_iteration_and_the_hash(tmp_path: Path) -> None:
    loss = 0.1 + 0.2
    lines = report(arguments(tmp_path), [step(loss), step(2.0, skipped=True)])
    assert [tuple(line) for line in lines] == [METRICS, METRICS, ("master_sha256",)]
    assert lines[0]["lm_loss"] == loss and lines[0]["grad_norm"] == 1.0 / 3.0
    assert [line["consumed_samples"] for line in lines[:2]] == [8, 16]
    assert [line["skipped"] for line in lines[:2]] == [False, True]
    assert lines[2] == {"master_sha256": "ab" * 32}


def test_metrics_stay_json_when_losses_are_not_numbers(tmp_path: Path) -> None:
    lines = report(arguments(tmp_path), [step(math.nan), step(math.inf)])
    assert [line["lm_loss"] for line in lines[:2]] == [None, None]


def test_metrics_that_cannot_be_written_are_the_users_to_put_right(tmp_path: Path) -> None:
    with pytest.raises(PlainError, match="--metrics-jsonl"):
        MetricsFile(str(tmp_path))


def test_the_log_line_is_megatrons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = [step(2.0), step(4.0), step(5.0), step(7.0, skipped=True, zeros=3)]
    report(arguments(tmp_path), results)
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r" \[[\d: -]+\] iteration        2/       4 \| consumed samples:           16 \| "
        r"elapsed time per iteration \(ms\): \d+\.\d \| learning rate: 1\.000000E-01 \| "
        r"global batch size:     8 \| lm loss: 3\.000000E\+00 \| loss scale: 1\.0 \| "
        r"grad norm: 0\.333 \| number of skipped iterations:   0 \| "
        r"number of nan iterations:   0 \|",
        first,
    )
    # The skipped iteration is counted and left out of the average.
    assert "lm loss: 5.000000E+00" in second and "num zeros: 3" in second
    assert "skipped iterations:   1 |" in second


def test_only_the_first_rank_speaks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(arguments(tmp_path, rank=1, log_interval=1))
    reporter.iteration(1, step(1.0), 0.1, 1.0, 1.0, True)
    reporter.evaluation("validation loss", 1, {"lm loss": 1.0})
    reporter.print("hello")
    reporter.finish("ab")
    assert capsys.readouterr().out == "" and not list(tmp_path.iterdir())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal_and_none_in_a_pipe() -> None:
    pytest.importorskip("tqdm")
    for stream, expected in ((Terminal(), True), (io.StringIO(), False)):
        bar = ProgressBar(2, stream)
        bar.advance(1.25)
        bar.print("")
        bar.close()
        assert ("loss 1.2500" in stream.getvalue()) == expected
        assert bool(stream.getvalue()) == expected


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    report(arguments(tmp_path, tensorboard_dir=str(tmp_path / "board")), [step(2.0)])
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert [e.value for e in events.Scalars("lm loss")] == [2.0]
    assert [e.value for e in events.Scalars("learning-rate")] == [pytest.approx(0.1)]
