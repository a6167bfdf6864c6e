"""The start-up check that all ranks computed the same layout (law L8)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist

from megatron.core.collectives import all_gather_into_tensor, group_size
from megatron.core.param_layout import FullParamLayout


def describe_layout(
    layout: FullParamLayout, param_to_name: Mapping[torch.nn.Parameter, str]
) -> list[str]:
    """One line a bucket and a parameter: all that ranks must agree on."""
    lines = []
    for key, buffer in layout.layouts.items():
        lines.append(f"buffer {key} in {buffer.num_optimizer_shards} shards")
        lines += [
            f"bucket {i} at {start}:{end}" for i, (start, end) in enumerate(buffer.bucket_indices)
        ]
        lines += [
            f"{param_to_name[param]} {tuple(param.shape)} at {start}:{end} of bucket {bucket}"
            for param, (start, end, bucket) in buffer.param_index_map.items()
        ]
    return lines


def check_same_on_all_ranks(
    lines: list[str], group: dist.ProcessGroup | None, device: torch.device
) -> None:
    """Compares ``lines`` over the ranks: one collective of 32 bytes where they agree.

    Raises:
        RuntimeError: On every rank, naming the first difference and the ranks that differ.
    """
    if group_size(group) == 1:
        return
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    own = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    gathered = torch.empty(group_size(group) * own.numel(), dtype=torch.uint8, device=device)
    all_gather_into_tensor(gathered, own, group)
    digests = gathered.view(group_size(group), -1)
    if bool((digests == digests[0]).all()):
        return
    everyone: list[list[str]] = [[] for _ in range(group_size(group))]
    dist.all_gather_object(everyone, lines, group=group)
    rank = next(r for r, other in enumerate(everyone) if other != everyone[0])
    first, second = everyone[0], everyone[rank]
    length = max(len(first), len(second))
    first, second = (side + ["nothing"] * (length - len(side)) for side in (first, second))
    place = next(i for i in range(length) if first[i] != second[i])
    raise RuntimeError(
        f"ranks 0 and {rank} of a process group lay their parameters out differently: rank 0 "
        f"has '{first[place]}' where rank {rank} has '{second[place]}'; build the same model, with "
        "the same options and construction order, on every rank"
    )
