"""Law L10: parallel sizes change only rounding, against a plain one-process loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import pretrain_gpt
from megatron.training.arguments import parse_and_validate_args
from megatron.training.training import pretrain
from tests.functional_tests.jobs import losses_of, run_jobs
from tests.ranks import run_ranks

from .compare_with_plain_torch import (
    EXPERTS,
    FLAGS,
    TOLERANCE,
    axes_flags,
    difference,
    losses_in,
    plain_losses,
)

SMALL = [
    *FLAGS,
    *("--num-layers", "1", "--hidden-size", "32", "--seq-length", "16", "--mock-data"),
    *("--micro-batch-size", "1", "--global-batch-size", "8"),
    *("--muon-fp32-matmul-prec", "highest"),
]


def plain(*more: str) -> list[float]:
    """The oracle's losses."""
    try:
        return plain_losses([*SMALL, *more], bf16_iteration=False)
    finally:
        torch.use_deterministic_algorithms(False)


def job(metrics: str, more: list[str]) -> None:
    """The main job on the ranks of the current world."""
    args = parse_and_validate_args(argv=[*SMALL, "--metrics-jsonl", metrics, *more])
    try:
        pretrain(
            args,
            pretrain_gpt.data_iterators_provider,
            pretrain_gpt.model_provider,
            pretrain_gpt.forward_step,
        )
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def reference() -> list[float]:
    """Losses of the plain loop."""
    return run_ranks(plain, 1)[0]


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (1, []),
        (2, ["--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "4000"]),
        (4, []),
        (4, ["--calculate-per-token-loss"]),
        (2, ["--layer-wise-param-layout", "legacy"]),
    ],
    ids=["dp1", "dp2-overlap", "dp4", "dp4-per-token", "dp2-legacy"],
)
def test_losses_agree_with_a_plain_loop(
    ranks: int, more: list[str], reference: list[float], tmp_path: Path
) -> None:
    metrics = str(tmp_path / "metrics.jsonl")
    run_ranks(job, ranks, metrics, more)
    losses = losses_in(metrics)
    assert reference[-1] < reference[0] - 0.1, "a model that learns nothing proves nothing"
    assert difference(losses, reference) < TOLERANCE


@pytest.mark.parametrize(
    ("tp", "gtp", "dp", "mode"),
    [(1, 2, 2, "duplicated"), (2, 2, 1, "distributed"), (1, 4, 1, "distributed")],
)
def test_tensor_parallel_and_gtp_agree_with_a_plain_loop(
    tp: int, gtp: int, dp: int, mode: str, reference: list[float]
) -> None:
    # With 32 rows and shards of at least 16, two of four GTP ranks hold only padding.
    flags = [*SMALL, *axes_flags(tp, gtp), "--muon-tp-mode", mode]
    (lines,) = run_jobs(tp * gtp * dp, flags)
    assert difference(losses_of(lines), reference) < TOLERANCE


def test_experts_agree_with_a_plain_loop() -> None:
    reference = run_ranks(plain, 1, *EXPERTS)[0]
    flags = [*SMALL, *EXPERTS, *axes_flags(gtp=2, ep=2, expert_gtp=2)]
    (lines,) = run_jobs(4, [*flags, "--muon-tp-mode", "distributed"])
    assert reference[-1] < reference[0] - 0.1
    assert difference(losses_of(lines), reference) < TOLERANCE
