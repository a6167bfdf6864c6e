"""The main job over every parallel axis: what must not change its bits (laws L1, L2, L9)."""

from __future__ import annotations

import pytest

from tests.functional_tests.jobs import run_jobs
from tests.unit_tests.training.command_line import command_line

MXFP8 = ("--fp8-format", "e4m3")
STORED = ("--fp8-param-gather", "--reuse-grad-buf-for-mxfp8-param-ag")
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
AUDIT = ("--check-param-sync-interval", "1")
RECOMPUTE = (
    *("--recompute-granularity", "full"),
    *("--recompute-method", "uniform", "--recompute-num-layers", "1"),
)
JOB = (
    *("--optimizer", "muon", "--use-distributed-optimizer", "--bf16", "--mock-data"),
    *("--train-iters", "3", "--ddp-bucket-size", "6000", "--clip-grad", "1.0"),
)
EXPERTS = ("--num-experts", "4", "--moe-ffn-hidden-size", "32")


def sizes(tp: int = 1, gtp: int = 1, ep: int = 1, expert_gtp: int = 1) -> tuple[str, ...]:
    """The flags of parallel sizes."""
    return (
        *("--tensor-model-parallel-size", str(tp)),
        *("--tensor-parallel-num-weight-shards", str(tp * gtp)),
        *("--expert-model-parallel-size", str(ep)),
        *("--expert-tensor-parallel-num-weight-shards", str(tp * expert_gtp)),
    )


AXES = {
    "tp2-dp2": (4, (*sizes(tp=2), "--sequence-parallel")),
    "gtp2-dp2": (4, (*sizes(gtp=2), "--muon-tp-mode", "layer_sharded")),
    "tp2-gtp2": (4, (*sizes(tp=2, gtp=2), "--muon-tp-mode", "distributed")),
    "gtp2-legacy": (4, (*sizes(gtp=2), "--layer-wise-param-layout", "legacy")),
    "ep2-egtp2": (4, (*EXPERTS, *sizes(gtp=2, ep=2, expert_gtp=2))),
}


@pytest.mark.parametrize("axes", list(AXES))
def test_stored_weights_and_overlap_change_no_bits(axes: str) -> None:
    ranks, flags = AXES[axes]
    job = (*JOB, *MXFP8, *flags)
    # An audit would finish every gather before the forward pass could meet it.
    runs = [job, (*job, *STORED, *AUDIT), (*job, *STORED, *OVERLAP, *RECOMPUTE)]
    off, stored, overlapped = run_jobs(ranks, *(command_line(*run) for run in runs))
    assert stored == off
    assert overlapped == off


def test_bf16_reductions_and_eight_ranks_change_no_bits() -> None:
    job = (*JOB, *MXFP8, "--grad-reduce-in-bf16", *sizes(tp=2, gtp=2), "--train-iters", "2")
    runs = [(*job, *OVERLAP), (*job, *STORED, *OVERLAP, *AUDIT)]
    off, stored = run_jobs(8, *(command_line(*run) for run in runs))
    assert stored == off


def test_the_ways_to_share_matrices_out_agree() -> None:
    """``layer_sharded`` has the bits of ``duplicated``; the norm does not see how weights are cut."""
    fp32 = [flag for flag in JOB if flag != "--bf16"]
    job = (*fp32, "--muon-fp32-matmul-prec", "highest", "--clip-grad", "0")
    cut = (*job, *sizes(tp=2, gtp=2), "--make-vocab-size-divisible-by", "64")
    runs = [(*cut, "--muon-tp-mode", mode) for mode in ("duplicated", "layer_sharded")]
    runs.append((*cut, "--sequence-parallel"))
    duplicated, layer_sharded, by_tokens = run_jobs(4, *(command_line(*run) for run in runs))
    assert duplicated == layer_sharded
    (alone,) = run_jobs(1, command_line(*job))
    for lines in (duplicated, by_tokens):
        for line, other in zip(alone[:-1], lines[:-1], strict=True):
            assert abs(line["grad_norm"] - other["grad_norm"]) <= 1e-6 * line["grad_norm"]
