"""What the machinery costs on one rank: the job's step against a plain PyTorch step.

    python -m benchmarks.train_step [--steps N] [--bf16]

Both train the same GPT on the same batches in one process, step by step in turns, so that whatever
else the machine does hits both. The plain step has ``torch.optim.Muon`` for the matrices and
``torch.optim.AdamW`` for the rest. Prints median times and their ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

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
    *("--num-layers", "4", "--hidden-size", "256", "--num-attention-heads", "4"),
    *("--seq-length", "256", "--max-position-embeddings", "256"),
    *("--micro-batch-size", "4", "--global-batch-size", "8", "--train-iters", "1000"),
    *("--lr", "1e-3", "--lr-decay-style", "constant", "--clip-grad", "1.0"),
    *("--optimizer", "muon", "--use-distributed-optimizer", "--muon-nesterov"),
    *("--muon-coefficient-type", "simple", "--muon-no-split-qkv", "--muon-momentum", "0.95"),
    *("--muon-scale-mode", "shape_scaling", "--mock-data", "--distributed-backend", "gloo"),
    "--no-check-for-nan-in-loss-and-grad",
]


class PlainLoop:
    """A step as one writes it without any of this project's machinery."""

    def __init__(self, args: argparse.Namespace, model: torch.nn.Module) -> None:
        self.args = args
        self.model = model
        matrices, others = [], []
        for name, param in model.named_parameters():
            inside = param.dim() == 2 and "embedding" not in name and "output_layer" not in name
            (matrices if inside else others).append(param)
        self.params = matrices + others
        self.muon = torch.optim.Muon(matrices, lr=args.lr, weight_decay=args.weight_decay)
        self.adam = torch.optim.AdamW(others, lr=args.lr, weight_decay=args.weight_decay)

    def step(self, batches: Iterator[Any]) -> None:
        """One iteration over a global batch."""
        for _ in range(self.args.num_microbatches):
            output, loss_func = pretrain_gpt.forward_step(batches, self.model)
            loss, tokens, _ = loss_func(output)
            (loss / tokens / self.args.num_microbatches).backward()
        torch.nn.utils.clip_grad_norm_(self.params, self.args.clip_grad)
        self.muon.step()
        self.adam.step()
        self.muon.zero_grad()
        self.adam.zero_grad()


def main() -> int:
    """Prints the medians and their ratio; returns 1 if the ratio is above the target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=3)
    options, flags = parser.parse_known_args()
    os.environ.pop("WORLD_SIZE", None)
    args = parse_and_validate_args(argv=[*FLAGS, *flags])
    initialize_megatron(args)
    data = pretrain_gpt.data_iterators_provider(args)
    model, optimizer, scheduler = setup_model_and_optimizer(args, pretrain_gpt.model_provider)
    twin = pretrain_gpt.model_provider(
        args,
        core_transformer_config_from_args(args),
        ProcessGroupCollection.use_mpu_process_groups(),
    )
    plain = PlainLoop(args, twin)

    def job_step() -> None:
        train_step(args, pretrain_gpt.forward_step, data.train, model, optimizer, scheduler)

    contenders = {"job": job_step, "plain": lambda: plain.step(data.train)}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(options.warmup + options.steps):
        order = list(contenders.items())
        for name, step in order if index % 2 else order[::-1]:
            started = time.perf_counter()
            step()
            if args.device.type == "cuda":
                torch.cuda.synchronize()
            if index >= options.warmup:
                times[name].append(time.perf_counter() - started)
    leave_job()

    medians = {name: statistics.median(values) * 1000 for name, values in times.items()}
    ratio = medians["job"] / medians["plain"]
    print(f"{sum(p.numel() for p in plain.params):,} parameters, {options.steps} steps each")
    for name, median in medians.items():
        print(f"{name:>6}: {median:9.2f} ms per step (median)")
    print(f" ratio: {ratio:9.3f} (target: at most {TARGET})")
    return 0 if ratio <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
