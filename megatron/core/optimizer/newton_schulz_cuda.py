"""Newton-Schulz on CUDA in FP16: batches, symmetric products, and the Gram form where it saves work.

FP16 has three bits more than BF16, and Newton-Schulz needs no range: Gram matrices are kept scaled by
a power of two, which the coefficients take out again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megatron.core.optimizer.muon_batches import GRAM_MATRICES, RESTART_AFTER, uses_gram
from megatron.core.optimizer.newton_schulz import Coefficients
from megatron.core.optimizer.symmetric_products import symmetric_product


def input_scale(rows: int, columns: int) -> float:
    """The power of two by which a matrix of norm 1 is multiplied, so that its elements are near 1."""
    return 2.0 ** round(0.5 * math.log2(rows * columns))


def gram_scale(side: int) -> float:
    """The power of two by which a Gram matrix of trace 1 is multiplied."""
    return 2.0 ** round(math.log2(side))


def orthogonalize(
    memory: torch.Tensor,
    spare: torch.Tensor,
    batches: Sequence[tuple[int, int, int]],
    coefficients: Sequence[Coefficients],
) -> None:
    """Newton-Schulz of every matrix in ``memory``, which is left there or in ``spare``.

    Either all matrices have one shape, or all take the Gram form and their smaller sides agree.

    Args:
        memory: Batches one after the other, FP16, each matrix of norm :func:`input_scale`.
        spare: As much again. :class:`~megatron.core.optimizer.muon_batches.Chunk` tells which of the
            two has the results.
        batches: Number, rows and columns of the matrices of each batch.
        coefficients: One ``(a, b, c)`` a step.
    """
    with _sums_in_fp32():
        if uses_gram(*batches[0][1:], coefficients):
            _gram(memory, spare, batches, coefficients)
        else:
            _plain(memory, spare, batches[0], coefficients)


@contextmanager
def _sums_in_fp32() -> Iterator[None]:
    """Keeps cuBLAS from adding partial sums of a product in FP16."""
    setting = torch.backends.cuda.matmul
    before = setting.allow_fp16_reduced_precision_reduction
    setting.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        setting.allow_fp16_reduced_precision_reduction = before


def _views(memory: torch.Tensor, batches: Sequence[tuple[int, int, int]]) -> list[torch.Tensor]:
    """The batches, as ``[number, rows, columns]`` each."""
    sizes = [number * rows * columns for number, rows, columns in batches]
    return [piece.view(batch) for piece, batch in zip(memory.split(sizes), batches, strict=True)]


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


def _plain(
    memory: torch.Tensor,
    spare: torch.Tensor,
    batch: tuple[int, int, int],
    coefficients: Sequence[Coefficients],
) -> None:
    number, rows, columns = batch
    unscale = input_scale(rows, columns) ** -1
    side = min(rows, columns)
    scale = gram_scale(side)
    polynomial = memory.new_empty((number, side, side))
    for step, (a, b, c) in enumerate(coefficients, 1):
        x, result = memory.view(batch), spare.view(batch)
        # Nothing refers to it any more when the result is written over it.
        gram = spare[: polynomial.numel()].view_as(polynomial)
        # The result of one step has norm times input_scale again, so every step unscales alike.
        symmetric_product(_wide(x), _wide(x), unscale**2 * scale, output=gram)
        symmetric_product(gram, gram, c / scale**2, gram, b / scale, a, output=polynomial)
        _multiply(polynomial, x, result, unscale if step == len(coefficients) else 1.0)
        memory, spare = spare, memory


def _gram(
    memory: torch.Tensor,
    spare: torch.Tensor,
    batches: Sequence[tuple[int, int, int]],
    coefficients: Sequence[Coefficients],
) -> None:
    """See :func:`~megatron.core.optimizer.newton_schulz.iterate_gram`."""
    side = min(batches[0][1:])
    scale = gram_scale(side)
    numbers = [number for number, _, _ in batches]
    unscales = [input_scale(rows, columns) ** -1 for _, rows, columns in batches]
    work = memory.new_empty((GRAM_MATRICES, sum(numbers), side, side))
    stretches = [coefficients[:RESTART_AFTER], coefficients[RESTART_AFTER:]]
    stretches = [stretch for stretch in stretches if stretch]
    for count, stretch in enumerate(stretches, 1):
        # Nothing refers to it any more when results are written over it.
        gram = spare[: work[0].numel()].view_as(work[0])
        xs = _views(memory, batches)
        for x, piece, unscale in zip(xs, gram.split(numbers), unscales, strict=True):
            symmetric_product(_wide(x), _wide(x), unscale**2 * scale, output=piece)
        collected = _collect(gram, work, stretch, scale)
        results = _views(spare, batches)
        for x, result, factor, unscale in zip(
            xs, results, collected.split(numbers), unscales, strict=True
        ):
            _multiply(factor, x, result, unscale if count == len(stretches) else 1.0)
        memory, spare = spare, memory


def _collect(
    gram: torch.Tensor, work: torch.Tensor, coefficients: Sequence[Coefficients], scale: float
) -> torch.Tensor:
    """The product of the steps' polynomials, from a Gram matrix times ``scale``, which is overwritten.

    It lies in ``work``.
    """
    factor, collected, other = work.unbind(0)
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
