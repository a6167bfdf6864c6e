"""Products of symmetric matrices on CUDA: each pair of mirrored tiles is computed once.

Triton kernels in FP16 or BF16 with FP32 sums. All take batches ``[batch, n, ...]``; a matrix's result
does not depend on the batch that it lies in. Tiles are moved by the GPU's copy engine (TMA): with plain
loads and stores the mirrored one costs as much as it saves.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


class Tiling(NamedTuple):
    """What one program computes: ``side`` rows of one or two squares, in steps of ``depth``."""

    side: int
    squares: int
    depth: int
    warps: int
    stages: int


# The fastest of those tried on an H200 (benchmarks/muon_step.py --tune).
TILING = Tiling(side=128, squares=1, depth=64, warps=8, stages=3)


def symmetric_product(
    left: torch.Tensor,
    right: torch.Tensor,
    alpha: float = 1.0,
    addend: torch.Tensor | None = None,
    beta: float = 0.0,
    gamma: float = 0.0,
    output: torch.Tensor | None = None,
    tiling: Tiling = TILING,
) -> torch.Tensor:
    """``alpha left right^T + beta addend + gamma I`` where that is symmetric.

    It is for a Gram matrix (``left`` is ``right``) and for two symmetric matrices that commute.

    Args:
        left, right: ``[batch, n, k]``, FP16 or BF16, views of contiguous memory or transposed ones;
            rows of the memory, and the memory, start at multiples of 16 bytes.
        alpha: Factor of the product.
        addend: Symmetric, ``[batch, n, n]``, contiguous.
        beta: Its factor.
        gamma: Added to the diagonal.
        output: Where the result goes, ``[batch, n, n]``, contiguous; new memory if ``None``.
        tiling: How the work is cut.

    Returns:
        ``[batch, n, n]`` in ``left``'s dtype, exactly symmetric.
    """
    batch, n, k = left.shape
    if output is None:
        output = torch.empty((batch, n, n), dtype=left.dtype, device=left.device)
    side, depth, squares = tiling.side, tiling.depth, tiling.squares
    left_tiles, left_is_tall = _tiles_of(left, side, depth)
    right_tiles, right_is_tall = _tiles_of(right, side * squares, depth)
    square = [1, side, side]
    # Rows in groups of as many as a program has squares: the first group takes a program a row, ...
    groups = -(-n // (side * squares))
    _symmetric_product[(squares * groups * (groups + 1) // 2, batch)](
        left_tiles,
        right_tiles,
        TensorDescriptor.from_tensor(output if addend is None else addend, square),
        TensorDescriptor.from_tensor(output, square),
        k,
        alpha,
        beta,
        gamma,
        HAS_ADDEND=addend is not None,
        LEFT_IS_TALL=left_is_tall,
        RIGHT_IS_TALL=right_is_tall,
        SIDE=side,
        SQUARES=squares,
        DEPTH=depth,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return output


def _tiles_of(matrix: torch.Tensor, side: int, depth: int) -> tuple[TensorDescriptor, bool]:
    """A matrix by tiles of its memory, and whether that holds its transpose."""
    if matrix.stride(2) == 1:
        return TensorDescriptor.from_tensor(matrix, [1, side, depth]), False
    return TensorDescriptor.from_tensor(matrix.mT, [1, depth, side]), True


@triton.jit
def _load(
    tiles, batch, first, deep, IS_TALL: tl.constexpr, SIDE: tl.constexpr, DEPTH: tl.constexpr
):  # type: ignore[no-untyped-def]
    """``[SIDE, DEPTH]`` of a matrix."""
    if IS_TALL:
        return tl.trans(tl.reshape(tiles.load([batch, deep, first]), (DEPTH, SIDE)))
    return tl.reshape(tiles.load([batch, first, deep]), (SIDE, DEPTH))


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    total,
    addend,
    output,
    batch,
    row,
    column,
    beta,
    gamma,
    HAS_ADDEND: tl.constexpr,
    SIDE: tl.constexpr,
):
    """A square of sums on or below the diagonal, and its mirror image."""
    first_row, first_column = row * SIDE, column * SIDE
    if HAS_ADDEND:
        added = tl.reshape(addend.load([batch, first_row, first_column]), (SIDE, SIDE))
        total += beta * added.to(tl.float32)
    if row == column:
        rows, columns = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
        total = tl.where(rows == columns, total + gamma, total)
        total = tl.where(rows >= columns, total, tl.trans(total))
    value = total.to(output.dtype)
    output.store([batch, first_row, first_column], tl.reshape(value, (1, SIDE, SIDE)))
    if row != column:
        mirrored = tl.reshape(tl.trans(value), (1, SIDE, SIDE))
        output.store([batch, first_column, first_row], mirrored)


@triton.jit
def _symmetric_product(  # type: ignore[no-untyped-def]
    left,
    right,
    addend,
    output,
    k,
    alpha,
    beta,
    gamma,
    HAS_ADDEND: tl.constexpr,
    LEFT_IS_TALL: tl.constexpr,
    RIGHT_IS_TALL: tl.constexpr,
    SIDE: tl.constexpr,
    SQUARES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    number, batch = tl.program_id(0), tl.program_id(1)
    # Groups of SQUARES rows of squares; each row of group g has g + 1 programs, up to the diagonal. The
    # root is exact up to one, which is put right.
    group = ((tl.sqrt(8.0 * number / SQUARES + 1.0) - 1.0) * 0.5).to(tl.int32)
    group = tl.where((group + 1) * (group + 2) * SQUARES // 2 <= number, group + 1, group)
    group = tl.where(group * (group + 1) * SQUARES // 2 > number, group - 1, group)
    place = number - group * (group + 1) * SQUARES // 2
    row = group * SQUARES + place // (group + 1)
    column = place % (group + 1) * SQUARES
    total = tl.zeros((SIDE, SIDE * SQUARES), dtype=tl.float32)
    for deep in range(0, k, DEPTH):
        one = _load(left, batch, row * SIDE, deep, LEFT_IS_TALL, SIDE, DEPTH)
        other = _load(right, batch, column * SIDE, deep, RIGHT_IS_TALL, SIDE * SQUARES, DEPTH)
        total = tl.dot(one, tl.trans(other), total)
    total = total * alpha
    if SQUARES == 1:
        _store(total, addend, output, batch, row, column, beta, gamma, HAS_ADDEND, SIDE)
    else:
        first, second = tl.split(tl.permute(tl.reshape(total, (SIDE, 2, SIDE)), (0, 2, 1)))
        _store(first, addend, output, batch, row, column, beta, gamma, HAS_ADDEND, SIDE)
        # In the first row of a group the last program's second square lies above the diagonal.
        if column < row:
            _store(second, addend, output, batch, row, column + 1, beta, gamma, HAS_ADDEND, SIDE)
