"""Muon's work on elements on CUDA, for many matrices in one launch each.

Three passes where separate operations take six: momentum and the squares of the update; the update
itself, normalised, in FP16; decay and the orthogonalised update into the weight. They work on parts: rows
of a matrix that are orthogonalised together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from megatron.core.optimizer.muon_parts import PartShape
from megatron.core.triton_support import to_device

TILE_ROWS, TILE_COLUMNS, WARPS = 16, 256, 8


@dataclass(frozen=True)
class Part:
    """Rows of a matrix, and where their update lies.

    Attributes:
        shape: Which rows.
        scale: What their norm is brought to.
        offset: Where the update lies in the FP16 memory, in elements.
        result: Where the orthogonalised update does.
    """

    shape: PartShape
    scale: float
    offset: int
    result: int

    @property
    def tiles(self) -> int:
        """Number of tiles that cover it."""
        return -(-self.shape.rows // TILE_ROWS) * -(-self.shape.columns // TILE_COLUMNS)


class Tables:
    """What the kernels read about parts; it stays on the device as long as memory stays where it is.

    Attributes:
        is_aligned: Every row of everything begins at a multiple of 16 bytes.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        grads: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        params: Sequence[torch.Tensor],
    ) -> None:
        device = params[0].device
        numbers, total = [], 0
        part_of_tile: list[torch.Tensor] = []
        for place, part in enumerate(parts):
            shape = part.shape
            numbers.append(
                [
                    grads[shape.matrix].data_ptr(),
                    buffers[shape.matrix].data_ptr(),
                    params[shape.matrix].data_ptr(),
                    part.offset,
                    part.result,
                    shape.period,
                    shape.start,
                    shape.count,
                    shape.rows,
                    shape.columns,
                    total,
                    part.tiles,
                ]
            )
            part_of_tile.append(torch.full((part.tiles,), place, dtype=torch.int32))
            total += part.tiles
        self.count, self.tiles = len(parts), total
        tensors = [t for part in parts for t in _of(part, grads, buffers, params)]
        self.is_aligned = all(t.data_ptr() % 16 == 0 for t in tensors) and all(
            part.shape.columns % 16 == 0 for part in parts
        )
        floats = torch.tensor([[p.scale, p.shape.factor] for p in parts], dtype=torch.float32)
        self.numbers = to_device(torch.tensor(numbers, dtype=torch.int64), device)
        self.floats = to_device(floats, device)
        self.part_of_tile = to_device(torch.cat(part_of_tile), device)
        self.squares = torch.empty(total, dtype=torch.float64, device=device)
        # Two factors each, as the inverse of a small norm is no FP32 number.
        self.inverse_norms = torch.empty((len(parts), 2), dtype=torch.float32, device=device)


def _of(part: Part, *lists: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensors[part.shape.matrix] for tensors in lists]


def update_momentum(tables: Tables, momentum: float, nesterov: bool) -> None:
    """``buffer = lerp(buffer, grad, 1 - momentum)``, and the norms of the updates that follow."""
    _momentum[(tables.tiles,)](
        tables.numbers,
        tables.part_of_tile,
        tables.squares,
        momentum,
        NESTEROV=nesterov,
        IS_ALIGNED=tables.is_aligned,
        TILE_ROWS=TILE_ROWS,
        TILE_COLUMNS=TILE_COLUMNS,
        num_warps=WARPS,
    )
    _norms[(tables.count,)](
        tables.numbers, tables.floats, tables.squares, tables.inverse_norms, BLOCK=1024
    )


def write_updates(tables: Tables, output: torch.Tensor, momentum: float, nesterov: bool) -> None:
    """The updates, each of its part's norm, into FP16 memory."""
    _updates[(tables.tiles,)](
        tables.numbers,
        tables.part_of_tile,
        tables.inverse_norms,
        output,
        momentum,
        NESTEROV=nesterov,
        IS_ALIGNED=tables.is_aligned,
        TILE_ROWS=TILE_ROWS,
        TILE_COLUMNS=TILE_COLUMNS,
        num_warps=WARPS,
    )


def apply_updates(
    tables: Tables, orthogonal: torch.Tensor, lr: torch.Tensor, weight_decay: float
) -> None:
    """``param = (1 - lr weight_decay) param - lr factor orthogonal``; ``lr`` is on the device."""
    _apply[(tables.tiles,)](
        tables.numbers,
        tables.part_of_tile,
        tables.floats,
        orthogonal,
        lr,
        weight_decay,
        IS_ALIGNED=tables.is_aligned,
        TILE_ROWS=TILE_ROWS,
        TILE_COLUMNS=TILE_COLUMNS,
        num_warps=WARPS,
    )


# A part's numbers: addresses of gradient, momentum and weight; places of update and result; period, start
# and count; rows and columns; first tile and number of tiles.
NUMBERS = tl.constexpr(12)


@triton.jit
def _pointer(entry, TYPE: tl.constexpr, IS_ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    pointer = tl.load(entry).to(tl.pointer_type(TYPE))
    return tl.multiple_of(pointer, 16) if IS_ALIGNED else pointer


@triton.jit
def _place(  # type: ignore[no-untyped-def]
    numbers,
    part_of_tile,
    IS_ALIGNED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """This tile's part, where its elements lie in the matrix and in the part, and which there are."""
    part = tl.load(part_of_tile + tl.program_id(0)).to(tl.int64)
    at = numbers + part * NUMBERS
    rows, columns = tl.load(at + 8).to(tl.int32), tl.load(at + 9).to(tl.int32)
    if IS_ALIGNED:
        columns = tl.multiple_of(columns, 16)
    local = tl.program_id(0) - tl.load(at + 10).to(tl.int32)
    across = tl.cdiv(columns, TILE_COLUMNS)
    row = (local // across) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = (local % across) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    period, start = tl.load(at + 5).to(tl.int32), tl.load(at + 6).to(tl.int32)
    count = tl.load(at + 7).to(tl.int32)
    in_matrix = row // count * period + start + row % count
    there = (in_matrix.to(tl.int64) * columns)[:, None] + column[None, :]
    packed = (row.to(tl.int64) * columns)[:, None] + column[None, :]
    return at, there, packed, inside


@triton.jit
def _momentum(  # type: ignore[no-untyped-def]
    numbers,
    part_of_tile,
    squares,
    momentum,
    NESTEROV: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    at, there, _, inside = _place(numbers, part_of_tile, IS_ALIGNED, TILE_ROWS, TILE_COLUMNS)
    grads = _pointer(at, tl.float32, IS_ALIGNED)
    buffers = _pointer(at + 1, tl.float32, IS_ALIGNED)
    grad = tl.load(grads + there, mask=inside, other=0.0)
    buffer = tl.load(buffers + there, mask=inside, other=0.0)
    buffer = buffer + (1 - momentum) * (grad - buffer)
    tl.store(buffers + there, buffer, mask=inside)
    update = grad + momentum * (buffer - grad) if NESTEROV else buffer
    update = tl.where(inside, update, 0.0).to(tl.float64)
    tl.store(squares + tl.program_id(0), tl.sum(update * update))


@triton.jit
def _norms(numbers, floats, squares, inverse_norms, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    part = tl.program_id(0)
    at = numbers + part.to(tl.int64) * NUMBERS
    first, count = tl.load(at + 10), tl.load(at + 11)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(0, count, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        total += tl.load(squares + first + tile, mask=tile < count, other=0.0)
    norm = tl.sqrt(tl.sum(total))
    wanted = tl.load(floats + 2 * part).to(tl.float64)
    # The power of two that brings the norm near 1, as near as one is an FP32 number.
    exponent = 1023 - (norm.to(tl.int64, bitcast=True) >> 52)
    exponent = tl.minimum(tl.maximum(exponent, -120), 120)
    power = ((exponent + 127) << 23).to(tl.int32).to(tl.float32, bitcast=True)
    rest = tl.where(norm == 0.0, 0.0, wanted / (norm * power.to(tl.float64)))
    # Of an infinite norm nothing would be left but zeros.
    rest = tl.where(norm < float("inf"), rest, float("nan"))
    tl.store(inverse_norms + 2 * part, power)
    tl.store(inverse_norms + 2 * part + 1, rest.to(tl.float32))


@triton.jit
def _updates(  # type: ignore[no-untyped-def]
    numbers,
    part_of_tile,
    inverse_norms,
    output,
    momentum,
    NESTEROV: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    at, there, packed, inside = _place(numbers, part_of_tile, IS_ALIGNED, TILE_ROWS, TILE_COLUMNS)
    buffers = _pointer(at + 1, tl.float32, IS_ALIGNED)
    update = tl.load(buffers + there, mask=inside, other=0.0)
    if NESTEROV:
        grads = _pointer(at, tl.float32, IS_ALIGNED)
        grad = tl.load(grads + there, mask=inside, other=0.0)
        update = grad + momentum * (update - grad)
    inverse = inverse_norms + 2 * tl.load(part_of_tile + tl.program_id(0))
    result = (update * tl.load(inverse) * tl.load(inverse + 1)).to(tl.float16)
    first = tl.load(at + 3)
    if IS_ALIGNED:
        first = tl.multiple_of(first, 16)
    tl.store(output + first + packed, result, mask=inside)


@triton.jit
def _apply(  # type: ignore[no-untyped-def]
    numbers,
    part_of_tile,
    floats,
    orthogonal,
    lr,
    weight_decay,
    IS_ALIGNED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    at, there, packed, inside = _place(numbers, part_of_tile, IS_ALIGNED, TILE_ROWS, TILE_COLUMNS)
    factor = tl.load(floats + 2 * tl.load(part_of_tile + tl.program_id(0)) + 1)
    params = _pointer(at + 2, tl.float32, IS_ALIGNED)
    param = tl.load(params + there, mask=inside, other=0.0)
    first = tl.load(at + 4)
    if IS_ALIGNED:
        first = tl.multiple_of(first, 16)
    update = tl.load(orthogonal + first + packed, mask=inside, other=0.0)
    rate = tl.load(lr)
    kept = (1.0 - rate.to(tl.float64) * weight_decay).to(tl.float32)
    result = param * kept - (rate * factor) * update.to(tl.float32)
    tl.store(params + there, result, mask=inside)
