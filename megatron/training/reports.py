"""What a job tells: log lines, metrics file, TensorBoard, progress bar. All on rank 0."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TextIO

from .failure import PlainError
from .step import StepResult


@dataclass
class LogInterval:
    """What happened since the last log line."""

    started: float = field(default_factory=time.perf_counter)
    iterations: int = 0
    advanced: int = 0
    skipped: int = 0
    not_finite: int = 0
    loss_sums: dict[str, float] = field(default_factory=dict)

    def add(self, result: StepResult) -> None:
        """Counts one iteration; losses of skipped ones are left out of the averages."""
        self.iterations += 1
        finite = all(math.isfinite(loss) for loss in result.losses.values())
        self.not_finite += not finite
        if result.skipped:
            self.skipped += 1
            return
        self.advanced += 1
        for key, loss in result.losses.items():
            self.loss_sums[key] = self.loss_sums.get(key, 0.0) + loss

    def average_losses(self) -> dict[str, float]:
        """Average over the iterations that were not skipped."""
        return {key: total / max(1, self.advanced) for key, total in self.loss_sums.items()}


class MetricsFile:
    """JSON lines: one object per iteration, and a last one with the hash of the masters.

    Floats are written with as many digits as bring them back bit for bit. NaN and infinities,
    which JSON has no words for, become null.
    """

    def __init__(self, path: str) -> None:
        try:
            self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 (closed by close())
        except OSError as error:
            raise PlainError(f"--metrics-jsonl {path}: {error.strerror}") from error

    def write(self, **values: Any) -> None:
        """Appends one line and hands it to the system, so that a killed job keeps its lines."""
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in values.items()
        }
        self._file.write(json.dumps(finite) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class ProgressBar:
    """A tqdm bar on a terminal; nothing in a pipe or without tqdm."""

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        stream = stream or sys.stderr
        self._bar: Any = None
        if total and stream.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=total, unit="it", file=stream, dynamic_ncols=True)

    def advance(self, loss: float | None) -> None:
        """Counts one iteration and shows its loss."""
        if self._bar is not None:
            if loss is not None:
                self._bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
            self._bar.update()

    def print(self, line: str) -> None:
        """Prints above the bar."""
        if self._bar is not None:
            self._bar.clear()
        print(line, flush=True)
        if self._bar is not None:
            self._bar.refresh()

    def close(self) -> None:
        """Leaves the bar on the screen."""
        if self._bar is not None:
            self._bar.close()


class Reporter:
    """Everything that rank 0 writes; on other ranks a reporter that writes nothing."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.active = args.rank == 0
        self.interval = LogInterval()
        self._metrics: MetricsFile | None = None
        self._board: Any = None
        self._bar = ProgressBar(args.train_iters if self.active else 0)
        if self.active and args.metrics_jsonl is not None:
            self._metrics = MetricsFile(args.metrics_jsonl)
        if self.active and args.tensorboard_dir is not None:
            self._board = _summary_writer(args.tensorboard_dir)

    def print(self, line: str) -> None:
        """Prints a line on rank 0."""
        if self.active:
            self._bar.print(line)

    def iteration(
        self,
        iteration: int,
        result: StepResult,
        learning_rate: float,
        loss_scale: float,
        elapsed_ms: float,
        last: bool,
    ) -> None:
        """Reports one iteration; prints a log line at every ``--log-interval`` and at the last."""
        if not self.active:
            return
        args = self.args
        consumed = iteration * args.global_batch_size
        self.interval.add(result)
        if self._metrics is not None:
            self._metrics.write(
                iteration=iteration,
                lm_loss=result.losses.get("lm loss"),
                grad_norm=result.grad_norm,
                learning_rate=learning_rate,
                consumed_samples=consumed,
                elapsed_ms=elapsed_ms,
                skipped=result.skipped,
            )
        if self._board is not None and iteration % args.tensorboard_log_interval == 0:
            self._write_board(iteration, result, learning_rate, loss_scale, elapsed_ms)
        if iteration % args.log_interval == 0 or last:
            self._bar.print(
                log_line(
                    iteration,
                    args.train_iters,
                    consumed,
                    args.global_batch_size,
                    self.interval,
                    result,
                    learning_rate,
                    loss_scale,
                )
            )
            self.interval = LogInterval()
        self._bar.advance(result.losses.get("lm loss"))

    def _write_board(
        self,
        iteration: int,
        result: StepResult,
        learning_rate: float,
        loss_scale: float,
        elapsed_ms: float,
    ) -> None:
        points = {
            **result.losses,
            "learning-rate": learning_rate,
            "loss-scale": loss_scale,
            "grad-norm": result.grad_norm,
            "num-zeros": result.num_zeros,
            "iteration-time": elapsed_ms / 1000.0,
        }
        for name, value in points.items():
            if value is not None:
                self._board.add_scalar(name, value, iteration)

    def evaluation(self, title: str, iteration: int, losses: dict[str, float]) -> None:
        """Reports an evaluation; its time is not counted into the next log line."""
        if not self.active:
            return
        text = f" {title} at iteration {iteration} |"
        for key, loss in losses.items():
            text += f" {key} value: {loss:.6E} | {key} PPL: {math.exp(min(20.0, loss)):.6E} |"
            if self._board is not None:
                self._board.add_scalar(f"{key} {title}", loss, iteration)
        self._bar.print(text)

    def finish(self, master_sha256: str | None) -> None:
        """Writes the last line of the metrics file and closes everything."""
        if self._metrics is not None:
            if master_sha256 is not None:
                self._metrics.write(master_sha256=master_sha256)
            self._metrics.close()
        if self._board is not None:
            self._board.close()
        self._bar.close()


def log_line(
    iteration: int,
    train_iters: int,
    consumed_samples: int,
    global_batch_size: int,
    interval: LogInterval,
    result: StepResult,
    learning_rate: float,
    loss_scale: float,
) -> str:
    """Returns Megatron's log line. Losses are averages over the interval, the rest is the latest."""
    elapsed_ms = (time.perf_counter() - interval.started) * 1000.0 / max(1, interval.iterations)
    now = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
    parts = [
        f" [{now}] iteration {iteration:8d}/{train_iters:8d}",
        f"consumed samples: {consumed_samples:12d}",
        f"elapsed time per iteration (ms): {elapsed_ms:.1f}",
        f"learning rate: {learning_rate:.6E}",
        f"global batch size: {global_batch_size:5d}",
        *(f"{key}: {loss:.6E}" for key, loss in interval.average_losses().items()),
        f"loss scale: {loss_scale:.1f}",
    ]
    if result.grad_norm is not None:
        parts.append(f"grad norm: {result.grad_norm:.3f}")
    if result.num_zeros is not None:
        parts.append(f"num zeros: {result.num_zeros}")
    parts.append(f"number of skipped iterations: {interval.skipped:3d}")
    parts.append(f"number of nan iterations: {interval.not_finite:3d}")
    return " | ".join(parts) + " |"


def _summary_writer(folder: str) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise PlainError(
            "--tensorboard-dir needs the package tensorboard: pip install "
            "'megatron-layerwise[tensorboard]'"
        ) from error
    return SummaryWriter(log_dir=folder)
