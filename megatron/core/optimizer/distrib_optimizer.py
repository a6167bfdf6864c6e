"""The distributed optimizer: every rank updates its flat shard of every bucket (ZeRO stage 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
from megatron.core.fp8_utils import pop_high_precision_init_val
from megatron.core.optimizer.grad_scaler import MegatronGradScaler
from megatron.core.optimizer.main_params import MainParam, make_main_param
from megatron.core.optimizer.optimizer import MainParamOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.param_layout import (
    FullParamLayout,
    PerBufferParamLayout,
    compute_full_param_layout,
    sharded_layout,
)


class DistributedOptimizer(MainParamOptimizer):
    """Updates this rank's shard of each bucket of its buffers, then has the rest gathered.

    Masters, moments and updates exist for the shard alone. A shard may begin and end within a
    parameter, so the update rule must work element by element.

    Args:
        optimizer: Its groups hold the buffers' parameters; they come to hold flat shards.
        config: Options.
        grad_scaler: Loss scale, if any.
        init_state_fn: See :class:`~megatron.core.optimizer.optimizer.MainParamOptimizer`.
        model_chunks: The wrapped model.
        per_model_buffers: For each chunk's number the buffers whose parameters are updated here.
        data_parallel_group: Ranks among which buckets are shared out.
        data_parallel_group_gloo: Accepted for Megatron's callers; not needed.
        data_parallel_group_idx: Accepted for Megatron's callers; not needed.
        distributed_optimizer_instance_id: Accepted for Megatron's callers; not needed.

    Raises:
        ValueError: If the model's DDP does not shard, or a parameter lies in none of the buffers.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: OptimizerConfig,
        grad_scaler: MegatronGradScaler | None,
        init_state_fn: Callable[..., None] | None,
        model_chunks: Sequence[DistributedDataParallel],
        per_model_buffers: dict[int, list[_ParamAndGradBuffer]],
        data_parallel_group: dist.ProcessGroup | None,
        data_parallel_group_gloo: dist.ProcessGroup | None = None,
        data_parallel_group_idx: int = 0,
        distributed_optimizer_instance_id: int = 0,
    ) -> None:
        self.model_chunks = list(model_chunks)
        self.ddp_config = self.model_chunks[0].ddp_config
        if not self.ddp_config.use_distributed_optimizer:
            raise ValueError(
                "DistributedOptimizer needs a model wrapped with use_distributed_optimizer=True in "
                "its DistributedDataParallelConfig"
            )
        self.per_model_buffers = per_model_buffers
        self.buffers = [buffer for chunk in per_model_buffers.values() for buffer in chunk]
        shards = {
            shard.param: shard
            for buffer in self.buffers
            for bucket in buffer.buckets
            for shard in bucket.param_shards()
        }
        held = {param for buffer in self.buffers for param in buffer.params}

        def make_shard(param: torch.nn.Parameter) -> MainParam | None:
            if param not in held:
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} lies in none of this optimizer's "
                    "buffers; give it the buffers of all its parameters"
                )
            if param not in shards:
                return None
            return make_main_param(param, shards[param].start, shards[param].end)

        super().__init__(optimizer, config, grad_scaler, init_state_fn, make_shard)
        for param in self.managed_params:
            # Ranks that own none of a parameter let go of what it was quantised from, too.
            pop_high_precision_init_val(param)
        self.quantized_params_are_staged = True
        self.is_sharded = True
        self.stats_group = None
        self.ownership_group = self.expert_ownership_group = data_parallel_group
        own_buckets = {bucket for buffer in self.buffers for bucket in buffer.buckets}
        self.bucket_groups = [
            group
            for chunk in self.model_chunks
            for group in chunk.all_bucket_groups
            if own_buckets.issuperset(group.buckets)
        ]

    @staticmethod
    def _compute_per_buffer_param_layout(
        params: list[torch.nn.Parameter],
        bucket_size: int | None,
        data_parallel_world_size: int,
        ddp_config: Any,
        param_indices: list[int] | None = None,
    ) -> PerBufferParamLayout:
        """The byte-sharded layout of one buffer."""
        return sharded_layout(
            params,
            bucket_size,
            data_parallel_world_size,
            ddp_config.pad_buckets_for_high_nccl_busbw,
            param_indices,
            whole_params=False,
        )

    @staticmethod
    def compute_full_param_layout(
        params: list[torch.nn.Parameter],
        bucket_size: int | None,
        data_parallel_world_size: int,
        ddp_config: Any,
        expert_data_parallel_world_size: int | None = None,
    ) -> FullParamLayout:
        """Layouts of all buffers; see :func:`megatron.core.param_layout.compute_full_param_layout`."""
        return compute_full_param_layout(
            params,
            bucket_size,
            data_parallel_world_size,
            ddp_config,
            expert_data_parallel_world_size,
        )

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Updates the shards; without overlap, has the updated parameters gathered."""
        updated = super().step_with_ready_grads()
        if not self.ddp_config.overlap_param_gather:
            for group in self.bucket_groups:
                group.start_param_sync()
        return updated
