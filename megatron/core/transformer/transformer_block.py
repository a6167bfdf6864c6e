"""Layers, one after the other."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.transformer.attention import Rotation, SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.norms import make_norm


class TransformerLayer(MegatronModule):
    """Attention and MLP, each behind a norm and beside a residual.

    Args:
        config: Options.
        tp_group: Tensor-parallel ranks.
    """

    def __init__(self, config: Any, tp_group: Any = None) -> None:
        super().__init__(config)
        self.input_layernorm = make_norm(config)
        self.self_attention = SelfAttention(config, tp_group)
        self.pre_mlp_layernorm = make_norm(config)
        self.mlp = MLP(config, tp_group)

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
        tp_group: Tensor-parallel ranks.
    """

    def __init__(self, config: Any, tp_group: Any = None) -> None:
        super().__init__(config)
        self.layers = torch.nn.ModuleList(
            TransformerLayer(config, tp_group) for _ in range(config.num_layers)
        )
        self.final_layernorm = make_norm(config)

    def forward(self, x: torch.Tensor, rotation: Rotation = None) -> torch.Tensor:
        """``[s, b, h]`` to the same."""
        for layer in self.layers:
            x = layer(x, rotation)
        return self.final_layernorm(x)
