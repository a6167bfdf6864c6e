"""What a profiler's trace says about communication: how much of it nothing else hides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times as intervals that neither touch nor overlap, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Time that at least one of them covers."""
    return sum(end - start for start, end in union(intervals))


def exposed(communication: Sequence[Interval], computation: Sequence[Interval]) -> float:
    """Time in which there is communication and no computation."""
    return length([*communication, *computation]) - length(computation)


def device_intervals(events: Iterable[Any]) -> tuple[list[Interval], list[Interval]]:
    """Times on the GPU of NCCL's kernels and of everything else, in microseconds.

    Args:
        events: Of a finished ``torch.profiler.profile``.
    """
    communication: list[Interval] = []
    computation: list[Interval] = []
    for event in events:
        if str(event.device_type) != "DeviceType.CUDA" or event.is_user_annotation:
            continue
        interval = (event.time_range.start, event.time_range.end)
        (communication if "nccl" in event.name.lower() else computation).append(interval)
    return communication, computation
