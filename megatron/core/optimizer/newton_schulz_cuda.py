"""Newton-Schulz on CUDA in FP16: batches, symmetric products, and the Gram form where it saves work.

FP16 has three bits more than BF16, and Newton-Schulz needs no range: Gram matrices are kept scaled by
a power of two, which the coefficients take out again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from megatron.core.optimizer.newton_schulz import Coefficients
from megatron.core.optimizer.symmetric_products import symmetric_product

# Where the Gram form is used; all from measurements on an H200 (benchmarks/muon_step.py). It is faster
# from this ratio of sides on. One restart keeps it closer to the FP64 iteration than plain BF16 is for so
# many steps, and for coefficients that stretch small singular values less than polar_express and cans do.
GRAM_ASPECT = 1.5
GRAM_STEPS = 8
GRAM_STRETCH = 5.0
RESTART_AFTER = 2


def input_scale(rows: int, columns: int) -> float:
    """The power of two by which a matrix of norm 1 is multiplied, so that its elements are near 1."""
    return 2.0 ** round(0.5 * math.log2(rows * columns))


def gram_scale(side: int) -> float:
    """The power of two by which a Gram matrix of trace 1 is multiplied."""
    return 2.0 ** round(math.log2(side))


def uses_gram(rows: int, columns: int, coefficients: Sequence[Coefficients]) -> bool:
    """Whether matrices of this shape are iterated in the Gram form."""
    return (
        max(rows, columns) >= GRAM_ASPECT * min(rows, columns)
        and len(coefficients) <= GRAM_STEPS
        and max(a for a, _, _ in coefficients) <= GRAM_STRETCH
    )


def result_is_in_spare(rows: int, columns: int, coefficients: Sequence[Coefficients]) -> bool:
    """Whether :func:`orthogonalize_batches` leaves the result in the spare memory."""
    steps = moves = len(coefficients)
    if uses_gram(rows, columns, coefficients):
        moves = 1 if steps <= RESTART_AFTER else 2
    return moves % 2 == 1


def orthogonalize_batches(
    batches: Sequence[torch.Tensor],
    spare: Sequence[torch.Tensor],
    coefficients: Sequence[Coefficients],
) -> None:
    """Newton-Schulz of every matrix of every batch, in place or in the spare memory.

    Those in the Gram form whose smaller sides agree are iterated together, whatever their larger ones.

    Args:
        batches: ``[batch, rows, columns]``, FP16, each matrix of norm :func:`input_scale`.
        spare: As much memory again. :func:`result_is_in_spare` tells which of the two has the result.
        coefficients: One ``(a, b, c)`` a step.
    """
    by_side: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for batch, other in zip(batches, spare, strict=True):
        rows, columns = batch.shape[1:]
        if uses_gram(rows, columns, coefficients):
            by_side.setdefault(min(rows, columns), []).append((batch, other))
        else:
            _plain(batch, other, coefficients)
    for pairs in by_side.values():
        _gram(pairs, coefficients)


def _wide(batch: torch.Tensor) -> torch.Tensor:
    """A view whose rows are no more than its columns."""
    return batch.mT if batch.size(1) > batch.size(2) else batch


def _multiply(
    symmetric: torch.Tensor, batch: torch.Tensor, output: torch.Tensor, alpha: float
) -> None:
    """``alpha symmetric batch``, for tall matrices from the other side."""
    tall = batch.size(1) > batch.size(2)
    left, right = (batch, symmetric) if tall else (symmetric, batch)
    torch.baddbmm(output, left, right, beta=0.0, alpha=alpha, out=output)


def _plain(batch: torch.Tensor, spare: torch.Tensor, coefficients: Sequence[Coefficients]) -> None:
    unscale = input_scale(*batch.shape[1:]) ** -1
    side = min(batch.shape[1:])
    scale = gram_scale(side)
    gram, polynomial = batch.new_empty((2, batch.size(0), side, side)).unbind(0)
    for number, (a, b, c) in enumerate(coefficients):
        wide = _wide(batch)
        # The result of one step has norm times input_scale again, so every step unscales alike.
        symmetric_product(wide, wide, unscale**2 * scale, output=gram)
        symmetric_product(gram, gram, c / scale**2, gram, b / scale, a, output=polynomial)
        out = unscale if number + 1 == len(coefficients) else 1.0
        _multiply(polynomial, batch, spare, out)
        batch, spare = spare, batch


def _gram(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], coefficients: Sequence[Coefficients]
) -> None:
    """See :func:`~megatron.core.optimizer.newton_schulz.iterate_gram`; all have the same smaller side."""
    side = min(pairs[0][0].shape[1:])
    scale = gram_scale(side)
    stretches = [coefficients[:RESTART_AFTER], coefficients[RESTART_AFTER:]]
    stretches = [stretch for stretch in stretches if stretch]
    sizes = [batch.size(0) for batch, _ in pairs]
    for number, stretch in enumerate(stretches):
        gram = pairs[0][0].new_empty((sum(sizes), side, side))
        for (batch, _), piece in zip(pairs, gram.split(sizes), strict=True):
            wide = _wide(batch)
            unscale = input_scale(*batch.shape[1:]) ** -1
            symmetric_product(wide, wide, unscale**2 * scale, output=piece)
        collected = _collect(gram, stretch, scale)
        last = number + 1 == len(stretches)
        for (batch, spare), factor in zip(pairs, collected.split(sizes), strict=True):
            out = input_scale(*batch.shape[1:]) ** -1 if last else 1.0
            _multiply(factor, batch, spare, out)
        pairs = [(spare, batch) for batch, spare in pairs]


def _collect(
    gram: torch.Tensor, coefficients: Sequence[Coefficients], scale: float
) -> torch.Tensor:
    """The product of the steps' polynomials, from a Gram matrix times ``scale``, which is overwritten."""
    factor = torch.empty_like(gram)
    collected, other = torch.empty_like(gram), torch.empty_like(gram)
    for number, (a, b, c) in enumerate(coefficients):
        output = collected if number == 0 else factor
        symmetric_product(gram, gram, c / scale**2, gram, b / scale, a, output=output)
        if number > 0:
            symmetric_product(collected, factor, output=other)
            collected, other = other, collected
        step = collected if number == 0 else factor
        if number + 1 < len(coefficients):
            # R <- F R F
            symmetric_product(step, gram, output=other)
            symmetric_product(other, step, output=gram)
    return collected
