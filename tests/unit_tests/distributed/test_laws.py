"""Laws L3, L4, L8 and L9: owners, gathers, agreement, and overlap that changes nothing but time."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.bucket_group import _ParamAndGradBucketGroup
from megatron.core.distributed.param_sync import InPlaceGather
from tests.ranks import run_ranks
from tests.training_run import Run, build, train, train_all

BASE = Run()
VARIANTS = {
    "muon_bf16": BASE,
    "muon_bf16_grads": BASE.but(grad_reduce_in_fp32=False),
    "muon_fp32": BASE.but(bf16=False),
    "muon_fp32_accumulation": BASE.but(grad_reduce_in_fp32=False, fp32_accumulation=True),
    "muon_averaged_tied": BASE.but(average_in_collective=True, tied=True),
    "muon_clipped": BASE.but(clip_grad=0.1),
    "adam": BASE.but(optimizer="adam"),
    "muon_one_bucket_group": BASE.but(single_bucket_group=True),
    "muon_legacy": BASE.but(layout="legacy"),
    "muon_legacy_fp32_tied": BASE.but(layout="legacy", bf16=False, tied=True),
}
OVERLAPS = [(True, False), (False, True), (True, True)]


def overlap_runs(run: Run) -> list[Run]:
    return [run] + [
        run.but(overlap_param_gather=param, overlap_grad_reduce=grad) for param, grad in OVERLAPS
    ]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_overlap_changes_no_bit(variant, ranks, microbatches):
    if microbatches == 3 and ranks == 4:
        ranks = 2
    runs = overlap_runs(VARIANTS[variant].but(microbatches=microbatches))
    for results in run_ranks(train_all, ranks, runs):
        for run, result in zip(runs[1:], results[1:], strict=True):
            result.check_equal(
                results[0], f"{run.overlap_param_gather=} {run.overlap_grad_reduce=}"
            )


@pytest.mark.parametrize("ranks", [1, 4])
def test_repeated_runs_have_the_same_bits(ranks):
    runs = [BASE, BASE, BASE.but(overlap_param_gather=True, overlap_grad_reduce=True)]
    for first, second, third in run_ranks(train_all, ranks, runs):
        second.check_equal(first)
        third.check_equal(first)


def test_different_bits_are_noticed():
    """The comparison itself: another seed, or another learning rate, does not compare equal."""
    other = BASE.but(seed=8)
    faster = BASE.but(optimizer_options={"lr": 0.03})
    first, second, third = run_ranks(train_all, 1, [BASE, other, faster])[0]
    for result in (second, third):
        with pytest.raises(AssertionError):
            result.check_equal(first)


def all_ranks_hold_the_same(run: Run) -> list[str]:
    """Names of parameters that differ between ranks after training."""
    different = []

    def compare(ddp: DistributedDataParallel, optimizer: object, step: int) -> None:
        if run.overlap_param_gather:
            ddp.start_param_sync(force_sync=True)
        for name, param in ddp.module.named_parameters():
            mine = param.detach().float()
            first = mine.clone()
            dist.broadcast(first, 0)
            if not torch.equal(mine, first):
                different.append(f"{name} after step {step}")

    train(run, compare)
    return different


@pytest.mark.parametrize("layout", ["padded", "legacy"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("single", [False, True])
def test_every_rank_computes_with_the_same_weights(overlap, single, layout):
    run = BASE.but(overlap_param_gather=overlap, single_bucket_group=single, layout=layout)
    for different in run_ranks(all_ranks_hold_the_same, 2, run):
        assert different == []


def owners_of_groups(run: Run) -> list[set[bool]]:
    ddp, _ = build(run)
    return [
        {bool(p.is_managed_by_layer_wise_optimizer) for p in group.params}
        for group in ddp.all_bucket_groups
    ]


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("fp32_accumulation", [False, True])
def test_no_bucket_group_has_two_owners(single, fp32_accumulation):
    run = BASE.but(
        single_bucket_group=single, fp32_accumulation=fp32_accumulation, grad_reduce_in_fp32=False
    )
    groups = run_ranks(owners_of_groups, 2, run)[0]
    assert all(len(owners) == 1 for owners in groups)
    assert {owner for owners in groups for owner in owners} == {True, False}


def mix_owners() -> str:
    ddp, _ = build(BASE)
    buckets = [bucket for buffer in ddp.buffers for bucket in buffer.buckets]
    try:
        _ParamAndGradBucketGroup(buckets, ddp.ddp_config, ddp.dp_group, 1)
    except ValueError as error:
        return str(error)
    return ""


def test_a_bucket_group_of_two_owners_cannot_be_formed():
    assert "partition_buckets" in run_ranks(mix_owners, 1)[0]


def count_gathers(run: Run) -> list[list[Counter]]:
    """For each step how often each bucket was gathered, and the order of gathers and installs."""
    steps: list[Counter] = []
    counter: Counter = Counter()
    original = InPlaceGather.gather

    def counting(self, *args):
        counter[id(self)] += 1
        return original(self, *args)

    def after(ddp: DistributedDataParallel, optimizer: object, step: int) -> None:
        steps.append(Counter(counter))
        counter.clear()

    InPlaceGather.gather = counting
    try:
        train(run, after)
    finally:
        InPlaceGather.gather = original
    return [steps, [Counter(counter)]]


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_each_bucket_is_gathered_once_per_step(overlap, microbatches):
    run = BASE.but(overlap_param_gather=overlap, microbatches=microbatches)
    steps, rest = run_ranks(count_gathers, 2, run)[0]
    buckets = len(steps[-1])
    assert buckets >= 3
    assert all(set(step.values()) == {1} and len(step) == buckets for step in steps)
    # With overlap the last update is gathered when training ends, without it at once.
    assert sum(rest[0].values()) == (buckets if overlap else 0)


def disagree(difference: str) -> str:
    parallel_state.initialize_model_parallel()
    rank = dist.get_rank()
    run = BASE
    if difference == "shape" and rank == 1:
        run = BASE.but(biases=False)
    if difference == "bucket_size" and rank == 1:
        run = BASE.but(bucket_size=2_000)
    try:
        build(run)
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("difference", ["shape", "bucket_size"])
def test_ranks_that_disagree_on_the_layout_are_told_the_first_difference(difference):
    for message in run_ranks(disagree, 2, difference):
        assert "ranks 0 and 1" in message and "rank 0 has" in message
        assert "bucket" in message
