"""Causal self-attention with grouped queries."""

from __future__ import annotations

import math
from typing import Any

import torch

from megatron.core.cpu_bf16 import scaled_dot_product_attention
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_for_partial_use,
)
from megatron.core.transformer.layer_groups import LayerGroups, rank_in, ranks_in
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.rotary import apply_rotary

Rotation = tuple[torch.Tensor, torch.Tensor] | None


class SelfAttention(MegatronModule):
    """Queries, keys and values from one fused layer, whose rows come group by group.

    A query group is ``[query heads of the group, key head, value head]``, each ``kv_channels`` rows.
    With more tensor-parallel ranks than query groups the ranks of a group share its query heads.

    Args:
        config: Options.
        groups: Ranks over which heads and weights are cut.
    """

    def __init__(self, config: Any, groups: LayerGroups) -> None:
        super().__init__(config)
        ranks = ranks_in(groups.tp)
        heads, query_groups, channels = (
            config.num_attention_heads,
            config.num_query_groups,
            config.kv_channels,
        )
        self.channels = channels
        self.tp_group = groups.tp
        self.heads_per_group = heads // query_groups
        self.local_groups = max(query_groups // ranks, 1)
        self.ranks_per_group = max(ranks // query_groups, 1)
        std = config.init_method_std
        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size,
            (heads + 2 * query_groups) * channels,
            config=config,
            std=std,
            bias=config.add_bias_linear or config.add_qkv_bias,
            tp_group=groups.tp,
            gtp=groups.gtp,
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
            tp_group=groups.tp,
            gtp=groups.gtp,
        )

    def forward(self, x: torch.Tensor, rotation: Rotation = None) -> torch.Tensor:
        """``[s, b, h]`` to the same."""
        query, key, value = self._heads(self.linear_qkv(x))
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
            enable_gqa=query.size(1) > key.size(1),
        )
        return self.linear_proj(context.permute(2, 0, 1, 3).flatten(2))

    def _heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """This rank's queries, keys and values, ``[s, b, heads, channels]`` each."""
        s, b = mixed.shape[:2]
        groups, heads = self.local_groups, self.heads_per_group
        first = 0
        if self.ranks_per_group > 1:
            # Ranks hold equal shares of the fused rows, which are no whole groups.
            mixed = gather_for_partial_use(mixed, self.tp_group)
            group, place = divmod(rank_in(self.tp_group), self.ranks_per_group)
            rows = (heads + 2) * self.channels
            mixed = mixed[..., group * rows : (group + 1) * rows]
            first = place * (heads // self.ranks_per_group)
        per_group = mixed.reshape(s, b, groups, heads + 2, self.channels)
        last = first + heads // self.ranks_per_group
        query = per_group[..., first:last, :].reshape(s, b, -1, self.channels)
        return query, per_group[..., -2, :], per_group[..., -1, :]
