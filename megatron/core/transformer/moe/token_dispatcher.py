"""Tokens to the ranks of their experts and back, by all-to-all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.collectives import all_to_all_single, group_size


@dataclass(frozen=True)
class Dispatched:
    """Where the copies of tokens went.

    Attributes:
        order: Copies (token by token, expert by expert of each) in the order of experts.
        sent, received: Copies to and from each rank.
        by_expert: Received copies in the order of this rank's experts.
        counts: Copies for each of this rank's experts.
    """

    order: torch.Tensor
    sent: list[int]
    received: list[int]
    by_expert: torch.Tensor
    counts: list[int]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: torch.Tensor,
        group: dist.ProcessGroup,
        sent: list[int],
        received: list[int],
    ) -> torch.Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        output = x.new_empty((sum(received), x.size(1)))
        all_to_all_single(output, x.contiguous(), group, received, sent)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        result = grad.new_empty((sum(ctx.sent), grad.size(1)))
        all_to_all_single(result, grad.contiguous(), ctx.group, ctx.sent, ctx.received)
        return result, None, None, None


class MoEAlltoAllTokenDispatcher:
    """Sends each copy of a token to the rank that holds its expert. No token is dropped.

    Args:
        num_experts: Experts over all ranks; rank after rank holds equally many.
        ep_group: The ranks; ``None`` for this one alone.
    """

    def __init__(self, num_experts: int, ep_group: dist.ProcessGroup | None) -> None:
        self.group = ep_group
        self.ranks = 1 if ep_group is None else group_size(ep_group)
        self.num_experts = num_experts
        self.num_local_experts = num_experts // self.ranks

    def dispatch(
        self, x: torch.Tensor, experts: torch.Tensor
    ) -> tuple[list[torch.Tensor], Dispatched]:
        """Brings this rank's experts their tokens.

        Args:
            x: ``[tokens, h]``.
            experts: ``[tokens, k]``.

        Returns:
            For each of this rank's experts ``[its tokens, h]``, and what :meth:`combine` needs.
        """
        tokens, k = experts.shape
        flat = experts.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=self.num_experts)
        table = counts.view(self.ranks, self.num_local_experts)
        arriving = torch.empty_like(table)
        if self.ranks > 1:
            all_to_all_single(arriving, table, self.group)
        else:
            arriving.copy_(table)
        # The sizes of the exchange have to be known on the host.
        arrivals, departures = arriving.tolist(), table.sum(1).tolist()
        route = Dispatched(
            order,
            departures,
            [sum(row) for row in arrivals],
            _by_expert(arrivals, x.device),
            [sum(column) for column in zip(*arrivals, strict=True)],
        )
        copies = x.unsqueeze(1).expand(tokens, k, x.size(1)).reshape(tokens * k, -1)[order]
        received = self._exchange(copies, route.sent, route.received)
        return list(received[route.by_expert].split(route.counts)), route

    def combine(
        self, outputs: list[torch.Tensor], route: Dispatched, shares: torch.Tensor
    ) -> torch.Tensor:
        """Brings the experts' outputs back and adds them up.

        Args:
            outputs: For each of this rank's experts ``[its tokens, h]``.
            route: Of :meth:`dispatch`.
            shares: ``[tokens, k]``, FP32.

        Returns:
            ``[tokens, h]`` in the outputs' dtype; the sum over experts is formed in FP32.
        """
        joined = torch.cat(outputs)
        as_received = joined[_inverse(route.by_expert)]
        returned = self._exchange(as_received, route.received, route.sent)[_inverse(route.order)]
        copies = returned.view(*shares.shape, -1)
        return (copies.float() * shares.unsqueeze(-1)).sum(dim=1).to(joined.dtype)

    def _exchange(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        return x if self.ranks == 1 else _AllToAll.apply(x, self.group, sent, received)


def _by_expert(arrivals: list[list[int]], device: torch.device) -> torch.Tensor:
    """Received copies lie source by source, expert by expert; their numbers, expert by expert."""
    starts, cursor = [], 0
    for row in arrivals:
        starts.append([cursor + sum(row[:i]) for i in range(len(row))])
        cursor += sum(row)
    pieces = [
        torch.arange(starts[source][expert], starts[source][expert] + row[expert])
        for expert in range(len(arrivals[0]))
        for source, row in enumerate(arrivals)
    ]
    return torch.cat(pieces).to(device)


def _inverse(permutation: torch.Tensor) -> torch.Tensor:
    result = torch.empty_like(permutation)
    result[permutation] = torch.arange(permutation.numel(), device=permutation.device)
    return result
