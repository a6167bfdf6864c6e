"""From checked arguments to a wrapped model, its optimizer and its schedule."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import (
    DistributedOptimizer,
    LayerWiseDistributedOptimizer,
    MegatronOptimizer,
    get_megatron_optimizer,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.param_layout import (
    FullParamLayout,
    effective_bucket_size,
    tag_params_for_buffer_routing,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_pg_rank, get_pg_size

from .arguments import (
    core_transformer_config_from_args,
    get_megatron_ddp_config,
    get_megatron_optimizer_config,
)

ModelProvider = Callable[
    [argparse.Namespace, TransformerConfig, ProcessGroupCollection], torch.nn.Module
]


def wrap_model_chunks_with_ddp(
    model_chunks: Sequence[torch.nn.Module],
    config: Any,
    ddp_config: DistributedDataParallelConfig,
    *,
    use_layer_wise_distributed_optimizer: bool = False,
    use_layer_wise_param_layout: bool = True,
    DP: type[DistributedDataParallel] = DistributedDataParallel,
    pg_collection: ProcessGroupCollection | None = None,
    bucket_sizes: Sequence[int | None] | None = None,
    disable_bucketing_per_chunk: Sequence[bool] | None = None,
) -> list[DistributedDataParallel]:
    """Wraps model chunks in DDP over buffers laid out for the optimizer that will own them.

    Args:
        model_chunks: Plain modules.
        config: The model's configuration.
        ddp_config: Options of buffers and reductions. For the layer-wise optimizer with its own
            layout, ``use_distributed_optimizer`` is set on it: gradients are reduce-scattered.
        use_layer_wise_distributed_optimizer: Matrices will be owned whole, by one rank each.
        use_layer_wise_param_layout: Lay them out so that each lies within one rank's shard.
        DP: The wrapper.
        pg_collection: Process groups; those of ``parallel_state`` by default.
        bucket_sizes: Per chunk, elements at which a bucket closes; None for one bucket per buffer.
            By default this follows from ``ddp_config``.
        disable_bucketing_per_chunk: Per chunk, put everything in one bucket per buffer.

    Returns:
        The wrapped chunks.

    Raises:
        ValueError: If a per-chunk list has another length than ``model_chunks``.
    """
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    count = len(model_chunks)
    disabled = list(disable_bucketing_per_chunk or [False] * count)
    for name, values in (("bucket_sizes", bucket_sizes), ("disable_bucketing_per_chunk", disabled)):
        if values is not None and len(values) != count:
            raise ValueError(f"{name} has {len(values)} entries for {count} model chunks")

    layer_wise = use_layer_wise_distributed_optimizer and use_layer_wise_param_layout
    if layer_wise:
        ddp_config.use_distributed_optimizer = True
        tag_params_for_buffer_routing(model_chunks)
    sharded = layer_wise or (
        ddp_config.use_distributed_optimizer and not use_layer_wise_distributed_optimizer
    )
    dense_ranks = get_pg_size(_first_group(groups, "intra_dp_cp", "dp_cp", "dp"))
    expert_ranks = get_pg_size(_first_group(groups, "intra_expt_dp", "expt_dp", "intra_dp_cp"))

    wrapped = []
    for index, chunk in enumerate(model_chunks):
        params = [param for param in chunk.parameters() if param.requires_grad]
        if bucket_sizes is not None:
            bucket_size = bucket_sizes[index]
        else:
            numel = sum(param.numel() for param in params)
            bucket_size = effective_bucket_size(ddp_config, numel, dense_ranks)
        layout: FullParamLayout | None = None
        if sharded:
            owner = LayerWiseDistributedOptimizer if layer_wise else DistributedOptimizer
            layout = owner.compute_full_param_layout(
                params,
                None if disabled[index] else bucket_size,
                dense_ranks,
                ddp_config,
                expert_data_parallel_world_size=expert_ranks,
            )
        wrapped.append(
            DP(
                config,
                ddp_config,
                chunk,
                disable_bucketing=disabled[index],
                pg_collection=groups,
                full_param_layout=layout,
            )
        )
    return wrapped


def _first_group(groups: ProcessGroupCollection, *names: str) -> Any:
    return next((getattr(groups, name) for name in names if hasattr(groups, name)), None)


def get_model(
    args: argparse.Namespace,
    model_provider: ModelProvider,
    wrap_with_ddp: bool = True,
    config: TransformerConfig | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> list[torch.nn.Module]:
    """Builds the model on this rank's device and in its dtype, and wraps it.

    Returns:
        The model chunks: one, since there is no pipeline parallelism.
    """
    config = config or core_transformer_config_from_args(args)
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    with args.device:
        model = model_provider(args, config, groups)
    model = model.to(args.device)
    if not wrap_with_ddp:
        return [model]
    wrapped = wrap_model_chunks_with_ddp(
        [model],
        config,
        get_megatron_ddp_config(args),
        use_layer_wise_distributed_optimizer=args.use_layer_wise_distributed_optimizer,
        use_layer_wise_param_layout=args.use_layer_wise_param_layout,
        pg_collection=groups,
    )
    return list(wrapped)


def get_optimizer_param_scheduler(
    args: argparse.Namespace, optimizer: MegatronOptimizer
) -> OptimizerParamScheduler:
    """Builds the schedule of learning rate and weight decay, counted in samples."""
    batch = args.global_batch_size
    warmup_iters = args.lr_warmup_iters
    if args.lr_warmup_fraction is not None:
        warmup_iters = args.lr_warmup_fraction * args.lr_decay_iters
    wsd_decay_steps = None
    if args.lr_wsd_decay_iters is not None:
        wsd_decay_steps = args.lr_wsd_decay_iters * batch
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=int(warmup_iters * batch),
        lr_decay_steps=args.lr_decay_iters * batch,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay,
        wd_incr_steps=max(args.train_iters, 1) * batch,
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=False,
        wsd_decay_steps=wsd_decay_steps,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )


def setup_model_and_optimizer(
    args: argparse.Namespace, model_provider: ModelProvider
) -> tuple[list[torch.nn.Module], MegatronOptimizer, OptimizerParamScheduler]:
    """Builds model chunks, optimizer and schedule."""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = get_model(args, model_provider, pg_collection=groups)
    # The seed has made the model; from here on random numbers are dropout's, and ranks that read
    # batches of their own draw their own.
    torch.manual_seed(args.seed + 1 + get_pg_rank(groups.dp_cp_gtp_remat))
    optimizer = get_megatron_optimizer(
        get_megatron_optimizer_config(args), model, pg_collection=groups
    )
    return model, optimizer, get_optimizer_param_scheduler(args, optimizer)
