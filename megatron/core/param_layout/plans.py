"""Layouts as pure functions from parameter shapes to places.

A plan knows no tensors and no process groups, so a layout for thousands of ranks is computed on one
machine, and every rank computes the same one: ties go to construction order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.core.param_layout.arithmetic import (
    newton_schulz_cost,
    pad_bucket_end,
    pad_param_start,
    pad_to_divisor,
    shard_divisor,
)

# A bucket of `ranks` equal shards is at least `ranks` times its largest parameter. Buckets grow until
# their parameters fill this share of that minimum, so padding stays below about a ninth.
MIN_FILL = 0.9


@dataclass(frozen=True)
class ParamSpec:
    """What a layout needs to know of a parameter.

    Attributes:
        shape: Shape of what this rank holds.
        needs_own_bucket: A tied embedding: its gradient is reduced a second time by its owner module.
        cost_shape: Shape of the logical matrix that its update works on, where that differs.
    """

    shape: tuple[int, ...]
    needs_own_bucket: bool = False
    cost_shape: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def update_cost(self) -> int:
        """Relative cost of this parameter's Muon update."""
        return newton_schulz_cost(self.cost_shape or self.shape)


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies in its buffer: elements ``start`` to ``end`` of bucket ``bucket_id``."""

    start: int
    end: int
    bucket_id: int


@dataclass(frozen=True)
class BufferPlan:
    """Places of all parameters of one buffer.

    Attributes:
        slots: One per parameter, in construction order.
        bucket_ranges: Element range of each bucket; bucket 0 is the first that backward completes.
        bucket_numel_unpadded: Elements of each bucket without its end padding (see the makers).
        num_shards: Equal shards that each bucket is cut into; ``None`` where it is not.
    """

    slots: tuple[Slot, ...]
    bucket_ranges: tuple[tuple[int, int], ...]
    bucket_numel_unpadded: tuple[int, ...]
    num_shards: int | None

    def shard_of(self, index: int) -> int:
        """The shard that holds all of parameter ``index``; :class:`ValueError` if it spans two."""
        if self.num_shards is None:
            raise ValueError("this layout has no shards")
        slot = self.slots[index]
        bucket_start, bucket_end = self.bucket_ranges[slot.bucket_id]
        shard_numel = (bucket_end - bucket_start) // self.num_shards
        first = (slot.start - bucket_start) // shard_numel
        last = (slot.end - 1 - bucket_start) // shard_numel
        if first != last:
            raise ValueError(f"parameter {index} at {slot} spans shards {first} to {last}")
        return first


def _backprop_buckets(
    specs: Sequence[ParamSpec], is_full: Callable[[list[int]], bool]
) -> list[list[int]]:
    """Cuts construction order, read backwards, into buckets: lists of parameter indices."""
    buckets: list[list[int]] = []
    current: list[int] = []
    for index in reversed(range(len(specs))):
        if specs[index].needs_own_bucket:
            buckets += [current, [index]]
            current = []
            continue
        current.append(index)
        if is_full(current):
            buckets.append(current)
            current = []
    buckets.append(current)
    return [bucket for bucket in buckets if bucket]


def _ordered(slots: dict[int, Slot]) -> tuple[Slot, ...]:
    return tuple(slots[index] for index in range(len(slots)))


def unpadded_plan(specs: Sequence[ParamSpec], bucket_size: int | None) -> BufferPlan:
    """Parameters back to back, for gradients that are all-reduced.

    A bucket closes once it holds ``bucket_size`` elements; ``None`` makes one bucket.
    """
    slots: dict[int, Slot] = {}
    ranges: list[tuple[int, int]] = []
    bucket_start = cursor = 0
    for index in reversed(range(len(specs))):
        slots[index] = Slot(cursor, cursor + specs[index].numel, len(ranges))
        cursor = slots[index].end
        if bucket_size is not None and cursor - bucket_start >= bucket_size:
            ranges.append((bucket_start, cursor))
            bucket_start = cursor
    if cursor > bucket_start:
        ranges.append((bucket_start, cursor))
    return BufferPlan(_ordered(slots), tuple(ranges), tuple(e - s for s, e in ranges), None)


def byte_sharded_plan(
    specs: Sequence[ParamSpec],
    bucket_size: int | None,
    num_shards: int,
    pad_for_high_nccl_busbw: bool = False,
) -> BufferPlan:
    """Flat equal shards that cut through parameters, for the distributed optimizer.

    Parameter starts and bucket ends are aligned; a bucket's unpadded size ends with its last
    parameter.
    """
    slots: dict[int, Slot] = {}
    ranges: list[tuple[int, int]] = []
    unpadded: list[int] = []
    cursor = 0

    def is_full(bucket: list[int]) -> bool:
        if bucket_size is None:
            return False
        numel = 0
        for index in bucket:
            numel = pad_param_start(numel) + specs[index].numel
        return numel >= bucket_size

    buckets = _backprop_buckets(specs, is_full)
    for bucket, following in zip(buckets, [*buckets[1:], None], strict=True):
        bucket_start = cursor
        for index in bucket:
            start = pad_param_start(cursor)
            cursor = start + specs[index].numel
            slots[index] = Slot(start, cursor, len(ranges))
        if following is not None and specs[following[0]].needs_own_bucket:
            # As in Megatron, the alignment before a tied embedding counts for the bucket it closes.
            cursor = pad_param_start(cursor)
        unpadded.append(cursor - bucket_start)
        cursor = pad_bucket_end(cursor, num_shards, pad_for_high_nccl_busbw)
        ranges.append((bucket_start, cursor))
    return BufferPlan(_ordered(slots), tuple(ranges), tuple(unpadded), num_shards)


def padded_plan(
    specs: Sequence[ParamSpec],
    bucket_size: int | None,
    num_shards: int,
    pad_for_high_nccl_busbw: bool = False,
) -> BufferPlan:
    """Equal shards that hold whole parameters, for the layer-wise optimizer.

    Within a bucket, parameters are dealt out largest first to the shard where the bucket stays
    smallest, and among those to the one with the least Newton-Schulz work in the buffer so far. A
    bucket's unpadded size is the sum of its parameters.
    """

    def is_full(bucket: list[int]) -> bool:
        if bucket_size is None:
            return False
        numels = [specs[index].numel for index in bucket]
        return sum(numels) >= max(bucket_size, int(num_shards * max(numels) * MIN_FILL))

    divisor = shard_divisor(num_shards, pad_for_high_nccl_busbw)
    slots: dict[int, Slot] = {}
    ranges: list[tuple[int, int]] = []
    unpadded: list[int] = []
    work = [0] * num_shards
    cursor = 0
    for bucket in _backprop_buckets(specs, is_full):
        fill = [0] * num_shards
        placed: dict[int, tuple[int, int]] = {}
        for index in sorted(bucket, key=lambda i: (-specs[i].numel, -specs[i].update_cost)):
            numel = specs[index].numel
            largest = max(fill)
            shard = min(
                range(num_shards),
                key=lambda s: (max(largest, pad_param_start(fill[s]) + numel), work[s], s),
            )
            start = pad_param_start(fill[shard])
            placed[index] = (shard, start)
            fill[shard] = start + numel
            work[shard] += specs[index].update_cost
        shard_numel = pad_to_divisor(max(fill), divisor)
        for index, (shard, start) in placed.items():
            first = cursor + shard * shard_numel + start
            slots[index] = Slot(first, first + specs[index].numel, len(ranges))
        ranges.append((cursor, cursor + num_shards * shard_numel))
        unpadded.append(sum(specs[index].numel for index in bucket))
        cursor = ranges[-1][1]
    return BufferPlan(_ordered(slots), tuple(ranges), tuple(unpadded), num_shards)
