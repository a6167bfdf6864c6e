"""Parameter groups: which optimizer updates a parameter, at which rate and with which decay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron.core.optimizer.optimizer_config import (
    OptimizerConfig,
    ParamKey,
    ParamPredicate,
    ParamWithNamePredicate,
)
from megatron.core.optimizer_param_scheduler import (
    ParamGroupOverride,
    combine_param_group_overrides,
    param_group_override_to_tuple,
)
from megatron.core.param_layout import is_managed_by_layer_wise_optimizer


def get_standard_config_overrides(config: OptimizerConfig) -> dict[ParamKey, ParamGroupOverride]:
    """Megatron's rules: no decay on biases and vectors, and a learning rate for embeddings if set.

    With ``apply_wd_to_qk_layernorm`` the norms of queries and keys do decay.
    """
    if config.apply_wd_to_qk_layernorm:

        def undecayed(param: torch.nn.Parameter, name: str) -> bool:
            is_qk_norm = "q_layernorm." in name or "k_layernorm." in name
            return not is_qk_norm and (param.dim() == 1 or name.endswith(".bias"))

        no_decay = ParamKey(
            with_name_predicate=ParamWithNamePredicate("vector_but_not_qk_layernorm", undecayed)
        )
    else:
        is_vector = ParamPredicate("vector", lambda param: param.dim() == 1)
        no_decay = ParamKey(name="*.bias", predicate=is_vector)
    overrides: dict[ParamKey, ParamGroupOverride] = {no_decay: {"wd_mult": 0.0}}
    if config.decoupled_lr is not None:
        rates: ParamGroupOverride = {"max_lr": config.decoupled_lr}
        if config.decoupled_min_lr is not None:
            rates["min_lr"] = config.decoupled_min_lr
        overrides[ParamKey(attr="is_embedding_or_output_parameter")] = rates
    return overrides


def _optimizer_of(param: torch.nn.Parameter, config: OptimizerConfig) -> str:
    name = config.optimizer.removeprefix("dist_")
    if name != "muon":
        return name
    owned = getattr(param, "is_managed_by_layer_wise_optimizer", None)
    if owned is None:
        owned = is_managed_by_layer_wise_optimizer(param)
    return "muon" if owned else config.muon_scalar_optimizer


def get_param_groups(
    model_chunks: Sequence[torch.nn.Module],
    config: OptimizerConfig,
    config_overrides: Mapping[ParamKey, ParamGroupOverride],
) -> list[dict[str, Any]]:
    """Groups of parameters that are treated alike, in order of their first parameter.

    Returns:
        Dicts with ``params``, ``optimizer`` (its name), ``is_expert_parallel``, ``wd_mult``,
        ``lr_mult``, ``max_lr``, ``min_lr`` and what the overrides add.
    """
    groups: dict[Any, dict[str, Any]] = {}
    for chunk in model_chunks:
        for name, param in chunk.named_parameters():
            if not param.requires_grad:
                continue
            matching = [o for key, o in config_overrides.items() if key.matches(param, name)]
            override = dict(combine_param_group_overrides(matching)) if matching else {}
            if "params" in override:
                raise ValueError("a parameter group override may not set 'params'")
            optimizer = override.pop("optimizer", None) or _optimizer_of(param, config)
            expert = not getattr(param, "allreduce", True)
            identity = (optimizer, expert, param_group_override_to_tuple(override))  # type: ignore[arg-type]
            if identity not in groups:
                groups[identity] = {
                    "params": [],
                    "optimizer": optimizer,
                    "is_expert_parallel": expert,
                    "default_config": not any("lr" in key for key in override),
                    "wd_mult": 1.0,
                    "lr_mult": 1.0,
                    "is_decoupled_lr": False,
                    "max_lr": config.lr,
                    "min_lr": config.min_lr,
                    **override,
                }
            groups[identity]["params"].append(param)
    return list(groups.values())
