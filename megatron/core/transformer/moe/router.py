"""Which experts a token goes to."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.tensor_parallel import NormalInit
from megatron.core.transformer.module import MegatronModule


class TopKRouter(MegatronModule):
    """The experts with the largest logits, computed in FP32. Its weight is whole on every rank.

    Args:
        config: Gives ``num_moe_experts``, ``moe_router_topk`` and ``moe_router_pre_softmax``.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        shape = (config.num_moe_experts, config.hidden_size)
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
        self.weight.normal_init = NormalInit(config.init_method_std, shape)  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Shares and experts of every token.

        Args:
            x: ``[tokens, h]``.

        Returns:
            ``[tokens, k]`` each: FP32 weights of the experts' outputs, and the experts' numbers.
        """
        logits = F.linear(x.float(), self.weight.float())
        count = self.config.moe_router_topk
        if self.config.moe_router_pre_softmax:
            return torch.topk(logits.softmax(dim=-1), count, dim=-1)
        chosen, experts = torch.topk(logits, count, dim=-1)
        return chosen.softmax(dim=-1), experts
