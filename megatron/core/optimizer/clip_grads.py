"""Gradient norm, clipping and zero counting over tensors that lie on many ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.core.collectives import all_reduce, group_size

# On the CPU, where FP64 is slow, large tensors are squared in FP32 in chunks that are few enough
# elements to be exact to 6e-8 each, and enough chunks for that to average out to 1e-8.
_CHUNK = 1024
_MANY = 64 * _CHUNK


def local_square_sum(
    grads: Sequence[torch.Tensor], device: torch.device, in_fp64: bool = False
) -> torch.Tensor:
    """Sum of squares of all elements: one FP64 value, in which neither size nor order shows.

    Args:
        grads: FP32 tensors of any shape.
        device: Where the value is wanted if there are none.
        in_fp64: Square in FP64. Without it squares above 2**127 may become Inf, and very small ones 0,
            on the CPU, where FP64 is slow.
    """
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    if in_fp64 or grads[0].is_cuda:
        norms = torch.stack(torch._foreach_norm(list(grads), 2, dtype=torch.float64))
        return norms.square().sum()
    total = torch.zeros((), dtype=torch.float64)
    for grad in grads:
        flat = grad.reshape(-1)
        whole = flat.numel() // _CHUNK * _CHUNK if flat.numel() >= _MANY else 0
        total += torch.linalg.vector_norm(flat[whole:], dtype=torch.float64).square()
        if whole:
            chunks = flat[:whole].view(-1, _CHUNK)
            total += torch.linalg.vector_norm(chunks, dim=1).double().square().sum()
    return total


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


def norm_over(
    parts: Sequence[tuple[Sequence[torch.Tensor], torch.device, dist.ProcessGroup | None]],
) -> float:
    """2-norm of tensors that lie on many ranks, each part summed over its own group."""
    for in_fp64 in (False, True):
        norm = math.sqrt(
            sum_over([(local_square_sum(g, device, in_fp64), group) for g, device, group in parts])
        )
        # Every rank has the same sum, so every rank decides alike to look more closely.
        if math.isfinite(norm) and norm > 1e-12:
            break
    return norm


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
    return norm_over([(grads, device, grad_stats_parallel_group)])


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
