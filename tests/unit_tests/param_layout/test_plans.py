"""Layouts as arithmetic: alignment, order, whole matrices, balance (laws L6 and L8)."""

import itertools
import math

import pytest

from megatron.core.param_layout.arithmetic import (
    bucket_end_divisor,
    newton_schulz_cost,
    pad_to_divisor,
)
from megatron.core.param_layout.plans import (
    BufferPlan,
    ParamSpec,
    byte_sharded_plan,
    padded_plan,
    unpadded_plan,
)

LLAMA_LAYER = [(768, 512), (512, 512), (4096, 512), (512, 2048)]
LAYERS = [ParamSpec(shape) for _ in range(6) for shape in LLAMA_LAYER]
MIXED = [ParamSpec(s) for s in [(50, 8), (8,), (24, 8), (8, 8), (8,), (32, 8), (8, 32), (7,)]]


def check_no_overlap(specs: list[ParamSpec], plan: BufferPlan) -> None:
    """Slots have their parameter's size, lie within their bucket and do not overlap."""
    taken: list[tuple[int, int]] = []
    for spec, slot in zip(specs, plan.slots, strict=True):
        assert slot.end - slot.start == spec.numel
        first, last = plan.bucket_ranges[slot.bucket_id]
        assert first <= slot.start and slot.end <= last
        taken.append((slot.start, slot.end))
    taken.sort()
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(taken))
    starts = [0] + [end for _, end in plan.bucket_ranges[:-1]]
    assert [start for start, _ in plan.bucket_ranges] == starts


@pytest.mark.parametrize("bucket_size", [None, 300, 100_000])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("specs", [MIXED, LAYERS], ids=["mixed", "llama"])
@pytest.mark.parametrize("make", [byte_sharded_plan, padded_plan])
def test_slots_are_disjoint_and_aligned(make, specs, ranks, bucket_size):
    plan = make(specs, bucket_size, ranks)
    check_no_overlap(specs, plan)
    assert all(slot.start % 64 == 0 for slot in plan.slots)
    assert all(
        (end - start) % bucket_end_divisor(ranks, False) == 0 for start, end in plan.bucket_ranges
    )


@pytest.mark.parametrize("make", [byte_sharded_plan, padded_plan])
def test_high_bus_bandwidth_padding_makes_buckets_multiples_of_65536(make):
    plan = make(LAYERS, 1_000_000, 3, True)
    assert all((end - start) % math.lcm(3, 2**16) == 0 for start, end in plan.bucket_ranges)


def test_unpadded_plan_wastes_nothing_and_fills_in_backprop_order():
    plan = unpadded_plan(MIXED, 200)
    check_no_overlap(MIXED, plan)
    assert plan.bucket_ranges[-1][1] == sum(spec.numel for spec in MIXED)
    assert [slot.start for slot in plan.slots] == sorted(
        (s.start for s in plan.slots), reverse=True
    )
    # Every bucket but the last closed at the first parameter that brought it to 200 elements.
    assert all(end - start >= 200 for start, end in plan.bucket_ranges[:-1])


@pytest.mark.parametrize("make", [byte_sharded_plan, padded_plan])
def test_buckets_are_stretches_of_backprop_order(make):
    plan = make(LAYERS, 1_000_000, 4)
    assert len(plan.bucket_ranges) > 2
    ids = [slot.bucket_id for slot in plan.slots]
    assert ids == sorted(ids, reverse=True)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("bucket_size", [None, 500_000, 3_000_000])
def test_padded_plan_keeps_matrices_whole(ranks, bucket_size):
    plan = padded_plan(LAYERS, bucket_size, ranks)
    shards = [plan.shard_of(index) for index in range(len(LAYERS))]  # raises if one is cut
    assert set(shards) == set(range(ranks))


def test_byte_sharded_plan_cuts_matrices_and_shard_of_says_so():
    plan = byte_sharded_plan([ParamSpec((100, 100))], None, 4)
    with pytest.raises(ValueError, match="spans shards"):
        plan.shard_of(0)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_uniform_layers_pack_without_waste(ranks):
    specs = [ParamSpec((128, 128)) for _ in range(8 * ranks)]
    plan = padded_plan(specs, None, ranks)
    assert plan.bucket_ranges == ((0, sum(spec.numel for spec in specs)),)


def test_padding_is_bounded_when_one_matrix_dominates():
    specs = [ParamSpec((64, 64)) for _ in range(4000)] + [ParamSpec((1024, 1024))]
    plan = padded_plan(specs, 400_000, 8)
    numel = sum(spec.numel for spec in specs)
    assert plan.bucket_ranges[-1][1] <= 1.2 * numel


def test_newton_schulz_work_is_balanced_over_the_buffer():
    plan = padded_plan(LAYERS * 4, 4_000_000, 4)
    work = [0, 0, 0, 0]
    for index, spec in enumerate(LAYERS * 4):
        work[plan.shard_of(index)] += spec.update_cost
    assert max(work) <= 1.1 * sum(work) / 4


def test_ties_go_to_construction_order():
    plan = padded_plan([ParamSpec((64, 64)) for _ in range(4)], None, 4)
    # Backprop order deals the last-constructed first.
    assert [plan.shard_of(index) for index in range(4)] == [3, 2, 1, 0]


@pytest.mark.parametrize("make", [byte_sharded_plan, padded_plan])
def test_tied_embedding_has_a_bucket_of_its_own(make):
    specs = [ParamSpec((50, 8), needs_own_bucket=True), ParamSpec((8, 8)), ParamSpec((8, 8))]
    plan = make(specs, None, 2)
    assert plan.slots[0].bucket_id == 1
    assert {plan.slots[1].bucket_id, plan.slots[2].bucket_id} == {0}


def test_newton_schulz_cost_is_of_the_logical_matrix():
    assert newton_schulz_cost((8, 32)) == newton_schulz_cost((32, 8)) == 32 * 64
    assert newton_schulz_cost((5, 3, 2)) == 30
    assert ParamSpec((8, 32), cost_shape=(16, 32)).update_cost == 32 * 256


def test_pad_to_divisor_is_exact_beyond_the_precision_of_floats():
    assert pad_to_divisor(2**60 + 1, 64) == 2**60 + 64
    assert pad_to_divisor(128, 128) == 128


def test_a_layout_for_8192_ranks_needs_no_tensors():
    specs = [ParamSpec((28672, 4096)), ParamSpec((4096, 14336))] * 8
    plan = padded_plan(specs, 8_192_000_000, 8192)
    assert plan.num_shards == 8192
    check_no_overlap(specs, plan)
