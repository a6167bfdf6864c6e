"""Torch optimizers made from an :class:`OptimizerConfig`: the update rules themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron.core.optimizer.lion import Lion
from megatron.core.optimizer.muon import TensorParallelMuon
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection


def _fused_adam() -> type[torch.optim.Optimizer] | None:
    """Transformer Engine's or Apex's one-kernel Adam, where one is installed."""
    try:
        from transformer_engine.pytorch.optimizers import FusedAdam
    except ImportError:
        try:
            from apex.optimizers import FusedAdam
        except ImportError:
            return None
    return FusedAdam


def _make_adam(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    options: dict[str, Any] = {
        "lr": config.lr or 0.0,
        "weight_decay": config.weight_decay,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_eps,
    }
    on_cuda = all(param.is_cuda for group in groups for param in group["params"])
    if config.optimizer_cuda_graph:
        options["capturable"] = True
    fused = _fused_adam() if on_cuda and not config.optimizer_cuda_graph else None
    if fused is not None:
        return fused(groups, adam_w_mode=config.decoupled_weight_decay, **options)  # type: ignore[call-arg]
    rule = torch.optim.AdamW if config.decoupled_weight_decay else torch.optim.Adam
    # One kernel for all parameters, as on CPU. Element by element it is the unfused rule.
    return rule(groups, fused=True, **options)


def _make_muon(
    groups: list[dict[str, Any]],
    config: OptimizerConfig,
    model_chunks: Sequence[torch.nn.Module],
    pg_collection: ProcessGroupCollection | None,
) -> torch.optim.Optimizer:
    return TensorParallelMuon(
        groups,
        lr=config.lr or 0.0,
        momentum=config.muon_momentum,
        nesterov=config.muon_nesterov,
        weight_decay=config.weight_decay,
        use_decoupled_weight_decay=config.decoupled_weight_decay,
        split_qkv=config.muon_split_qkv,
        is_qkv_fn=lambda param: getattr(param, "is_qkv", False),
        qkv_split_shapes=qkv_split_shapes(getattr(model_chunks[0], "config", None)),
        fp32_matmul_prec=config.muon_fp32_matmul_prec,
        coefficient_type=config.muon_coefficient_type,
        num_ns_steps=config.muon_num_ns_steps,
        scale_mode=config.muon_scale_mode,
        extra_scale_factor=config.muon_extra_scale_factor,
        pg_collection=pg_collection,
        tp_mode=config.muon_tp_mode,
        split_qkv_per_head=config.muon_split_qkv_per_head,
    )


def qkv_split_shapes(model_config: Any) -> list[int] | None:
    """Rows of queries, keys and values in one query group of a fused weight; ``None`` if unknown."""
    heads = getattr(model_config, "num_attention_heads", None)
    if heads is None:
        return None
    groups = getattr(model_config, "num_query_groups", None) or heads
    channels = getattr(model_config, "kv_channels", None) or model_config.hidden_size // heads
    return [heads // groups * channels, channels, channels]


def make_torch_optimizer(
    name: str,
    groups: list[dict[str, Any]],
    config: OptimizerConfig,
    model_chunks: Sequence[torch.nn.Module],
    pg_collection: ProcessGroupCollection | None,
) -> torch.optim.Optimizer:
    """The optimizer called ``name`` over ``groups``, which may set options of their own.

    Raises:
        ValueError: If there is none of that name.
    """
    if name == "adam":
        return _make_adam(groups, config)
    if name == "sgd":
        return torch.optim.SGD(
            groups,
            lr=config.lr or 0.0,
            weight_decay=config.weight_decay,
            momentum=config.sgd_momentum,
        )
    if name == "lion":
        return Lion(groups, lr=config.lr or 0.0, weight_decay=config.weight_decay)
    if name == "muon":
        return _make_muon(groups, config, model_chunks, pg_collection)
    raise ValueError(f"optimizer must be one of adam, sgd, lion and muon, got {name!r}")
