"""Moves between a tensor-parallel region and its surroundings, forward and backward.

Each function is one collective forward and its adjoint backward. Activations are ``[s, b, h]``; the
sequence-parallel functions cut dimension 0 and the others the last. With one rank all are the identity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.collectives import (
    all_gather_into_tensor,
    all_reduce,
    group_rank,
    group_size,
    reduce_scatter_tensor,
)

Group = dist.ProcessGroup | None


def _reduce(x: torch.Tensor, group: Group) -> torch.Tensor:
    x = x.contiguous().clone()
    all_reduce(x, group)
    return x


def _gather_first(x: torch.Tensor, group: Group) -> torch.Tensor:
    x = x.contiguous()
    output = x.new_empty((x.size(0) * group_size(group), *x.shape[1:]))
    all_gather_into_tensor(output.view(-1), x.view(-1), group)
    return output


def _reduce_scatter_first(x: torch.Tensor, group: Group) -> torch.Tensor:
    x = x.contiguous()
    output = x.new_empty((x.size(0) // group_size(group), *x.shape[1:]))
    reduce_scatter_tensor(output.view(-1), x.view(-1), group)
    return output


def _split_first(x: torch.Tensor, group: Group) -> torch.Tensor:
    return x.chunk(group_size(group), dim=0)[group_rank(group)].contiguous()


def _gather_last(x: torch.Tensor, group: Group) -> torch.Tensor:
    pieces = _gather_first(x.unsqueeze(0), group)
    return torch.cat(pieces.unbind(0), dim=-1)


def _split_last(x: torch.Tensor, group: Group) -> torch.Tensor:
    return x.chunk(group_size(group), dim=-1)[group_rank(group)].contiguous()


def _reduce_scatter_last(x: torch.Tensor, group: Group) -> torch.Tensor:
    pieces = torch.stack(x.chunk(group_size(group), dim=-1))
    return _reduce_scatter_first(pieces, group).squeeze(0)


def _identity(x: torch.Tensor, group: Group) -> torch.Tensor:
    return x


class _Mapping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, there: Any, back: Any) -> torch.Tensor:  # type: ignore[override]
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.back(grad, ctx.group), None, None, None


def _make(there: Callable[..., torch.Tensor], back: Callable[..., torch.Tensor], doc: str) -> Any:
    def mapping(x: torch.Tensor, group: Group = None) -> torch.Tensor:
        if group is None or group_size(group) == 1:
            return x
        return _Mapping.apply(x, group, there, back)

    mapping.__doc__ = doc
    return mapping


copy_to_tensor_model_parallel_region = _make(
    _identity, _reduce, "The same on every rank; gradients are summed."
)
reduce_from_tensor_model_parallel_region = _make(
    _reduce, _identity, "The sum over ranks; gradients are the same on every rank."
)
scatter_to_tensor_model_parallel_region = _make(
    _split_last, _gather_last, "This rank's part of the last dimension."
)
gather_from_tensor_model_parallel_region = _make(
    _gather_last, _split_last, "All parts of the last dimension."
)
gather_for_partial_use = _make(
    _gather_last,
    _reduce_scatter_last,
    "All parts of the last dimension, of which every rank uses another share: gradients are partial sums.",
)
all_gather_sequence = _make(
    _gather_first, _split_first, "All tokens, for a region that is the same on every rank."
)
scatter_to_sequence_parallel_region = _make(_split_first, _gather_first, "This rank's tokens.")
gather_from_sequence_parallel_region = _make(
    _gather_first,
    _reduce_scatter_first,
    "All tokens, for a region whose gradients are partial sums.",
)
reduce_scatter_to_sequence_parallel_region = _make(
    _reduce_scatter_first, _gather_first, "The sum over ranks, of this rank's tokens."
)
