"""Causal self-attention with grouped queries."""

from __future__ import annotations

import math
from typing import Any

import torch

from megatron.core.collectives import group_size
from megatron.core.cpu_bf16 import scaled_dot_product_attention
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.rotary import apply_rotary

Rotation = tuple[torch.Tensor, torch.Tensor] | None


class SelfAttention(MegatronModule):
    """Queries, keys and values from one fused layer, whose rows come group by group.

    A query group is ``[query heads of the group, key head, value head]``, each ``kv_channels`` rows.

    Args:
        config: Options.
        tp_group: Ranks over which heads are cut.
    """

    def __init__(self, config: Any, tp_group: Any = None) -> None:
        super().__init__(config)
        ranks = group_size(tp_group) if tp_group is not None else 1
        heads, groups, channels = (
            config.num_attention_heads,
            config.num_query_groups,
            config.kv_channels,
        )
        self.channels = channels
        self.heads_per_group = heads // groups
        self.local_groups = groups // ranks
        std = config.init_method_std
        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size,
            (heads + 2 * groups) * channels,
            config=config,
            std=std,
            bias=config.add_bias_linear or config.add_qkv_bias,
            tp_group=tp_group,
        )
        weight = self.linear_qkv.weight
        weight.is_qkv = True  # type: ignore[attr-defined]
        weight.qkv_split_shapes = [self.heads_per_group * channels, channels, channels]  # type: ignore[attr-defined]
        self.linear_proj = RowParallelLinear(
            heads * channels,
            config.hidden_size,
            config=config,
            std=std / math.sqrt(2 * config.num_layers),
            bias=config.add_bias_linear,
            tp_group=tp_group,
        )

    def forward(self, x: torch.Tensor, rotation: Rotation = None) -> torch.Tensor:
        """``[s, b, h]`` to the same."""
        mixed = self.linear_qkv(x)
        s, b = mixed.shape[:2]
        per_group = mixed.view(s, b, self.local_groups, self.heads_per_group + 2, self.channels)
        query = per_group[..., : self.heads_per_group, :].reshape(s, b, -1, self.channels)
        key, value = per_group[..., -2, :], per_group[..., -1, :]
        if rotation is not None:
            query, key = apply_rotary(query, rotation), apply_rotary(key, rotation)
        # [s, b, heads, channels] to [b, heads, s, channels]
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        context = scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=self.config.attention_dropout if self.training else 0.0,
            is_causal=True,
            enable_gqa=self.heads_per_group > 1,
        )
        return self.linear_proj(context.permute(2, 0, 1, 3).reshape(s, b, -1))
