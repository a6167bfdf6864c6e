"""MXFP8 quantisation in Triton: one read of each source writes both copies, many matrices a launch.

Every byte equals the reference in :mod:`megatron.core.quantization.format`. Needs Triton, which is an
optional extra: import this module only where it is installed, as ``kernels.py`` does.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from megatron.core.quantization import format as reference
from megatron.core.quantization.kernels import Storage
from megatron.core.triton_support import to_device


class Tile(NamedTuple):
    """What one program works on: ``rows x columns`` elements, by ``warps`` warps.

    All three are powers of two, the sides at least 32.
    """

    rows: int
    columns: int
    warps: int


# The fastest of those tried on an H200 (benchmarks/mxfp8_install.py --sweep), for 1-D and 2-D scaling.
DEFAULT_TILE = Tile(rows=32, columns=128, warps=2)
DEFAULT_2D_TILE = Tile(rows=64, columns=128, warps=4)

# As what a kernel loads the elements of a source; of BF16, the bits.
_SOURCE_TYPES = {torch.bfloat16: tl.uint16, torch.float16: tl.float16, torch.float32: tl.float32}
# Bytes to which every address must be aligned for the widest loads and stores.
_ALIGNMENT = 16
# Launches whose tables are kept: a training step has one a bucket.
_KEPT_TABLES = 4096

# Columns of the table of matrices; all int64. An address of 0 is one that is not written.
_FIELDS = tl.constexpr(8)
_SOURCE = tl.constexpr(0)
_ROWWISE_DATA = tl.constexpr(1)
_ROWWISE_SCALE = tl.constexpr(2)
_COLUMNWISE_DATA = tl.constexpr(3)
_COLUMNWISE_SCALE = tl.constexpr(4)
_ROWS = tl.constexpr(5)
_COLUMNS = tl.constexpr(6)
_FIRST_TILE = tl.constexpr(7)

_BLOCK = tl.constexpr(reference.BLOCK)
_SCALE_NAN = tl.constexpr(reference.SCALE_NAN)
_SCALE_MAX = tl.constexpr(reference.SCALE_MAX)
_ELEMENT_NAN = tl.constexpr(reference.ELEMENT_NAN)
_E4M3_MAX = tl.constexpr(reference.E4M3_MAX)

# FP32 numbers as bits.
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)
_TWO_TO_MINUS_127 = tl.constexpr(0x00400000)
_BITS_OF_448 = tl.constexpr(0x43E00000)
_SMALLEST_NORMAL_E4M3 = tl.constexpr(0x3C800000)


@triton.jit
def _scales_from_amax(amax):
    """E8M0 bytes, as int32, for blocks whose largest magnitude has the FP32 bits ``amax``.

    Equal to the reference for all 2**31 magnitudes, in integers, so that no device's treatment of
    subnormal numbers matters. 448 is 1.75 * 2**8: the scale's exponent is 8 below that of ``amax``,
    and one more where the mantissa is above 1.75, which is what the addend carries.
    """
    scales = tl.maximum(((amax + 0x1FFFFF) >> 23) - 8, 0)
    # The one number that differs: times 1/448 it is a subnormal that rounds down to 2**-127.
    scales = tl.where(amax == 0x04600001, 0, scales)
    scales = tl.where(amax == _INFINITY, _SCALE_MAX, scales)
    return tl.where(amax > _INFINITY, _SCALE_NAN, scales)


@triton.jit
def _inverse_scale_values(scales):
    """FP32 ``2**(127 - e)`` of E8M0 bytes held as int32; NaN for 255."""
    bits = tl.where(scales == _SCALE_MAX, _TWO_TO_MINUS_127, (_SCALE_MAX - scales) << 23)
    bits = tl.where(scales == _SCALE_NAN, _NAN, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _encode_elements(scaled, HARDWARE_CAST: tl.constexpr):
    """E4M3 bytes of FP32 values: nearest, ties to even, at most 448; any NaN becomes 0x7F."""
    if HARDWARE_CAST:
        limited = tl.clamp(scaled, -_E4M3_MAX, _E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
        return limited.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    # The interpreter's cast does not round to nearest even, and GPUs before 8.9 have none.
    bits = scaled.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(bits & _MAGNITUDE, _BITS_OF_448)
    # 20 mantissa bits go: add just under half, and one more if what stays is odd; then move the bias.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Subnormal E4M3 numbers are multiples of 2**-9, the spacing of FP32 numbers from 2**14 on.
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.int32, bitcast=True) & 0xF
    data = tl.where(magnitude < _SMALLEST_NORMAL_E4M3, subnormal, normal) | ((bits >> 24) & 0x80)
    return tl.where((bits & _MAGNITUDE) > _INFINITY, _ELEMENT_NAN, data).to(tl.uint8)


@triton.jit
def _byte_pointer(entry, FIELD: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(entry + FIELD).to(tl.pointer_type(tl.uint8))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _quantize_tiles(
    matrices,
    matrix_of_tile,
    SOURCE_TYPE: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    IS_2D: tl.constexpr,
    ALIGNED: tl.constexpr,
    HARDWARE_CAST: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Program ``p`` quantises one tile of matrix ``matrix_of_tile[p]``, a row of ``matrices``."""
    ROW_BLOCKS: tl.constexpr = TILE_ROWS // _BLOCK
    COLUMN_BLOCKS: tl.constexpr = TILE_COLUMNS // _BLOCK
    BY_BLOCK: tl.constexpr = (ROW_BLOCKS, _BLOCK, COLUMN_BLOCKS, _BLOCK)
    TILE: tl.constexpr = (TILE_ROWS, TILE_COLUMNS)

    tile = tl.program_id(0)
    entry = matrices + tl.load(matrix_of_tile + tile) * _FIELDS
    rows = tl.multiple_of(tl.load(entry + _ROWS).to(tl.int32), _BLOCK)
    columns = tl.multiple_of(tl.load(entry + _COLUMNS).to(tl.int32), _BLOCK)
    tile -= tl.load(entry + _FIRST_TILE).to(tl.int32)
    tiles_across = tl.cdiv(columns, TILE_COLUMNS)
    row = (tile // tiles_across) * TILE_ROWS
    column = (tile % tiles_across) * TILE_COLUMNS

    # Only the start of a tile can be beyond 2**31 elements; both sides end on whole blocks, so
    # a block is inside or masked as one, and what is masked is zero.
    start = row.to(tl.int64) * columns + column
    in_row, in_column = tl.arange(0, TILE_ROWS), tl.arange(0, TILE_COLUMNS)
    offsets = in_row[:, None] * columns + in_column[None, :]
    row_inside, column_inside = row + in_row < rows, column + in_column < columns
    inside = row_inside[:, None] & column_inside[None, :]
    source = tl.load(entry + _SOURCE).to(tl.pointer_type(SOURCE_TYPE))
    if ALIGNED:
        source = tl.multiple_of(source, 16)
    loaded = tl.load(source + start + offsets, mask=inside, other=0)
    if tl.uint16 == SOURCE_TYPE:
        # BF16 is the upper half of FP32; the interpreter's cast loses subnormal numbers.
        x = (loaded.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        x = loaded.to(tl.float32)
    # Bits of magnitudes are ordered as the magnitudes are, with NaN above infinity.
    magnitude = x.to(tl.int32, bitcast=True) & _MAGNITUDE

    column_block = column // _BLOCK + tl.arange(0, COLUMN_BLOCKS)
    row_block = row // _BLOCK + tl.arange(0, ROW_BLOCKS)
    columns_of_blocks = columns // _BLOCK
    row_scale_offsets = in_row[:, None] * columns_of_blocks + column_block[None, :]
    row_scale_inside = row_inside[:, None] & (column_block < columns_of_blocks)[None, :]
    row_scale_start = row.to(tl.int64) * columns_of_blocks
    column_scale_offsets = row_block[:, None].to(tl.int64) * columns + (column + in_column)[None, :]
    column_scale_inside = (row_block < rows // _BLOCK)[:, None] & column_inside[None, :]

    # Products are exact or, below the normal numbers, rounded as the reference rounds them: Triton's
    # FP32 multiplication keeps subnormal numbers on both sides.
    if IS_2D:
        by_block = tl.reshape(magnitude, BY_BLOCK)
        scales = _scales_from_amax(tl.max(tl.max(by_block, axis=3), axis=1))
        factors = _inverse_scale_values(scales)[:, None, :, None]
        scaled = tl.reshape(tl.reshape(x, BY_BLOCK) * factors, TILE)
        data = _encode_elements(scaled, HARDWARE_CAST)
        if ROWWISE:
            target = _byte_pointer(entry, _ROWWISE_DATA, ALIGNED)
            tl.store(target + start + offsets, data, mask=inside)
            repeated = tl.broadcast_to(scales[:, None, :], (ROW_BLOCKS, _BLOCK, COLUMN_BLOCKS))
            repeated = tl.reshape(repeated, (TILE_ROWS, COLUMN_BLOCKS)).to(tl.uint8)
            target = _byte_pointer(entry, _ROWWISE_SCALE, False)
            tl.store(target + row_scale_start + row_scale_offsets, repeated, row_scale_inside)
        if COLUMNWISE:
            # One copy of the data usually serves both directions.
            if tl.load(entry + _COLUMNWISE_DATA) != 0:
                target = _byte_pointer(entry, _COLUMNWISE_DATA, ALIGNED)
                tl.store(target + start + offsets, data, mask=inside)
            repeated = tl.broadcast_to(scales[:, :, None], (ROW_BLOCKS, COLUMN_BLOCKS, _BLOCK))
            repeated = tl.reshape(repeated, (ROW_BLOCKS, TILE_COLUMNS)).to(tl.uint8)
            target = _byte_pointer(entry, _COLUMNWISE_SCALE, ALIGNED)
            tl.store(target + column_scale_offsets, repeated, column_scale_inside)
    else:
        if ROWWISE:
            BY_ROW: tl.constexpr = (TILE_ROWS, COLUMN_BLOCKS, _BLOCK)
            scales = _scales_from_amax(tl.max(tl.reshape(magnitude, BY_ROW), axis=2))
            factors = _inverse_scale_values(scales)[:, :, None]
            scaled = tl.reshape(tl.reshape(x, BY_ROW) * factors, TILE)
            target = _byte_pointer(entry, _ROWWISE_DATA, ALIGNED)
            data = _encode_elements(scaled, HARDWARE_CAST)
            tl.store(target + start + offsets, data, mask=inside)
            target = _byte_pointer(entry, _ROWWISE_SCALE, False)
            scales = scales.to(tl.uint8)
            tl.store(target + row_scale_start + row_scale_offsets, scales, row_scale_inside)
        if COLUMNWISE:
            BY_COLUMN: tl.constexpr = (ROW_BLOCKS, _BLOCK, TILE_COLUMNS)
            scales = _scales_from_amax(tl.max(tl.reshape(magnitude, BY_COLUMN), axis=1))
            factors = _inverse_scale_values(scales)[:, None, :]
            scaled = tl.reshape(tl.reshape(x, BY_COLUMN) * factors, TILE)
            target = _byte_pointer(entry, _COLUMNWISE_DATA, ALIGNED)
            data = _encode_elements(scaled, HARDWARE_CAST)
            tl.store(target + start + offsets, data, mask=inside)
            target = _byte_pointer(entry, _COLUMNWISE_SCALE, ALIGNED)
            tl.store(target + column_scale_offsets, scales.to(tl.uint8), column_scale_inside)


class _Launch(NamedTuple):
    """What matrices must share to go in one launch."""

    device: torch.device
    dtype: torch.dtype
    rowwise: bool
    columnwise: bool
    is_2d: bool
    aligned: bool


# Addresses of source, rowwise data and scale, columnwise data and scale; rows and columns.
_Matrix = tuple[int, int, int, int, int, int, int]


@functools.lru_cache(maxsize=_KEPT_TABLES)
def _tables(
    matrices: tuple[_Matrix, ...], device: torch.device, stream: int, tile: Tile
) -> tuple[torch.Tensor, torch.Tensor]:
    """The table of matrices ``[matrices, 8]`` (int64) and the matrix of each tile (int32).

    Kept between calls, so that a training step, whose buffers stay where they are, neither copies to
    the device nor waits for it. An entry cannot be stale: it holds only numbers that are in its key,
    and whoever finds it has live memory at those very addresses, even if it was freed in between.
    The stream is in the key because tables are written and read in its order.
    """
    counts = torch.tensor([-(-m[5] // tile.rows) * -(-m[6] // tile.columns) for m in matrices])
    first = counts.cumsum(0) - counts
    table = torch.cat([torch.tensor(matrices, dtype=torch.int64), first[:, None]], dim=1)
    matrix_of_tile = torch.arange(len(matrices), dtype=torch.int32).repeat_interleave(counts)
    return to_device(table, device), to_device(matrix_of_tile, device)


def is_available(tensor: torch.Tensor) -> bool:
    """Whether the kernels run where ``tensor`` is: on an NVIDIA GPU."""
    return tensor.is_cuda and torch.version.hip is None


@functools.cache
def _has_hardware_cast(device: torch.device) -> bool:
    """Whether the FP32 -> E4M3 cast of ``device`` rounds to nearest even (not so interpreted)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _bytes_of(tensor: torch.Tensor | None, shape: tuple[int, int]) -> int:
    if tensor is None:
        return 0
    if tensor.shape != shape or not tensor.is_contiguous() or tensor.dtype != torch.uint8:
        raise ValueError(
            f"the kernel writes contiguous uint8 memory of shape {shape}, got "
            f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"
        )
    return tensor.data_ptr()


def _plan(source: torch.Tensor, storage: Storage) -> tuple[_Launch, _Matrix]:
    """Which launch a contiguous source belongs to, and its row of the table."""
    if source.dtype not in _SOURCE_TYPES:
        raise ValueError(f"MXFP8 quantises BF16, FP16 and FP32 values, got {source.dtype}")
    reference.check_divisible(source.shape)
    rows, columns = source.shape
    rowwise = storage.rowwise_data is not None and storage.rowwise_scale is not None
    columnwise = storage.columnwise_data is not None and storage.columnwise_scale is not None
    row_data = row_scale = column_data = column_scale = 0
    if rowwise:
        row_data = _bytes_of(storage.rowwise_data, (rows, columns))
        row_scale = _bytes_of(storage.rowwise_scale, (rows, columns // reference.BLOCK))
    if columnwise:
        column_data = _bytes_of(storage.columnwise_data, (rows, columns))
        column_scale = _bytes_of(storage.columnwise_scale, (rows // reference.BLOCK, columns))
    address = source.data_ptr()
    # Rowwise scales are narrow and are not written in wide stores.
    aligned = not (address | row_data | column_data | column_scale) % _ALIGNMENT
    if storage.is_2d and column_data == row_data:
        column_data = 0
    launch = _Launch(source.device, source.dtype, rowwise, columnwise, storage.is_2d, aligned)
    return launch, (address, row_data, row_scale, column_data, column_scale, rows, columns)


def quantize_many_triton(
    sources: Sequence[torch.Tensor],
    destinations: Sequence[Storage],
    tile: Tile | None = None,
) -> None:
    """Quantises each source into the storage of the same number; the bytes equal the reference's.

    Matrices go in one launch for each combination of source dtype, directions, scaling and alignment.
    Sources that are not contiguous are copied first.

    Args:
        sources: ``[M, K]`` in BF16, FP16 or FP32, on one GPU with their storages (on the CPU if
            Triton interprets, ``TRITON_INTERPRET=1``).
        destinations: As many storages; a direction that is ``None`` is not made.
        tile: Size of a program's work, the fastest one if ``None``; the bytes do not depend on it.

    Raises:
        ValueError: If a dtype, a shape or a storage's memory does not fit.
    """
    launches: dict[_Launch, list[_Matrix]] = defaultdict(list)
    # Copies have to live until the kernels that read them are in the stream.
    sources = [source.contiguous() for source in sources]
    for source, storage in zip(sources, destinations, strict=True):
        launch, matrix = _plan(source, storage)
        if source.numel() and (launch.rowwise or launch.columnwise):
            launches[launch].append(matrix)
    for launch, matrices in launches.items():
        device = launch.device
        on_gpu = device.type == "cuda"
        with torch.cuda.device(device) if on_gpu else contextlib.nullcontext():
            stream = torch.cuda.current_stream(device).cuda_stream if on_gpu else 0
            size = tile or (DEFAULT_2D_TILE if launch.is_2d else DEFAULT_TILE)
            table, matrix_of_tile = _tables(tuple(matrices), device, stream, size)
            _quantize_tiles[(matrix_of_tile.numel(),)](
                table,
                matrix_of_tile,
                SOURCE_TYPE=_SOURCE_TYPES[launch.dtype],
                ROWWISE=launch.rowwise,
                COLUMNWISE=launch.columnwise,
                IS_2D=launch.is_2d,
                ALIGNED=launch.aligned,
                HARDWARE_CAST=_has_hardware_cast(device),
                TILE_ROWS=size.rows,
                TILE_COLUMNS=size.columns,
                num_warps=size.warps,
            )
