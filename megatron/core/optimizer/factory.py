"""From options and a wrapped model to the optimizer that the training loop steps."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.grad_scaler import (
    ConstantGradScaler,
    DynamicGradScaler,
    MegatronGradScaler,
)
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MainParamOptimizer,
    MegatronOptimizer,
)
from megatron.core.optimizer.optimizer_config import OptimizerConfig, ParamKey
from megatron.core.optimizer.param_groups import get_param_groups, get_standard_config_overrides
from megatron.core.optimizer.torch_optimizers import make_torch_optimizer
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from megatron.core.process_groups_config import ProcessGroupCollection


def get_megatron_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[torch.nn.Module],
    config_overrides: Mapping[ParamKey, ParamGroupOverride] | None = None,
    use_gloo_process_groups: bool = True,
    pg_collection: ProcessGroupCollection | None = None,
    dump_param_to_param_group_map: str | None = None,
) -> MegatronOptimizer:
    """The optimizer for a model, over all ranks.

    With ``optimizer="muon"`` matrices go to Muon and everything else to ``muon_scalar_optimizer``.
    Over a model that was wrapped with ``use_distributed_optimizer=True``, Muon is layer-wise and
    the rest flat-sharded. Over any other, ``use_layer_wise_distributed_optimizer`` shares out all
    parameters whole (the legacy layout).

    Args:
        config: Options.
        model_chunks: The model; wrapped in DistributedDataParallel to train on several ranks.
        config_overrides: Options of parameter groups; Megatron's standard ones if ``None``.
        use_gloo_process_groups: Accepted for Megatron's callers; no separate gloo groups are needed.
        pg_collection: Process groups; those of :mod:`megatron.core.parallel_state` if ``None``.
        dump_param_to_param_group_map: Not available; must be ``None``.

    Raises:
        ValueError: If the options contradict those of the wrapped model.
    """
    if dump_param_to_param_group_map is not None:
        raise ValueError("dump_param_to_param_group_map is not available here; leave it None")
    name = config.optimizer.removeprefix("dist_")
    if name != config.optimizer:
        warnings.warn(
            f"optimizer={config.optimizer!r} is an old name for optimizer={name!r} with "
            "use_layer_wise_distributed_optimizer=True",
            DeprecationWarning,
            stacklevel=2,
        )
        config = copy.copy(config)
        config.optimizer, config.use_layer_wise_distributed_optimizer = name, True
    ddp_config = getattr(model_chunks[0], "ddp_config", None)
    is_sharded = _check_sharding(config, ddp_config)
    is_legacy = config.use_layer_wise_distributed_optimizer and not is_sharded
    pgs = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    if config_overrides is None:
        config_overrides = get_standard_config_overrides(config)

    scaler = _make_grad_scaler(config, model_chunks)
    by_owner: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    layer_wise_groups: dict[str, list[dict[str, Any]]] = {}
    for group in get_param_groups(model_chunks, config, config_overrides):
        if is_legacy or (group["optimizer"] == "muon" and is_sharded):
            layer_wise_groups.setdefault(group["optimizer"], []).append(group)
        else:
            key = (group["optimizer"], group["is_expert_parallel"])
            by_owner.setdefault(key, []).append(group)

    optimizers: list[MegatronOptimizer] = []
    if layer_wise_groups:
        bases = [
            make_torch_optimizer(name, groups, config, model_chunks, pgs)
            for name, groups in layer_wise_groups.items()
        ]
        optimizers.append(
            LayerWiseDistributedOptimizer(bases, config, pgs, model_chunks=model_chunks)  # type: ignore[arg-type]
        )
    for (optimizer_name, expert), groups in by_owner.items():
        base = make_torch_optimizer(optimizer_name, groups, config, model_chunks, pgs)
        leaf: MainParamOptimizer
        if is_sharded:
            leaf = _make_distributed(base, config, scaler, model_chunks, pgs, expert)
        else:
            leaf = _make_replicated(base, config, scaler, pgs, expert)
        leaf.pg_collection = pgs
        optimizers.append(leaf)
    return optimizers[0] if len(optimizers) == 1 else ChainedOptimizer(optimizers)


def _check_sharding(
    config: OptimizerConfig, ddp_config: DistributedDataParallelConfig | None
) -> bool:
    """Whether optimizer state is sharded over data-parallel ranks, as model and options both say."""
    asked = config.use_distributed_optimizer or config.use_layer_wise_distributed_optimizer
    wrapped = ddp_config is not None and ddp_config.use_distributed_optimizer
    if config.use_layer_wise_distributed_optimizer and ddp_config is None:
        raise ValueError(
            "use_layer_wise_distributed_optimizer needs a model wrapped in DistributedDataParallel"
        )
    if config.use_distributed_optimizer and not wrapped:
        raise ValueError(
            "a distributed optimizer needs a model wrapped in DistributedDataParallel with "
            "use_distributed_optimizer=True in its config"
        )
    if wrapped and not asked:
        raise ValueError(
            "the model was wrapped with use_distributed_optimizer=True, so its gradients reach their "
            "owners only; set use_distributed_optimizer=True (for muon: "
            "use_layer_wise_distributed_optimizer=True) in OptimizerConfig too"
        )
    if config.use_layer_wise_distributed_optimizer and config.optimizer != "muon":
        raise ValueError(
            "use_layer_wise_distributed_optimizer is for optimizer='muon', got "
            f"{config.optimizer!r}; use use_distributed_optimizer"
        )
    gathers = ddp_config is not None and ddp_config.overlap_param_gather
    if config.overlap_param_gather and not gathers:
        raise ValueError(
            "overlap_param_gather=True in OptimizerConfig needs overlap_param_gather=True in the model's "
            "DistributedDataParallelConfig, which starts the gathers"
        )
    return wrapped


def _make_grad_scaler(
    config: OptimizerConfig, model_chunks: Sequence[torch.nn.Module]
) -> MegatronGradScaler | None:
    device = next(param.device for chunk in model_chunks for param in chunk.parameters())
    if config.loss_scale:
        scaler: MegatronGradScaler = ConstantGradScaler(config.loss_scale, device=device)
    elif config.fp16:
        scaler = DynamicGradScaler(
            initial_scale=config.initial_loss_scale,
            min_scale=config.min_loss_scale,
            growth_factor=2.0,
            backoff_factor=0.5,
            growth_interval=int(config.loss_scale_window),
            hysteresis=config.hysteresis,
            device=device,
        )
    else:
        return None
    return scaler


def _make_distributed(
    base: torch.optim.Optimizer,
    config: OptimizerConfig,
    scaler: MegatronGradScaler | None,
    model_chunks: Sequence[torch.nn.Module],
    pgs: ProcessGroupCollection,
    expert: bool,
) -> DistributedOptimizer:
    chunks: list[DistributedDataParallel] = list(model_chunks)  # type: ignore[arg-type]
    params = {param for group in base.param_groups for param in group["params"]}
    buffers = {
        i: [b for b in chunk.all_buffers if not params.isdisjoint(b.params)]
        for i, chunk in enumerate(chunks)
    }
    group = chunks[0].intra_expt_dp_group if expert else chunks[0].intra_dp_cp_group
    optimizer = DistributedOptimizer(base, config, scaler, None, chunks, buffers, group)
    if chunks[0].ddp_config.num_distributed_optimizer_instances > 1:
        # Each instance holds every gradient once.
        optimizer.stats_group = pgs.intra_dist_opt
    return optimizer


def _make_replicated(
    base: torch.optim.Optimizer,
    config: OptimizerConfig,
    scaler: MegatronGradScaler | None,
    pgs: ProcessGroupCollection,
    expert: bool,
) -> MainParamOptimizer:
    if config.bf16 or config.fp16:
        leaf: MainParamOptimizer = Float16OptimizerWithFloat16Params(base, config, scaler, None)
    else:
        leaf = FP32Optimizer(base, config, None)
    leaf.stats_group = pgs.tp_ep_pp_with_egtp_remat if expert else pgs.mp
    return leaf
