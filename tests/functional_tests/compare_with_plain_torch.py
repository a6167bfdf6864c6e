"""The main job against a plain one-process loop, loss by loss (law L10).

    python -m tests.functional_tests.compare_with_plain_torch          data-parallel sizes
    python -m tests.functional_tests.compare_with_plain_torch --axes   every combination of TP, GTP,
                                                                       DP, EP and expert GTP

The plain loop has the same model code, the same batches and PyTorch's own AdamW; no buffers, no
process groups, no optimizer of this project. Its Muon is PyTorch's where both iterate in BF16, and
for FP32, which ``torch.optim.Muon`` cannot do, the one in this file.

Prints a table of losses and ends with code 1 if any FP32 run is off by more than 1e-5 (relative)
within 50 steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path

import torch

import pretrain_gpt
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.arguments import (
    core_transformer_config_from_args,
    parse_and_validate_args,
)
from megatron.training.initialize import initialize_megatron, leave_job
from megatron.training.losses import average_losses

STEPS = 50
TOLERANCE = 1e-5
ROOT = Path(__file__).parents[2]

FLAGS = [
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--seq-length", "64", "--max-position-embeddings", "64"),
    *("--micro-batch-size", "2", "--global-batch-size", "16", "--train-iters", str(STEPS)),
    *("--lr", "2e-3", "--lr-decay-style", "constant", "--weight-decay", "0.01"),
    *("--clip-grad", "0", "--optimizer", "muon", "--use-distributed-optimizer"),
    *("--muon-momentum", "0.95", "--muon-nesterov", "--muon-no-split-qkv"),
    *("--muon-coefficient-type", "simple", "--muon-scale-mode", "shape_scaling"),
    *("--distributed-backend", "gloo", "--log-interval", "1000"),
]

EXPERTS = ("--num-experts", "4", "--moe-ffn-hidden-size", "32")


def axes_flags(tp: int = 1, gtp: int = 1, ep: int = 1, expert_gtp: int = 1) -> list[str]:
    """The flags of parallel sizes, with a padded vocabulary that does not depend on them."""
    return [
        *("--tensor-model-parallel-size", str(tp)),
        *("--tensor-parallel-num-weight-shards", str(tp * gtp)),
        *("--expert-model-parallel-size", str(ep)),
        *("--expert-tensor-parallel-num-weight-shards", str(tp * expert_gtp)),
        *("--make-vocab-size-divisible-by", str(128 // tp)),
    ]


class Fp32Muon(torch.optim.Optimizer):
    """``torch.optim.Muon`` with its iteration in FP32 and torch's rule for the learning rate."""

    COEFFICIENTS = (3.4445, -4.7750, 2.0315)

    def __init__(
        self, params: Iterable[torch.Tensor], lr: float, weight_decay: float, momentum: float
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates every matrix from its ``.grad``."""
        for group in self.param_groups:
            for param in group["params"]:
                grad, state = param.grad, self.state[param]
                buffer = state.setdefault("momentum_buffer", torch.zeros_like(param))
                buffer.lerp_(grad, 1 - group["momentum"])
                update = self._orthogonal(grad.lerp(buffer, group["momentum"]))
                rows, columns = param.shape
                rate = group["lr"] * max(1.0, rows / columns) ** 0.5
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(rate * update)

    def _orthogonal(self, matrix: torch.Tensor) -> torch.Tensor:
        a, b, c = self.COEFFICIENTS
        tall = matrix.size(0) > matrix.size(1)
        x = matrix.T if tall else matrix
        x = x / x.norm()
        for _ in range(5):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x.T if tall else x


def plain_losses(flags: list[str], bf16_iteration: bool) -> list[float]:
    """Trains in this process with plain PyTorch; returns the loss of every step."""
    args = parse_and_validate_args(argv=flags)
    initialize_megatron(args)
    data = pretrain_gpt.data_iterators_provider(args)
    model = pretrain_gpt.model_provider(
        args,
        core_transformer_config_from_args(args),
        ProcessGroupCollection.use_mpu_process_groups(),
    )
    matrices, decayed, undecayed = [], [], []
    for name, param in model.named_parameters():
        if param.dim() < 2:
            undecayed.append(param)
        elif "embedding" in name or "output_layer" in name:
            decayed.append(param)
        else:
            matrices.append(param)
    options = {"lr": args.lr, "weight_decay": args.weight_decay, "momentum": args.muon_momentum}
    muon = torch.optim.Muon if bf16_iteration else Fp32Muon
    optimizers = [
        muon(matrices, **options),
        torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": args.weight_decay},
                {"params": undecayed, "weight_decay": 0.0},
            ],
            lr=args.lr,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_eps,
        ),
    ]
    losses = list(_loop(args, data.train, model, optimizers))
    leave_job()
    return losses


def _loop(
    args: argparse.Namespace,
    batches: Iterator[object],
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
) -> Iterator[float]:
    for _ in range(args.train_iters):
        samples = []
        for _ in range(args.num_microbatches):
            output, loss_func = pretrain_gpt.forward_step(batches, model)
            loss, tokens, losses = loss_func(output)
            (loss / tokens / args.num_microbatches).backward()
            samples.append(losses)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield average_losses(samples, None)["lm loss"]


def job_losses(ranks: int, flags: list[str]) -> list[float]:
    """Trains with ``pretrain_gpt.py`` under torchrun; returns the loss of every step."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = os.path.join(folder, "metrics.jsonl")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), "pretrain_gpt.py", *flags]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, "--metrics-jsonl", metrics],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
        return losses_in(metrics)


def losses_in(metrics: str) -> list[float]:
    """Returns the losses in a metrics file."""
    lines = [json.loads(line) for line in Path(metrics).read_text(encoding="utf-8").splitlines()]
    return [line["lm_loss"] for line in lines if "lm_loss" in line]


def difference(losses: list[float], reference: list[float]) -> float:
    """Returns the largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))


def compare_axes(modes: tuple[str, ...] = ("duplicated", "distributed")) -> int:
    """Prints the largest difference of every combination of parallel axes; returns the exit code."""
    fp32 = [*FLAGS, "--muon-fp32-matmul-prec", "highest", "--mock-data"]
    dense = plain_losses(fp32, bf16_iteration=False)
    experts = plain_losses([*fp32, *EXPERTS], bf16_iteration=False)
    print(f"Largest relative difference over {STEPS} steps, everything in FP32")
    print(
        f"{'TP':>4}{'GTP':>5}{'DP':>4}{'EP':>4}{'expert GTP':>12}"
        + "".join(f"{m:>14}" for m in modes)
    )
    worst = 0.0
    for tp, gtp, dp in product((1, 2), (1, 2, 4), (1, 2)):
        if tp * gtp * dp <= 8:
            flags = [*fp32, *axes_flags(tp, gtp)]
            worst = max(worst, _row((tp, gtp, dp, "-", "-"), tp * gtp * dp, flags, modes, dense))
    for ep, expert_gtp in product((1, 2), (1, 2)):
        for gtp in (1, expert_gtp) if expert_gtp > 1 else (1,):
            ranks = max(ep * expert_gtp, gtp, 2)
            flags = [*fp32, *EXPERTS, *axes_flags(1, gtp, ep, expert_gtp)]
            sizes = (1, gtp, ranks // gtp, ep, expert_gtp)
            worst = max(worst, _row(sizes, ranks, flags, modes, experts))
    print(f"{'within' if worst <= TOLERANCE else 'NOT within'} {TOLERANCE:g}")
    return 0 if worst <= TOLERANCE else 1


def _row(
    sizes: tuple[object, ...],
    ranks: int,
    flags: list[str],
    modes: tuple[str, ...],
    reference: list[float],
) -> float:
    found = [
        difference(job_losses(ranks, [*flags, "--muon-tp-mode", mode]), reference) for mode in modes
    ]
    widths = (4, 5, 4, 4, 12)
    line = "".join(f"{size!s:>{width}}" for size, width in zip(sizes, widths, strict=True))
    print(line + "".join(f"{value:>14.2e}" for value in found), flush=True)
    return max(found)


def main() -> int:
    """Prints the table; returns the exit code."""
    torch.set_num_threads(1)
    if "--axes" in sys.argv[1:]:
        return compare_axes()
    fp32 = [*FLAGS, "--muon-fp32-matmul-prec", "highest"]
    bf16 = [*FLAGS, "--muon-fp32-matmul-prec", "medium"]
    plain = plain_losses(fp32, bf16_iteration=False)
    columns = {f"DP {ranks}": job_losses(ranks, fp32) for ranks in (1, 2, 4)}
    rows = [0, 1, 2, 4, 9, 19, 29, 39, 49]

    print(f"Losses over {STEPS} steps, everything in FP32")
    print(f"{'step':>22}{'plain torch':>16}" + "".join(f"{name:>16}" for name in columns))
    for row in rows:
        values = [plain[row], *(losses[row] for losses in columns.values())]
        print(f"{row + 1:>22}" + "".join(f"{value:>16.9f}" for value in values))
    worst = {name: difference(losses, plain) for name, losses in columns.items()}
    print(f"{'largest difference':>22}{'':>16}" + "".join(f"{w:>16.2e}" for w in worst.values()))

    muon = difference(job_losses(1, bf16), plain_losses(bf16, bf16_iteration=True))
    print(f"DP 1 against torch.optim.Muon, both iterating in BF16: {muon:.2e}")
    good = max(worst.values()) <= TOLERANCE
    print(f"{'within' if good else 'NOT within'} {TOLERANCE:g}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
