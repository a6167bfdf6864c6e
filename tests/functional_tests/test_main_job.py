"""The main job, start to end, on real ranks: what must not change its bits, and what it writes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pretrain_gpt
from megatron.training.arguments import parse_and_validate_args
from megatron.training.step import LossFunc
from megatron.training.training import pretrain
from tests.ranks import RankError, run_ranks
from tests.unit_tests.training.command_line import command_line

Lines = list[dict[str, Any]]

MUON = ("--optimizer", "muon", "--use-distributed-optimizer", "--bf16", "--mock-data")
MXFP8 = ("--fp8-format", "e4m3", "--fp8-param-gather", "--reuse-grad-buf-for-mxfp8-param-ag")
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
EVALUATED = ("--eval-interval", "2", "--eval-iters", "1")
# Without overlap there is one bucket by default, and sums of floats depend on the buckets.
JOB = (
    *MUON,
    "--train-iters",
    "6",
    "--ddp-bucket-size",
    "20000",
    "--no-check-for-nan-in-loss-and-grad",
)


class BadBatches:
    """The GPT's forward step, with infinite losses in chosen calls."""

    def __init__(self, bad: tuple[int, ...]) -> None:
        self.bad = bad
        self.calls = 0

    def __call__(
        self, data: Iterator[Any], model: torch.nn.Module
    ) -> tuple[torch.Tensor, LossFunc]:
        output, loss_func = pretrain_gpt.forward_step(data, model)
        self.calls += 1
        return (output * math.inf if self.calls in self.bad else output), loss_func


def job(argv: list[str], bad: tuple[int, ...]) -> None:
    """The main job on the ranks of the current world."""
    argv = [*argv, "--distributed-backend", dist.get_backend()]
    try:
        pretrain(
            parse_and_validate_args(argv=argv),
            pretrain_gpt.data_iterators_provider,
            pretrain_gpt.model_provider,
            BadBatches(bad),
        )
    finally:
        torch.use_deterministic_algorithms(False)


def lines_of(
    folder: Path, *flags: str, ranks: int = 2, bad: tuple[int, ...] = (), timed: bool = False
) -> Lines:
    """Runs a job and returns its metrics, without times."""
    metrics = folder / "metrics.jsonl"
    run_ranks(job, ranks, [*command_line(*flags), "--metrics-jsonl", str(metrics)], bad)
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return [{k: v for k, v in line.items() if timed or k != "elapsed_ms"} for line in lines]


@pytest.mark.parametrize("precision", [(), MXFP8], ids=["bf16", "mxfp8"])
def test_overlap_skipped_steps_and_evaluations_change_no_bits(
    precision: tuple[str, ...], tmp_path: Path
) -> None:
    # The first iteration and the one after an evaluation are skipped: both run without pre-hooks.
    # Every iteration has two microbatches, and the evaluation after the second one two more.
    flags = (*JOB, *precision, *EVALUATED)
    bad = (1, 7)
    expected = lines_of(tmp_path, *flags, bad=bad)
    assert [line["skipped"] for line in expected[:-1]] == [True, False, True] + [False] * 3
    rates = [line["learning_rate"] for line in expected[:-1]]
    assert rates[1] == rates[0] and rates[3] == rates[2], "a skipped step does not advance the rate"
    assert len(set(rates)) == 4
    audited = (*OVERLAP, "--check-param-sync-interval", "1")
    for more in (OVERLAP, (*OVERLAP, "--align-param-gather"), audited):
        assert lines_of(tmp_path, *flags, *more, bad=bad) == expected


def test_a_run_repeats_bit_for_bit_and_evaluation_does_not_touch_it(tmp_path: Path) -> None:
    first = lines_of(tmp_path, *JOB, *OVERLAP)
    assert lines_of(tmp_path, *JOB, *OVERLAP) == first
    assert lines_of(tmp_path, *JOB, *OVERLAP, *EVALUATED) == first
    assert lines_of(tmp_path, *JOB, *OVERLAP, "--seed", "5")[-1] != first[-1]


def test_sums_in_fp32_of_bf16_gradients_change_bits_and_overlap_does_not(tmp_path: Path) -> None:
    job = (*JOB, "--grad-reduce-in-bf16")
    accumulated = lines_of(tmp_path, *job, "--ddp-reduce-scatter-with-fp32-accumulation", ranks=4)
    assert accumulated[-2]["lm_loss"] < accumulated[0]["lm_loss"]
    assert accumulated != lines_of(tmp_path, *job, ranks=4)
    flags = (*job, *MXFP8, "--ddp-reduce-scatter-with-fp32-accumulation")
    assert lines_of(tmp_path, *flags, *OVERLAP) == lines_of(tmp_path, *flags)


def test_an_exit_interval_ends_the_job_early_with_its_hash(tmp_path: Path) -> None:
    lines = lines_of(tmp_path, *JOB, "--exit-interval", "2", ranks=1, timed=True)
    assert [line.get("iteration") for line in lines] == [1, 2, None]
    assert len(lines[-1]["master_sha256"]) == 64
    assert all(line["elapsed_ms"] > 0 for line in lines[:-1])


@pytest.mark.parametrize(
    "optimizer",
    [
        ("--optimizer", "adam"),
        ("--optimizer", "adam", "--use-distributed-optimizer", "--fp16", "--loss-scale", "64"),
        ("--optimizer", "lion", "--use-distributed-optimizer", "--bf16"),
        ("--optimizer", "sgd", "--bf16", "--lr", "0.1"),
    ],
    ids=lambda flags: " ".join(flags[1:3]),
)
def test_every_optimizer_trains(optimizer: tuple[str, ...], tmp_path: Path) -> None:
    lines = lines_of(tmp_path, *optimizer, "--mock-data", "--train-iters", "12", ranks=1)
    assert lines[-2]["lm_loss"] < lines[0]["lm_loss"]
    assert not any(line["skipped"] for line in lines[:-1])


def test_a_loss_that_is_not_finite_stops_the_job(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="the loss of microbatch 1 on rank 0 is inf"):
        run_ranks(job, 1, command_line(*MUON), (2,))


def test_a_job_on_real_text_learns(tmp_path: Path) -> None:
    flags = ("--optimizer", "muon", "--use-distributed-optimizer", "--bf16")
    lines = lines_of(tmp_path, *flags, "--train-iters", "10", "--data-cache-path", str(tmp_path))
    assert lines[-2]["lm_loss"] < lines[0]["lm_loss"] - 0.5
