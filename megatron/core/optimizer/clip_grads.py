"""Gradient norm, clipping and zero counting over tensors that lie on many ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.core.collectives import all_reduce, group_size


def local_square_sum(grads: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Sum of squares of all elements: one FP64 value, so that neither size nor order shows."""
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float64))
    return norms.square().sum()


def local_zero_count(grads: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Number of elements that are zero: one FP64 value."""
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([grad.numel() - grad.count_nonzero() for grad in grads]).sum().double()


def sum_over(values: Sequence[tuple[torch.Tensor, dist.ProcessGroup | None]]) -> float:
    """Adds FP64 values up, each summed over its own group first; one collective a distinct group.

    ``None`` stands for all ranks, as everywhere in torch.distributed.
    """
    by_group: dict[dist.ProcessGroup | None, torch.Tensor] = {}
    for value, group in values:
        by_group[group] = by_group[group] + value if group in by_group else value
    for group, value in by_group.items():
        if group_size(group) > 1:
            all_reduce(value, group)
    return float(torch.stack(list(by_group.values())).sum()) if by_group else 0.0


def get_grad_norm_fp32(
    grads_for_norm: list[torch.Tensor] | torch.Tensor,
    norm_type: float = 2,
    grad_stats_parallel_group: dist.ProcessGroup | None = None,
) -> float:
    """Norm of all elements over all ranks of a group.

    Args:
        grads_for_norm: This rank's tensors; over the group each element must come once.
        norm_type: 2; Megatron's other norms are not used here.
        grad_stats_parallel_group: Ranks to sum over; ``None`` for all.

    Raises:
        ValueError: If ``norm_type`` is not 2.
    """
    if norm_type != 2:
        raise ValueError(f"norm_type must be 2, got {norm_type}")
    grads = [grads_for_norm] if isinstance(grads_for_norm, torch.Tensor) else list(grads_for_norm)
    device = grads[0].device if grads else torch.device("cpu")
    return sum_over([(local_square_sum(grads, device), grad_stats_parallel_group)]) ** 0.5


def clip_coefficient(total_norm: float, max_norm: float) -> float:
    """Factor that brings ``total_norm`` down to ``max_norm``; 1 if it is below."""
    return min(1.0, max_norm / (total_norm + 1e-6))


def clip_grad_by_total_norm_fp32(
    parameters: Sequence[torch.Tensor] | torch.Tensor, max_norm: float, total_norm: float
) -> None:
    """Scales the gradients of ``parameters`` in place so that the norm is at most ``max_norm``."""
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    grads = [param.grad for param in params if param.grad is not None]
    coefficient = clip_coefficient(total_norm, max_norm)
    if grads and coefficient < 1.0:
        torch._foreach_mul_(grads, coefficient)
