"""What the machinery costs on one rank: the job's step against a plain PyTorch step.

    python -m benchmarks.train_step [--steps N] [any flag of pretrain_gpt.py]

Both train the same GPT on the same batches in one process, step by step in turns, so that whatever
else the machine does hits both. Two pairs are measured:

- muon: Muon and AdamW, against ``torch.optim.Muon`` and ``torch.optim.AdamW``;
- adam: AdamW for everything, against ``torch.optim.AdamW``. The update rule is the same code on both
  sides, so this ratio is the cost of buffers, hooks, norms and reports alone.

Prints median times and their ratios. ``torch.optim.Muon`` multiplies in BF16, which CPUs without
BF16 instructions do slowly; Muon here multiplies in FP32 there and rounds, so expect a ratio well
below 1 on such a machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import pretrain_gpt
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.arguments import (
    core_transformer_config_from_args,
    parse_and_validate_args,
)
from megatron.training.initialize import initialize_megatron, leave_job
from megatron.training.training import setup_model_and_optimizer, train_step

TARGET = 1.05

FLAGS = [
    *("--num-layers", "2", "--hidden-size", "128", "--num-attention-heads", "4"),
    *("--seq-length", "128", "--max-position-embeddings", "128"),
    *("--micro-batch-size", "4", "--global-batch-size", "8", "--train-iters", "1000"),
    *("--lr", "1e-3", "--lr-decay-style", "constant", "--clip-grad", "1.0", "--mock-data"),
    *("--use-distributed-optimizer", "--distributed-backend", "gloo"),
    *("--muon-nesterov", "--muon-coefficient-type", "simple", "--muon-no-split-qkv"),
    *("--muon-momentum", "0.95", "--muon-scale-mode", "shape_scaling"),
]


class PlainLoop:
    """A step as one writes it without any of this project's machinery."""

    def __init__(self, args: argparse.Namespace, model: torch.nn.Module) -> None:
        self.args = args
        self.model = model
        matrices: list[torch.nn.Parameter] = []
        others: list[torch.nn.Parameter] = []
        for name, param in model.named_parameters():
            inside = param.dim() == 2 and "embedding" not in name and "output_layer" not in name
            (matrices if inside and args.optimizer == "muon" else others).append(param)
        self.params = matrices + others
        options = {"lr": args.lr, "weight_decay": args.weight_decay}
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(others, fused=True, **options)
        ]
        if matrices:
            self.optimizers.append(torch.optim.Muon(matrices, **options))

    def step(self, batches: Iterator[Any]) -> None:
        """One iteration over a global batch."""
        count = self.args.num_microbatches
        for number in range(count):
            with self._reductions(number + 1 == count):
                output, loss_func = pretrain_gpt.forward_step(batches, self.model)
                loss, tokens, _ = loss_func(output)
                (loss / tokens / count).backward()
        torch.nn.utils.clip_grad_norm_(self.params, self.args.clip_grad)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def _reductions(self, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """DDP is to reduce with the last microbatch only."""
        if isinstance(self.model, DistributedDataParallel) and not is_last:
            return self.model.no_sync()
        return contextlib.nullcontext()


def contenders(flags: list[str]) -> tuple[Callable[[], object], Callable[[], object], torch.device]:
    """Returns the job's step and the plain one, over models of the same size and values."""
    args = parse_and_validate_args(argv=[*FLAGS, *flags])
    initialize_megatron(args)
    data = pretrain_gpt.data_iterators_provider(args).train
    model, optimizer, scheduler = setup_model_and_optimizer(args, pretrain_gpt.model_provider)
    with args.device:
        twin = pretrain_gpt.model_provider(
            args,
            core_transformer_config_from_args(args),
            ProcessGroupCollection.use_mpu_process_groups(),
        )
    plain = PlainLoop(args, twin)

    def job_step() -> object:
        return train_step(args, pretrain_gpt.forward_step, data, model, optimizer, scheduler)

    return job_step, lambda: plain.step(data), args.device


def measure(flags: list[str], steps: int, warmup: int = 3) -> tuple[float, float]:
    """Returns the median milliseconds of the job's step and of the plain one."""
    job, plain, device = contenders(flags)
    # One rank on a CPU never waits, so its processor time is the step, whoever else is busy.
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    times: tuple[list[float], list[float]] = ([], [])
    for index in range(warmup + steps):
        pairs = list(zip((job, plain), times, strict=True))
        for step, taken in pairs if index % 2 else pairs[::-1]:
            started = clock()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if index >= warmup:
                taken.append((clock() - started) * 1000)
    leave_job()
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> int:
    """Prints the table; returns 1 if a ratio is above the target."""
    parser = argparse.ArgumentParser(description="Measures the cost of the job's machinery.")
    parser.add_argument("--steps", type=int, default=20, help="steps measured of each kind")
    options, flags = parser.parse_known_args()
    os.environ.pop("WORLD_SIZE", None)
    ratios = []
    print(
        f"{'':6}{'job, ms':>12}{'plain, ms':>12}{'ratio':>8}   (medians of {options.steps} steps)"
    )
    for optimizer in ("muon", "adam"):
        job, plain = measure([*flags, "--optimizer", optimizer], options.steps)
        ratios.append(job / plain)
        print(f"{optimizer:6}{job:12.2f}{plain:12.2f}{ratios[-1]:8.3f}", flush=True)
    print(f"target: at most {TARGET}")
    return 0 if max(ratios) <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
