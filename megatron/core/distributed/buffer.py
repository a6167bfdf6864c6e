"""Memory: contiguous parameter and gradient buffers, and the buckets that cut them up.

A buffer holds parameters of one :class:`~megatron.core.param_layout.BufferKey`; a bucket is the
part of it that is reduced and gathered at once. Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

import torch
import torch.distributed as dist

from megatron.core.collectives import group_rank, group_size
from megatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig,
)
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.param_layout import PerBufferParamLayout, unpadded_layout
from megatron.core.process_groups_config import ProcessGroupCollection


class BufferType(Enum):
    """The two halves of a buffer."""

    PARAM = 1
    GRAD = 2


def shard_buffer(buffer: torch.Tensor, data_parallel_world_size: int) -> list[torch.Tensor]:
    """Views of ``buffer``'s equal shards, one a rank.

    Raises:
        ValueError: If the buffer does not divide by the number of ranks.
    """
    numel, remainder = divmod(buffer.numel(), data_parallel_world_size)
    if remainder:
        raise ValueError(
            f"a buffer of {buffer.numel()} elements does not divide into "
            f"{data_parallel_world_size} shards"
        )
    return [buffer[r * numel : (r + 1) * numel] for r in range(data_parallel_world_size)]


@dataclass(frozen=True)
class ParamShard:
    """The part of a parameter that one rank's shard of its bucket holds.

    Attributes:
        param: The parameter.
        start, end: Range within the flattened parameter.
        bucket_start: Where that range starts in the bucket.
    """

    param: torch.nn.Parameter
    start: int
    end: int
    bucket_start: int

    @property
    def bucket_end(self) -> int:
        """Where the range ends in the bucket."""
        return self.bucket_start + self.end - self.start

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the parameter."""
        return self.end - self.start == self.param.numel()


class _ParamAndGradBucket:
    """A contiguous part of a buffer, reduced and gathered at once.

    Attributes:
        params_list: Its parameters in backprop order; ``params`` is the same as a set.
        param_data: Flat storage or transport of the parameters, ``None`` where they keep their own.
        grad_data: Flat gradients.
        param_data_is_grad_memory: ``param_data`` lies within the bytes of ``grad_data``.
        offset: Start in the buffer, in elements.
        param_to_index: Start and end of each parameter in this bucket.
        num_shards, shard_rank: Equal shards it is cut into, and this rank's.
        is_sharded: Gradients are reduced to shards, rather than to every rank.
        gradient_scaling_factor: Applied to gradients before they are reduced.
    """

    def __init__(
        self,
        params: list[torch.nn.Parameter],
        param_data: torch.Tensor | None,
        grad_data: torch.Tensor,
        param_data_is_grad_memory: bool,
        offset: int,
        numel_unpadded: int,
        gradient_scaling_factor: float,
        bucket_id: int,
        param_index_map: Mapping[torch.nn.Parameter, tuple[int, int, int]],
        param_to_name: Mapping[torch.nn.Parameter, str],
        num_shards: int,
        shard_rank: int,
        is_sharded: bool = True,
    ) -> None:
        self.is_sharded = is_sharded
        self.params_list = params
        self.params = set(params)
        self.param_data = param_data
        self.grad_data = grad_data
        self.param_data_is_grad_memory = param_data_is_grad_memory
        self.offset = offset
        self.numel_unpadded = numel_unpadded
        self.gradient_scaling_factor = gradient_scaling_factor
        self.bucket_id = bucket_id
        self.param_to_index = {
            p: (param_index_map[p][0] - offset, param_index_map[p][1] - offset) for p in params
        }
        self.param_to_name = param_to_name
        self.num_shards = num_shards
        self.shard_rank = shard_rank
        # Whole-parameter gathers only: each rank's parameters (set by the optimizer that deals them out).
        self.layerwise_params_list: list[list[torch.nn.Parameter]] | None = None

    @property
    def is_managed_by_layer_wise_optimizer(self) -> bool:
        """Whether the layer-wise optimizer owns this bucket's parameters."""
        return getattr(self.params_list[0], "is_managed_by_layer_wise_optimizer", False)

    @property
    def has_quantized_params(self) -> bool:
        """Whether its parameters are stored quantised (a buffer holds only such, or none)."""
        return is_float8tensor(self.params_list[0])

    def name_of(self, param: torch.nn.Parameter) -> str:
        """The parameter's name for messages."""
        return self.param_to_name.get(param, f"<unnamed, shape {tuple(param.shape)}>")

    def set_layerwise_params_list(
        self, layerwise_params_list: list[list[torch.nn.Parameter]]
    ) -> None:
        """Tells for each rank which of this bucket's parameters it owns whole."""
        self.layerwise_params_list = layerwise_params_list

    def param_shards(self, rank: int | None = None) -> Iterator[ParamShard]:
        """What a rank's shard (by default this one's) holds, in construction order."""
        shard_numel = self.grad_data.numel() // self.num_shards
        shard_start = (self.shard_rank if rank is None else rank) * shard_numel
        shard_end = shard_start + shard_numel
        for param in reversed(self.params_list):
            start, end = self.param_to_index[param]
            first, last = max(start, shard_start), min(end, shard_end)
            if first < last:
                yield ParamShard(param, first - start, last - start, first)

    def reduced_grads(
        self, whole: bool = False
    ) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """The gradients that are this rank's after a reduction, flat: all, or those in its shard."""
        if whole or not self.is_sharded:
            for param in self.params_list:
                yield param, self.grad_data[slice(*self.param_to_index[param])]
            return
        for shard in self.param_shards():
            yield shard.param, self.grad_data[shard.bucket_start : shard.bucket_end]


class _ParamAndGradBuffer:
    """Parameters of one kind and their gradients, each in one contiguous tensor.

    Constructing one moves the parameters: ``param.data`` becomes a view where gradients are
    reduce-scattered and the parameter is not quantised, and ``param.main_grad`` always is one.

    Args:
        ddp_config: Options.
        param_dtype: Dtype of ``param_data``; ``torch.uint8`` for quantised parameters.
        grad_dtype: Dtype of ``grad_data``.
        params_with_names: The parameters, in construction order.
        data_parallel_group: Ranks that reduce and gather the buffer.
        bucket_size: Elements at which a bucket closes, if no layout is given; ``None`` for one bucket.
        param_to_name: Names of all parameters of the model, in construction order.
        gradient_scaling_factor: Applied to gradients before they are reduced.
        param_indices: See :func:`~megatron.core.param_layout.group_params_for_buffers`.
        nccl_ub: Not available; must be False.
        pg_collection: Kept for Megatron's callers; the data-parallel group says all.
        param_layout: Where the parameters lie; the unpadded layout if ``None``.

    Raises:
        ValueError: If a parameter is listed twice or the layout does not fit the group.
    """

    def __init__(
        self,
        ddp_config: DistributedDataParallelConfig,
        param_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        params_with_names: list[tuple[torch.nn.Parameter, str]],
        data_parallel_group: dist.ProcessGroup | None,
        bucket_size: int | None,
        param_to_name: Mapping[torch.nn.Parameter, str],
        gradient_scaling_factor: float,
        param_indices: list[int],
        nccl_ub: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
        param_layout: PerBufferParamLayout | None = None,
    ) -> None:
        if nccl_ub:
            raise ValueError("nccl_ub=True: NCCL user buffers are not available here")
        self.ddp_config = ddp_config
        self.params = [param for param, _ in params_with_names]
        if len(set(self.params)) != len(self.params):
            raise ValueError("a parameter is listed twice; each may lie in one buffer, once")
        self.param_indices = param_indices
        self.param_dtype = param_dtype
        self.grad_dtype = grad_dtype
        self.data_parallel_group = data_parallel_group
        self.data_parallel_world_size = group_size(data_parallel_group)
        self.gradient_scaling_factor = gradient_scaling_factor
        self.param_to_name = param_to_name

        if param_layout is None:
            param_layout = unpadded_layout(self.params, bucket_size)
        self.param_index_map = param_layout.param_index_map
        self.bucket_indices = param_layout.bucket_indices
        self.num_optimizer_shards = param_layout.num_optimizer_shards
        self.numel = self.bucket_indices[-1][1]
        self.numel_unpadded = sum(param_layout.per_bucket_numel_unpadded)
        self._check_layout()

        self._allocate(self.params[0].device)
        self.buckets = self._make_buckets(param_layout.per_bucket_numel_unpadded)
        self.param_to_bucket = {p: bucket for bucket in self.buckets for p in bucket.params_list}
        for bucket in self.buckets:
            for param in bucket.params_list:
                self._move_into(bucket, param)

    @property
    def stores_params(self) -> bool:
        """Whether parameters are views into ``param_data``."""
        return self.ddp_config.use_distributed_optimizer and not self.has_quantized_params

    @property
    def has_quantized_params(self) -> bool:
        """Whether this buffer's parameters are quantised."""
        return is_float8tensor(self.params[0])

    def _check_layout(self) -> None:
        if not self.ddp_config.use_distributed_optimizer:
            return
        for start, end in self.bucket_indices:
            if (end - start) % self.data_parallel_world_size:
                raise ValueError(
                    f"bucket {start}:{end} does not divide into {self.data_parallel_world_size} "
                    "equal shards; compute the layout for this data-parallel size, with "
                    "compute_full_param_layout of the optimizer"
                )

    def _allocate(self, device: torch.device) -> None:
        self.grad_data = torch.zeros(self.numel, dtype=self.grad_dtype, device=device)
        self.param_data: torch.Tensor | None = None
        if not self.ddp_config.use_distributed_optimizer:
            return
        if self.stores_params:
            self.param_data = torch.zeros(self.numel, dtype=self.param_dtype, device=device)
        elif not self.ddp_config.reuse_grad_buf_for_mxfp8_param_ag:
            # Quantised parameters keep their own storage and travel in their nominal dtype.
            self.param_data = torch.zeros(self.numel, dtype=self.params[0].dtype, device=device)

    def _make_buckets(self, numel_unpadded: list[int]) -> list[_ParamAndGradBucket]:
        members: list[list[torch.nn.Parameter]] = [[] for _ in self.bucket_indices]
        for param in reversed(self.params):
            members[self.param_index_map[param][2]].append(param)
        buckets = []
        for bucket_id, (start, end) in enumerate(self.bucket_indices):
            grad_data = self.grad_data[start:end]
            transport_in_grads = (
                self.param_data is None and self.ddp_config.use_distributed_optimizer
            )
            if transport_in_grads:
                # The transport lies within this bucket's own bytes, whatever the gradient dtype.
                param_data = grad_data.view(self.params[0].dtype)[: end - start]
            elif self.param_data is not None:
                param_data = self.param_data[start:end]
            else:
                param_data = None
            buckets.append(
                _ParamAndGradBucket(
                    params=members[bucket_id],
                    param_data=param_data,
                    grad_data=grad_data,
                    param_data_is_grad_memory=transport_in_grads,
                    offset=start,
                    numel_unpadded=numel_unpadded[bucket_id],
                    gradient_scaling_factor=self.gradient_scaling_factor,
                    bucket_id=bucket_id,
                    param_index_map=self.param_index_map,
                    param_to_name=self.param_to_name,
                    num_shards=self.data_parallel_world_size,
                    shard_rank=group_rank(self.data_parallel_group),
                    is_sharded=self.ddp_config.use_distributed_optimizer,
                )
            )
        return buckets

    def _move_into(self, bucket: _ParamAndGradBucket, param: torch.nn.Parameter) -> None:
        start, end = bucket.param_to_index[param]
        if self.stores_params:
            view = bucket.param_data[start:end].view(param.shape)  # type: ignore[index]
            view.copy_(param.data)
            param.data = view
        param.main_grad = bucket.grad_data[start:end].view(param.shape)  # type: ignore[attr-defined]

    def scale_gradients(self, scaling_factor: float) -> None:
        """Multiplies all gradients by ``scaling_factor``."""
        self.grad_data *= scaling_factor

    def reset(self) -> None:
        """Sets all gradients to zero."""
        self.grad_data.zero_()
