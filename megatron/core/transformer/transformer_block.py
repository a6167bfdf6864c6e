"""Layers, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from megatron.core.transformer.attention import Rotation, SelfAttention
from megatron.core.transformer.layer_groups import LayerGroups
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import MoELayer
from megatron.core.transformer.norms import make_norm


class TransformerLayer(MegatronModule):
    """Attention and MLP, each behind a norm and beside a residual.

    Args:
        config: Options.
        groups: Ranks over which it is cut.
    """

    def __init__(self, config: Any, groups: LayerGroups) -> None:
        super().__init__(config)
        self.input_layernorm = make_norm(config)
        self.self_attention = SelfAttention(config, groups)
        self.pre_mlp_layernorm = make_norm(config)
        self.mlp: MLP | MoELayer
        if config.num_moe_experts is None:
            self.mlp = MLP(config, groups.tp, groups.gtp)
        else:
            self.mlp = MoELayer(config, groups)

    def forward(self, x: torch.Tensor, rotation: Rotation = None) -> torch.Tensor:
        """``[s, b, h]`` to the same."""
        x = x + self._dropped(self.self_attention(self.input_layernorm(x), rotation))
        return x + self._dropped(self.mlp(self.pre_mlp_layernorm(x)))

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        rate = self.config.hidden_dropout
        return F.dropout(x, rate, self.training) if rate else x


class TransformerBlock(MegatronModule):
    """All layers and the norm after them.

    Args:
        config: Options.
        groups: Ranks over which they are cut.
    """

    def __init__(self, config: Any, groups: LayerGroups) -> None:
        super().__init__(config)
        self.layers = torch.nn.ModuleList(
            TransformerLayer(config, groups) for _ in range(config.num_layers)
        )
        self.final_layernorm = make_norm(config)

    def forward(self, x: torch.Tensor, rotation: Rotation = None) -> torch.Tensor:
        """``[s, b, h]`` to the same."""
        for first, last, recomputed in self._stretches():
            if recomputed:
                x = checkpoint(self._run, x, rotation, first, last, use_reentrant=False)
            else:
                x = self._run(x, rotation, first, last)
        return self.final_layernorm(x)

    def _run(self, x: torch.Tensor, rotation: Rotation, first: int, last: int) -> torch.Tensor:
        for layer in self.layers[first:last]:
            x = layer(x, rotation)
        return x

    def _stretches(self) -> Iterator[tuple[int, int, bool]]:
        """First layer, end, and whether its activations are computed anew in the backward pass."""
        count, config = len(self.layers), self.config
        if config.recompute_granularity is None or not torch.is_grad_enabled():
            yield 0, count, False
        elif config.recompute_method == "uniform":
            step = config.recompute_num_layers
            for first in range(0, count, step):
                yield first, min(first + step, count), True
        else:
            kept_from = min(config.recompute_num_layers, count)
            for first in range(kept_from):
                yield first, first + 1, True
            yield kept_from, count, False
