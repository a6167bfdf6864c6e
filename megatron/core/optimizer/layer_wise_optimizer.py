"""The layer-wise distributed optimizer: every matrix is updated whole, by the one rank that owns it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.collectives import all_gather_uneven, group_rank, group_size
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.layout_check import check_same_on_all_ranks
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.fp8_utils import forget_quantized_weights, pop_high_precision_init_val
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

    Only the owner of a parameter has its master and optimizer state. Over a model that was wrapped
    with ``use_distributed_optimizer=True``, the owner is the rank in whose shard of its bucket the
    layout put it. Over any other (the legacy layout), gradients are all-reduced and parameters are
    dealt out by size, back and forth.

    Args:
        optimizers: Torch optimizers whose groups hold model parameters; those of other owners are
            taken out.
        config: Options.
        pg_collection: Gives ``dp_cp`` and ``expt_dp``.
        init_state_fn_list: One per optimizer.
        model_chunks: The wrapped model.

    Attributes:
        layerwise_param_sync_via_bucket_group: Whether bucket groups, and not this optimizer, gather
            updated parameters: where the layout gives them slots in the buckets, and where they
            travel through the memory of gradients, which is the bucket groups' own.

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
        ddp_config = self.model_chunks[0].ddp_config
        self.use_buffer_param_sync = ddp_config.use_distributed_optimizer
        self.layerwise_param_sync_via_bucket_group = (
            self.use_buffer_param_sync or ddp_config.reuse_grad_buf_for_mxfp8_param_ag
        )
        self.overlap_param_gather = ddp_config.overlap_param_gather

        managed = [
            p for optimizer in optimizers for g in optimizer.param_groups for p in g["params"]
        ]
        self._owners = self._find_owners(managed)
        self._keep_own_params(optimizers)
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
            leaf.pg_collection = groups
        self.bucket_groups = self._own_bucket_groups()
        for param in managed:
            # Ranks that do not own a parameter let go of what it was quantised from, too.
            pop_high_precision_init_val(param)

    def _find_owners(self, managed: Sequence[torch.nn.Parameter]) -> dict[torch.nn.Parameter, int]:
        if self.use_buffer_param_sync:
            layouts = [chunk.full_param_layout for chunk in self.model_chunks]
            return owners_by_layout([layout for layout in layouts if layout is not None])
        wanted = set(managed)
        in_order = [p for c in self.model_chunks for p in c.params_with_grad if p in wanted]
        dense = [p for p in in_order if getattr(p, "allreduce", True)]
        expert = [p for p in in_order if not getattr(p, "allreduce", True)]
        owners: dict[torch.nn.Parameter, int] = {}
        for params, group in ((dense, self.dp_cp), (expert, self.expt_dp)):
            dealt = owners_by_ping_pong(params, group_size(group))
            lines = [
                f"parameter {i} {tuple(p.shape)} on rank {r}"
                for i, (p, r) in enumerate(dealt.items())
            ]
            check_same_on_all_ranks(lines, group, managed[0].device)
            owners |= dealt
        return owners

    def _own_bucket_groups(self) -> list[_ParamAndGradBucketGroup]:
        """The groups that hold this optimizer's parameters, told how those travel."""
        every = [group for chunk in self.model_chunks for group in chunk.all_bucket_groups]
        if self.use_buffer_param_sync:
            return [group for group in every if group.is_managed_by_layer_wise_optimizer]
        if self.layerwise_param_sync_via_bucket_group or self.overlap_param_gather:
            for group in every:
                group.gather_whole_params(self._owners)
        return every

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
        if ddp_config.num_distributed_optimizer_instances > 1:
            raise ValueError(
                "LayerWiseDistributedOptimizer shares matrices out over all data-parallel ranks; "
                "num_distributed_optimizer_instances must be 1, got "
                f"{ddp_config.num_distributed_optimizer_instances}"
            )

    def _keep_own_params(self, optimizers: list[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                expert = group.get("is_expert_parallel", False)
                rank = group_rank(self.expt_dp if expert else self.dp_cp)
                for param in group["params"]:
                    if param not in self._owners:
                        raise ValueError(
                            f"a parameter of shape {tuple(param.shape)} is in no layer-wise buffer; "
                            "call tag_params_for_buffer_routing before the model is wrapped"
                        )
                group["params"] = [p for p in group["params"] if self._owners[p] == rank]

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
    def allgather_params(self) -> None:
        """Gathers updated parameters from their owners through memory of its own (legacy layout)."""
        kinds: dict[tuple[torch.dtype, bool], list[torch.nn.Parameter]] = {}
        for param in self._owners:
            kind = (param.dtype, getattr(param, "allreduce", True))
            kinds.setdefault(kind, []).append(param)
        for (dtype, dense), params in kinds.items():
            group = self.dp_cp if dense else self.expt_dp
            if group_size(group) == 1:
                continue
            owned: list[list[torch.nn.Parameter]] = [[] for _ in range(group_size(group))]
            for param in params:
                owned[self._owners[param]].append(param)
            rank = group_rank(group)
            pieces = [
                torch.cat([p.detach().reshape(-1) for p in theirs])
                if owner == rank and theirs
                else torch.empty(
                    sum(p.numel() for p in theirs), dtype=dtype, device=params[0].device
                )
                for owner, theirs in enumerate(owned)
            ]
            all_gather_uneven(pieces, group)
            for owner, theirs in enumerate(owned):
                if owner == rank or not theirs:
                    continue
                values = pieces[owner].split([p.numel() for p in theirs])
                torch._foreach_copy_([p.detach().view(-1) for p in theirs], list(values))
            forget_quantized_weights(params)

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Updates this rank's parameters; without overlap, has the updated ones gathered."""
        updated = super().step_with_ready_grads()
        if not self.overlap_param_gather:
            if self.layerwise_param_sync_via_bucket_group:
                self.start_param_sync_for_bucket_group_subset()
            else:
                self.allgather_params()
        return updated


def owners_by_ping_pong(
    params: Sequence[torch.nn.Parameter], ranks: int
) -> dict[torch.nn.Parameter, int]:
    """Deals parameters out by rising size, to ranks 0, 1, ..., 1, 0, 0, 1, ...

    Parameters of one size go in the order given, which must be the same on every rank (law L8).
    """
    there_and_back = [*range(ranks), *reversed(range(ranks))]
    by_size = sorted(params, key=lambda param: param.numel())
    return {param: there_and_back[i % (2 * ranks)] for i, param in enumerate(by_size)}


def owners_by_layout(layouts: Sequence[FullParamLayout]) -> dict[torch.nn.Parameter, int]:
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
