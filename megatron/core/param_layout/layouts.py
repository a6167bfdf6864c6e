"""What buffers and optimizers are told: for every buffer, where each parameter lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.core.param_layout.arithmetic import default_bucket_size
from megatron.core.param_layout.plans import (
    BufferPlan,
    ParamSpec,
    byte_sharded_plan,
    padded_plan,
    unpadded_plan,
)
from megatron.core.param_layout.routing import BufferKey, group_params_for_buffers


@dataclass
class PerBufferParamLayout:
    """Layout of one contiguous buffer. All numbers are elements.

    Attributes:
        param_index_map: For each parameter its start, end and bucket.
        bucket_indices: Start and end of each bucket.
        per_bucket_numel_unpadded: Elements of each bucket without end padding.
        param_indices: Each parameter's number among the parameters of its nominal dtype.
        num_optimizer_shards: Equal shards each bucket is cut into; ``None`` if it is not.
    """

    param_index_map: dict[torch.nn.Parameter, tuple[int, int, int]] = field(default_factory=dict)
    bucket_indices: list[tuple[int, int]] = field(default_factory=list)
    per_bucket_numel_unpadded: list[int] = field(default_factory=list)
    param_indices: list[int] = field(default_factory=list)
    num_optimizer_shards: int | None = None

    def shard_range(self, bucket_id: int, shard: int) -> tuple[int, int]:
        """Start and end in the buffer of one shard of a bucket."""
        if self.num_optimizer_shards is None:
            raise ValueError("this layout has no shards")
        start, end = self.bucket_indices[bucket_id]
        numel = (end - start) // self.num_optimizer_shards
        return start + shard * numel, start + (shard + 1) * numel


@dataclass
class FullParamLayout:
    """Layouts of all buffers of a model chunk; each buffer counts its elements from 0."""

    layouts: dict[BufferKey, PerBufferParamLayout] = field(default_factory=dict)


def param_spec(param: torch.nn.Parameter) -> ParamSpec:
    """What a layout needs to know of ``param``."""
    # A shard's update works on the matrix that it is cut from.
    gtp = getattr(param, "gtp_remat", None)
    return ParamSpec(
        tuple(param.shape),
        getattr(param, "shared_embedding", False),
        None if gtp is None else gtp.matrix_shape,
    )


def layout_from_plan(
    params: Sequence[torch.nn.Parameter], plan: BufferPlan, param_indices: list[int] | None
) -> PerBufferParamLayout:
    """Names a plan's slots by the parameters themselves, in backprop order."""
    slots = list(zip(params, plan.slots, strict=True))
    return PerBufferParamLayout(
        param_index_map={p: (s.start, s.end, s.bucket_id) for p, s in reversed(slots)},
        bucket_indices=list(plan.bucket_ranges),
        per_bucket_numel_unpadded=list(plan.bucket_numel_unpadded),
        param_indices=param_indices or [],
        num_optimizer_shards=plan.num_shards,
    )


def unpadded_layout(
    params: Sequence[torch.nn.Parameter], bucket_size: int | None
) -> PerBufferParamLayout:
    """Layout for gradients that are all-reduced: no padding, no shards."""
    return layout_from_plan(params, unpadded_plan(list(map(param_spec, params)), bucket_size), None)


def sharded_layout(
    params: Sequence[torch.nn.Parameter],
    bucket_size: int | None,
    num_shards: int,
    pad_for_high_nccl_busbw: bool,
    param_indices: list[int] | None,
    whole_params: bool,
) -> PerBufferParamLayout:
    """Byte-sharded layout, or with ``whole_params`` the padded one."""
    make_plan = padded_plan if whole_params else byte_sharded_plan
    plan = make_plan(
        list(map(param_spec, params)), bucket_size, num_shards, pad_for_high_nccl_busbw
    )
    return layout_from_plan(params, plan, param_indices)


def compute_full_param_layout(
    params: list[torch.nn.Parameter],
    bucket_size: int | None,
    data_parallel_world_size: int,
    ddp_config: Any,
    expert_data_parallel_world_size: int | None = None,
) -> FullParamLayout:
    """Layouts of all buffers for optimizers that own shards.

    Layer-wise buffers get the padded layout, all others the byte-sharded one.

    Args:
        params: The trainable parameters in construction order, tagged for routing if they are
            to be.
        bucket_size: Elements at which a bucket closes; ``None`` for one bucket a buffer.
        data_parallel_world_size: Ranks that share a dense buffer.
        ddp_config: Gives ``grad_reduce_in_fp32`` and ``pad_buckets_for_high_nccl_busbw``.
        expert_data_parallel_world_size: Ranks that share an expert buffer; as above if ``None``.
    """
    expert_size = expert_data_parallel_world_size or data_parallel_world_size
    groups = group_params_for_buffers(params, ddp_config.grad_reduce_in_fp32)
    return FullParamLayout(
        {
            key: sharded_layout(
                members,
                bucket_size,
                expert_size if key.is_expert_parallel else data_parallel_world_size,
                ddp_config.pad_buckets_for_high_nccl_busbw,
                indices,
                whole_params=key.is_managed_by_layer_wise_optimizer,
            )
            for key, (members, indices) in groups.items()
        }
    )


def effective_bucket_size(ddp_config: Any, total_numel: int, world_size: int) -> int | None:
    """Elements at which buckets close, ``None`` for one bucket a buffer.

    An explicit size (or number of buckets) holds whether communication overlaps or not, so that
    both reduce the same buckets. Without one, only overlap asks for more than one bucket.
    """
    if ddp_config.bucket_size is not None:
        return ddp_config.bucket_size
    if ddp_config.num_buckets is not None:
        return max(1, -(-total_numel // ddp_config.num_buckets))
    return default_bucket_size(world_size) if ddp_config.overlap_grad_reduce else None
