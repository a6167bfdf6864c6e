"""A step of Muon on CUDA for whole matrices: three passes over the elements around batched products."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron.core.optimizer import muon_kernels
from megatron.core.optimizer.muon_kernels import Part, Tables
from megatron.core.optimizer.muon_parts import PartShape
from megatron.core.optimizer.newton_schulz import Coefficients
from megatron.core.optimizer.newton_schulz_cuda import (
    input_scale,
    orthogonalize_batches,
    result_is_in_spare,
)

# Elements that are worked on at once: what a step holds beside weights and state is 4 bytes for each,
# and Gram matrices.
BATCH_ELEMENTS = 2**27
# How many plans are kept; one for every parameter group is enough.
_KEPT_PLANS = 16

# Tables, and start, number, rows and columns of each batch of parts of one shape.
_Plan = tuple[Tables, list[tuple[int, int, int, int]]]


class MuonOnCuda:
    """Keeps what steps have in common.

    Args:
        coefficients: One ``(a, b, c)`` a step.
    """

    def __init__(self, coefficients: Sequence[Coefficients]) -> None:
        self._coefficients = list(coefficients)
        # Tables hold addresses, which are their keys too, so an old one is never wrong, only unused.
        self._plans: dict[tuple[int, ...], list[_Plan]] = {}

    def step(
        self,
        make_parts: Callable[[], Sequence[PartShape]],
        grads: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        params: Sequence[torch.Tensor],
        momentum: float,
        nesterov: bool,
        lr: float | torch.Tensor,
        weight_decay: float,
    ) -> None:
        """Updates momenta and weights.

        Args:
            make_parts: Gives the parts, which cover every row of every matrix once; they do not change.
            grads, buffers, params: FP32, contiguous, ``[rows, columns]`` each.
            momentum, nesterov: See :class:`~megatron.core.optimizer.muon.TensorParallelMuon`.
            lr: Times a part's factor and its orthogonalised update; a tensor is FP32 with one element
                on the GPU, and is read when the kernels run.
            weight_decay: Times ``lr`` of every weight goes.
        """
        key = tuple(t.data_ptr() for tensors in (grads, buffers, params) for t in tensors)
        if key not in self._plans:
            if len(self._plans) >= _KEPT_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[key] = [
                self._make_plan(parts, grads, buffers, params) for parts in _batches(make_parts())
            ]
        plans = self._plans[key]
        memory = torch.empty(
            2 * max(tables.numel for tables, _ in plans),
            dtype=torch.float16,
            device=params[0].device,
        )
        if not isinstance(lr, torch.Tensor):
            lr = torch.full((), lr, dtype=torch.float32, device=memory.device)
        for tables, shapes in plans:
            halves = memory[: 2 * tables.numel]
            muon_kernels.update_momentum(tables, momentum, nesterov)
            muon_kernels.write_updates(tables, halves, momentum, nesterov)
            updates, spare = (
                [
                    half[start : start + count * rows * columns].view(count, rows, columns)
                    for start, count, rows, columns in shapes
                ]
                for half in halves.split(tables.numel)
            )
            orthogonalize_batches(updates, spare, self._coefficients)
            muon_kernels.apply_updates(tables, halves, lr, weight_decay)

    def _make_plan(
        self,
        parts: Sequence[PartShape],
        grads: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        params: Sequence[torch.Tensor],
    ) -> _Plan:
        by_shape: dict[tuple[int, int], list[PartShape]] = {}
        for part in parts:
            by_shape.setdefault((part.rows, part.columns), []).append(part)
        total = sum(
            _aligned(len(members) * rows * columns) for (rows, columns), members in by_shape.items()
        )
        placed: list[Part] = []
        shapes = []
        start = 0
        for (rows, columns), members in by_shape.items():
            start = _aligned(start)
            shapes.append((start, len(members), rows, columns))
            in_spare = result_is_in_spare(rows, columns, self._coefficients)
            for part in members:
                placed.append(
                    Part(part, input_scale(rows, columns), start, start + total * in_spare)
                )
                start += rows * columns
        return Tables(placed, grads, buffers, params, total), shapes


def _aligned(numel: int) -> int:
    """The next place at which a batch may start: matrix products like aligned memory."""
    return -(-numel // 64) * 64


def _batches(parts: Sequence[PartShape]) -> list[list[PartShape]]:
    """Parts in portions of at most :data:`BATCH_ELEMENTS` elements, those of one smaller side together.

    The largest come first: while the GPU works on them the host gets ahead, and small kernels then follow
    each other without gaps.
    """
    batches: list[list[PartShape]] = []
    filled = BATCH_ELEMENTS
    for part in sorted(parts, key=_size, reverse=True):
        numel = part.rows * part.columns
        if filled + numel > BATCH_ELEMENTS:
            batches.append([])
            filled = 0
        batches[-1].append(part)
        filled += numel
    return batches


def _size(part: PartShape) -> tuple[int, int, int]:
    return min(part.rows, part.columns), part.rows, part.columns
