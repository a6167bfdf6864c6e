"""A layer of experts in the place of an MLP."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.tensor_parallel import all_gather_sequence, scatter_to_sequence_parallel_region
from megatron.core.transformer.layer_groups import LayerGroups, rank_in, ranks_in
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

# Blocks of MXFP8's weight gradient run along the tokens of an expert.
_MXFP8_TOKENS = 32


class MoELayer(MegatronModule):
    """Router, exchange of tokens over the expert-parallel ranks, and this rank's experts.

    Experts are named by their number over all ranks, so a parameter has the same name (and initial
    value) whichever rank holds it. Their parameters carry ``allreduce = False``: their gradients are
    reduced over the expert data-parallel ranks.

    Args:
        config: Options.
        groups: Ranks over which experts, and each one's features and weights, are cut.
    """

    def __init__(self, config: Any, groups: LayerGroups) -> None:
        super().__init__(config)
        self.tp_group = groups.tp
        self.router = TopKRouter(config)
        local = config.num_moe_experts // ranks_in(groups.ep)
        first = rank_in(groups.ep) * local
        # An expert's tokens are no stretches of sequences.
        expert_config = copy.copy(config)
        expert_config.sequence_parallel = False
        self.experts = torch.nn.ModuleDict(
            {
                str(number): MLP(
                    expert_config, groups.expt_tp, groups.expert_gtp, config.moe_ffn_hidden_size
                )
                for number in range(first, first + local)
            }
        )
        for param in self.experts.parameters():
            param.allreduce = False  # type: ignore[attr-defined]
        self.dispatcher = MoEAlltoAllTokenDispatcher(config.num_moe_experts, groups.ep)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[s, b, h]`` to the same."""
        if self.config.sequence_parallel:
            x = all_gather_sequence(x, self.tp_group)
        tokens = x.flatten(0, 1)
        shares, chosen = self.router(tokens)
        arrived, route = self.dispatcher.dispatch(tokens, chosen)
        # An expert without tokens runs too: its weights are gathered and its gradient is reduced
        # together with ranks where it has some.
        outputs = [
            self._expert(expert, own)
            for expert, own in zip(self.experts.values(), arrived, strict=True)
        ]
        result = self.dispatcher.combine(outputs, route, shares).view_as(x)
        if self.config.sequence_parallel:
            result = scatter_to_sequence_parallel_region(result, self.tp_group)
        return result

    def _expert(self, expert: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        count = tokens.size(0)
        if self.config.fp8:
            missing = _MXFP8_TOKENS - count if count == 0 else -count % _MXFP8_TOKENS
            tokens = F.pad(tokens, (0, 0, 0, missing))
        return expert(tokens.unsqueeze(1)).squeeze(1)[:count]
