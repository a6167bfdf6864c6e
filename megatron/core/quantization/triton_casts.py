"""FP32 to BF16 in one launch for many tensors. Needs Triton."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl

from megatron.core.triton_support import to_device

# Elements and warps of one program; the fastest of those tried on an H200.
TILE, WARPS = 4096, 8
_FIELDS = tl.constexpr(4)


def cast_fp32_to_bf16(
    destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
) -> None:
    """Rounds every FP32 source to nearest even into the contiguous BF16 destination of its number.

    Raises:
        ValueError: If a pair has different numbers of elements.
    """
    for destination, source in zip(destinations, sources, strict=True):
        if destination.numel() != source.numel():
            raise ValueError(f"cannot cast {source.numel()} elements into {destination.numel()}")
    pairs = tuple(
        (source.data_ptr(), destination.data_ptr(), source.numel())
        for destination, source in zip(destinations, sources, strict=True)
    )
    table, tensor_of_tile, aligned = _tables(pairs, destinations[0].device)
    _cast[(tensor_of_tile.numel(),)](
        table, tensor_of_tile, IS_ALIGNED=aligned, TILE=TILE, num_warps=WARPS
    )


# The key holds every address and size, so what is kept is never wrong, only unused.
@lru_cache(maxsize=4096)
def _tables(
    pairs: tuple[tuple[int, int, int], ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Addresses, sizes and first tiles; the tensor of every tile; whether all is 16-byte aligned."""
    rows, tiles, total = [], [], 0
    for number, (source, destination, numel) in enumerate(pairs):
        count = -(-numel // TILE)
        rows.append([source, destination, numel, total])
        tiles.append(torch.full((count,), number, dtype=torch.int32))
        total += count
    aligned = all(source % 16 == 0 and destination % 16 == 0 for source, destination, _ in pairs)
    table = to_device(torch.tensor(rows, dtype=torch.int64), device)
    of_tile = to_device(torch.cat(tiles), device)
    return table, of_tile, aligned


@triton.jit
def _cast(table, tensor_of_tile, IS_ALIGNED: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    tile = tl.program_id(0)
    entry = table + tl.load(tensor_of_tile + tile).to(tl.int64) * _FIELDS
    source = tl.load(entry).to(tl.pointer_type(tl.float32))
    destination = tl.load(entry + 1).to(tl.pointer_type(tl.bfloat16))
    if IS_ALIGNED:
        source = tl.multiple_of(source, 16)
        destination = tl.multiple_of(destination, 16)
    first = (tile - tl.load(entry + 3)).to(tl.int64) * TILE
    numel = tl.load(entry + 2)
    offsets = first + tl.arange(0, TILE)
    if first + TILE <= numel:
        tl.store(destination + offsets, tl.load(source + offsets).to(tl.bfloat16))
    else:
        inside = offsets < numel
        value = tl.load(source + offsets, mask=inside, other=0.0)
        tl.store(destination + offsets, value.to(tl.bfloat16), mask=inside)
