"""Communication that computation does not hide, from intervals of a trace."""

from types import SimpleNamespace

import torch

from benchmarks.trace import device_intervals, exposed, length, union


def test_union_merges_what_overlaps_or_touches():
    assert union([(5, 6), (0, 2), (1, 3), (3, 4), (7, 7)]) == [(0, 4), (5, 6)]
    assert length([(0, 2), (1, 3)]) == 3
    assert length([]) == 0


def test_exposed_is_communication_without_computation():
    communication = [(0, 4), (6, 8), (7, 10)]
    assert exposed(communication, []) == 8
    assert exposed(communication, [(0, 20)]) == 0
    assert exposed(communication, [(1, 2), (3, 7)]) == 5
    assert exposed([], [(0, 1)]) == 0


def test_only_kernels_on_the_gpu_count():
    def event(name, kind, start, end, is_user_annotation=False):
        return SimpleNamespace(
            name=name,
            device_type=kind,
            time_range=SimpleNamespace(start=start, end=end),
            is_user_annotation=is_user_annotation,
        )

    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    events = [
        event("ncclDevKernel_AllGather", cuda, 0, 1),
        event("gemm", cuda, 1, 2),
        event("nccl:all_gather", cpu, 2, 3),
        event("nccl:all_gather", cuda, 3, 4, is_user_annotation=True),
    ]
    assert device_intervals(events) == ([(0, 1)], [(1, 2)])
