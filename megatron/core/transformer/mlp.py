"""The feed-forward part of a layer."""

from __future__ import annotations

import math
from typing import Any

import torch

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.gtp import GTPRemat
from megatron.core.transformer.module import MegatronModule


class MLP(MegatronModule):
    """Two linear layers around an activation, which may be gated.

    Args:
        config: Options.
        tp_group: Ranks over which the inner features are cut.
        gtp: Ranks over which the weights are cut once more.
        ffn_hidden_size: Inner features; those of ``config`` if ``None``.
    """

    def __init__(
        self,
        config: Any,
        tp_group: Any = None,
        gtp: GTPRemat | None = None,
        ffn_hidden_size: int | None = None,
    ) -> None:
        super().__init__(config)
        width = config.ffn_hidden_size if ffn_hidden_size is None else ffn_hidden_size
        gates = 2 if config.gated_linear_unit else 1
        std = config.init_method_std
        self.linear_fc1 = ColumnParallelLinear(
            config.hidden_size,
            gates * width,
            config=config,
            std=std,
            bias=config.add_bias_linear,
            # Each rank holds a part of the gates and the matching part of what they gate.
            stride=gates,
            tp_group=tp_group,
            gtp=gtp,
        )
        self.linear_fc2 = RowParallelLinear(
            width,
            config.hidden_size,
            config=config,
            std=std / math.sqrt(2 * config.num_layers),
            bias=config.add_bias_linear,
            tp_group=tp_group,
            gtp=gtp,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[s, b, h]`` to the same."""
        inner = self.linear_fc1(x)
        if self.config.gated_linear_unit:
            gate, up = inner.chunk(2, dim=-1)
            inner = self.config.activation_func(gate) * up
        else:
            inner = self.config.activation_func(inner)
        return self.linear_fc2(inner)
