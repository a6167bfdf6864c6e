"""A step of Muon on CUDA for whole matrices: three passes over the elements around batched products."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron.core.optimizer import muon_kernels
from megatron.core.optimizer.muon_batches import Batch, cut_into_batches
from megatron.core.optimizer.muon_kernels import Part, Tables
from megatron.core.optimizer.muon_parts import PartShape
from megatron.core.optimizer.newton_schulz import Coefficients
from megatron.core.optimizer.newton_schulz_cuda import input_scale, orthogonalize

# How many plans are kept: one for every parameter group, of any number that an optimizer might have.
_KEPT_PLANS = 256


class MuonOnCuda:
    """Keeps what steps have in common.

    Args:
        coefficients: One ``(a, b, c)`` a step.
    """

    def __init__(self, coefficients: Sequence[Coefficients]) -> None:
        self._coefficients = list(coefficients)
        # Tables hold addresses, which are their keys too, so an old one is never wrong, only unused.
        self._plans: dict[tuple[int, ...], list[tuple[Batch, Tables]]] = {}

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
                (batch, Tables(_parts_of(batch), grads, buffers, params))
                for batch in cut_into_batches(make_parts(), self._coefficients)
            ]
        plan = self._plans[key]
        device = params[0].device
        if not isinstance(lr, torch.Tensor):
            lr = torch.full((), lr, dtype=torch.float32, device=device)
        for batch, tables in plan:
            memory = torch.empty(batch.numel, dtype=torch.float16, device=device)
            muon_kernels.update_momentum(tables, momentum, nesterov)
            muon_kernels.write_updates(tables, memory, momentum, nesterov)
            for chunk in batch.chunks:
                updates, spare = (
                    memory[start : start + chunk.numel] for start in (chunk.start, chunk.spare)
                )
                orthogonalize(updates, spare, chunk.batches, self._coefficients)
            muon_kernels.apply_updates(tables, memory, lr, weight_decay)
            # Before the next batch's is there.
            del memory, updates, spare


def _parts_of(batch: Batch) -> list[Part]:
    """The batch's parts as the kernels see them."""
    parts = []
    for chunk in batch.chunks:
        place = 0
        for part in chunk.parts:
            scale = input_scale(part.rows, part.columns)
            parts.append(Part(part, scale, chunk.start + place, chunk.result + place))
            place += part.numel
    return parts
