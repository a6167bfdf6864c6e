"""The layer-wise distributed optimizer: every matrix is updated whole, by the one rank that owns it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.collectives import group_rank
from megatron.core.distributed import DistributedDataParallel
from megatron.core.fp8_utils import pop_high_precision_init_val
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.param_layout import (
    FullParamLayout,
    PerBufferParamLayout,
    compute_full_param_layout,
    is_managed_by_layer_wise_optimizer,
    sharded_layout,
    tag_params_for_buffer_routing,
)
from megatron.core.process_groups_config import ProcessGroupCollection

__all__ = [
    "LayerWiseDistributedOptimizer",
    "is_managed_by_layer_wise_optimizer",
    "tag_params_for_buffer_routing",
]


class LayerWiseDistributedOptimizer(ChainedOptimizer):
    """Shares whole parameters out over the data-parallel ranks and has the updated ones gathered.

    The owner of a parameter is the rank in whose shard of its bucket the layout put it. Only owners
    have masters and optimizer state.

    Args:
        optimizers: Torch optimizers whose groups hold model parameters; those of other owners are
            taken out.
        config: Options.
        pg_collection: Gives ``dp_cp`` and ``expt_dp``.
        init_state_fn_list: One per optimizer.
        model_chunks: The model, wrapped with ``use_distributed_optimizer=True``.

    Raises:
        TypeError: If an optimizer is wrapped already.
        ValueError: If the model's layout does not fit, or there are several optimizer instances.
    """

    def __init__(
        self,
        optimizers: list[torch.optim.Optimizer],
        config: OptimizerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        init_state_fn_list: Sequence[Callable[..., None] | None] | None = None,
        model_chunks: Sequence[DistributedDataParallel] | None = None,
    ) -> None:
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.pg_collection = groups
        self.dp_cp: dist.ProcessGroup | None = getattr(groups, "dp_cp", None)
        self.expt_dp: dist.ProcessGroup | None = getattr(groups, "expt_dp", self.dp_cp)
        self.model_chunks = list(model_chunks or [])
        self._check(optimizers)
        # Is it the bucket group, and not this optimizer, that starts the gather of parameters?
        self.layerwise_param_sync_via_bucket_group = True
        self.overlap_param_gather = self.model_chunks[0].ddp_config.overlap_param_gather

        layouts = [
            c.full_param_layout for c in self.model_chunks if c.full_param_layout is not None
        ]
        managed = [
            p for optimizer in optimizers for g in optimizer.param_groups for p in g["params"]
        ]
        self._keep_own_params(optimizers, _owners(layouts))
        inits = list(init_state_fn_list or [None] * len(optimizers))
        wrapped: list[MegatronOptimizer] = [
            Float16OptimizerWithFloat16Params(optimizer, config, None, init)
            if config.bf16
            else FP32Optimizer(optimizer, config, init)
            for optimizer, init in zip(optimizers, inits, strict=True)
        ]
        super().__init__(wrapped)
        for leaf in self.leaves():
            leaf.managed_params = managed
            leaf.device = managed[0].device
            leaf.is_sharded = True
            leaf.stats_group = None
            leaf.ownership_group, leaf.expert_ownership_group = self.dp_cp, self.expt_dp
            leaf.quantized_params_are_staged = self.layerwise_param_sync_via_bucket_group
            leaf.tp_group = getattr(groups, "tp", None)
        self.bucket_groups = [
            group
            for chunk in self.model_chunks
            for group in chunk.all_bucket_groups
            if group.is_managed_by_layer_wise_optimizer
        ]
        for group in self.bucket_groups:
            for param in group.params:
                # Ranks that do not own a parameter let go of what it was quantised from, too.
                pop_high_precision_init_val(param)

    def _check(self, optimizers: list[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            if isinstance(optimizer, MegatronOptimizer):
                raise TypeError(
                    "LayerWiseDistributedOptimizer wraps torch optimizers itself, after it has "
                    f"shared out their parameters; got a {type(optimizer).__name__}"
                )
        if not self.model_chunks:
            raise ValueError("LayerWiseDistributedOptimizer needs the wrapped model (model_chunks)")
        ddp_config = self.model_chunks[0].ddp_config
        if not ddp_config.use_distributed_optimizer:
            raise ValueError(
                "LayerWiseDistributedOptimizer needs a model wrapped with "
                "use_distributed_optimizer=True in its DistributedDataParallelConfig"
            )
        if ddp_config.num_distributed_optimizer_instances > 1:
            raise ValueError(
                "LayerWiseDistributedOptimizer shares matrices out over all data-parallel ranks; "
                "num_distributed_optimizer_instances must be 1, got "
                f"{ddp_config.num_distributed_optimizer_instances}"
            )

    def _keep_own_params(
        self, optimizers: list[torch.optim.Optimizer], owners: dict[torch.nn.Parameter, int]
    ) -> None:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                expert = group.get("is_expert_parallel", False)
                rank = group_rank(self.expt_dp if expert else self.dp_cp)
                for param in group["params"]:
                    if param not in owners:
                        raise ValueError(
                            f"a parameter of shape {tuple(param.shape)} is in no layer-wise buffer; "
                            "call tag_params_for_buffer_routing before the model is wrapped"
                        )
                group["params"] = [p for p in group["params"] if owners[p] == rank]

    @staticmethod
    def _compute_per_buffer_param_layout(
        params: list[torch.nn.Parameter],
        bucket_size: int | None,
        data_parallel_world_size: int,
        ddp_config: Any,
        param_indices: list[int] | None = None,
    ) -> PerBufferParamLayout:
        """The padded layout of one buffer."""
        return sharded_layout(
            params,
            bucket_size,
            data_parallel_world_size,
            ddp_config.pad_buckets_for_high_nccl_busbw,
            param_indices,
            whole_params=True,
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

    def start_param_sync_for_bucket_group_subset(self) -> None:
        """Gathers the bucket groups of this optimizer, and no others, now."""
        for group in self.bucket_groups:
            group.start_param_sync()

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Updates this rank's matrices; without overlap, has the updated ones gathered."""
        updated = super().step_with_ready_grads()
        if not self.overlap_param_gather:
            self.start_param_sync_for_bucket_group_subset()
        return updated


def _owners(layouts: Sequence[FullParamLayout]) -> dict[torch.nn.Parameter, int]:
    """For each layer-wise parameter the shard, and so the rank, that holds it.

    Raises:
        ValueError: If the layout cuts one by a shard boundary (law L6).
    """
    owners = {}
    for full_layout in layouts:
        for key, layout in full_layout.layouts.items():
            if not key.is_managed_by_layer_wise_optimizer:
                continue
            for param, (start, end, bucket_id) in layout.param_index_map.items():
                first, last = layout.shard_range(bucket_id, 0)
                shard = (start - first) // (last - first)
                shard_end = layout.shard_range(bucket_id, shard)[1]
                if end > shard_end:
                    raise ValueError(
                        f"a layer-wise parameter of shape {tuple(param.shape)} at {start}:{end} "
                        f"crosses the end of shard {shard} at {shard_end} of bucket {bucket_id}; a "
                        "layout must keep every such parameter within one shard"
                    )
                owners[param] = shard
    return owners
