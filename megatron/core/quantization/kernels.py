"""The one door to kernels that quantise: whichever is behind it, the bytes are the same."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from megatron.core.quantization import format as reference
from megatron.core.triton_support import has_triton


@dataclass(frozen=True)
class Storage:
    """The bytes of one MXFP8 matrix ``[M, K]``; a direction that is not kept is ``None``.

    Attributes:
        rowwise_data: ``[M, K]``; ``rowwise_scale``: ``[M, K/32]``; both uint8.
        columnwise_data: ``[M, K]``, in 2-D scaling the same tensor; ``columnwise_scale``: ``[M/32, K]``.
        is_2d: One scale for each 32 x 32 block.
    """

    rowwise_data: torch.Tensor | None
    rowwise_scale: torch.Tensor | None
    columnwise_data: torch.Tensor | None
    columnwise_scale: torch.Tensor | None
    is_2d: bool = False

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that there are, each once."""
        unique = {id(t): t for t in vars(self).values() if isinstance(t, torch.Tensor)}
        return list(unique.values())


def empty_storage(
    shape: tuple[int, int], device: torch.device | str, rowwise: bool, columnwise: bool, is_2d: bool
) -> Storage:
    """Memory for a matrix of ``shape``, not yet written.

    Raises:
        ValueError: If a side is no multiple of 32 or no direction is asked for.
    """
    reference.check_divisible(shape)
    if not (rowwise or columnwise):
        raise ValueError("a quantised matrix needs rowwise or columnwise usage, or both")
    rows, columns = shape

    def empty(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=device)

    row_data = empty(rows, columns) if rowwise else None
    column_data = (row_data if is_2d and rowwise else empty(rows, columns)) if columnwise else None
    return Storage(
        row_data,
        empty(rows, columns // reference.BLOCK) if rowwise else None,
        column_data,
        empty(rows // reference.BLOCK, columns) if columnwise else None,
        is_2d,
    )


def quantize_many(sources: Sequence[torch.Tensor], destinations: Sequence[Storage]) -> None:
    """Quantises each ``[M, K]`` source (BF16, FP16 or FP32) into the storage of the same number.

    All directions that a storage has are made from the source. Where everything is on NVIDIA GPUs and
    Triton is installed that is one pass over the source, and many matrices go in one launch.
    """
    tensors = [*sources, *(tensor for storage in destinations for tensor in storage.tensors())]
    if tensors and all(tensor.is_cuda for tensor in tensors):
        triton_kernels = _triton_kernels()
        if triton_kernels is not None and triton_kernels.is_available(tensors[0]):
            triton_kernels.quantize_many_triton(sources, destinations)
            return
    for source, storage in zip(sources, destinations, strict=True):
        quantize_reference(source, storage)


@functools.cache
def _triton_kernels() -> ModuleType | None:
    """The Triton kernels, ``None`` where Triton, an optional extra, is not installed."""
    if not has_triton():
        return None
    # Not imported above: Triton takes a while, and on a CPU nothing here needs it.
    return importlib.import_module("megatron.core.quantization.triton_kernels")


def quantize_reference(source: torch.Tensor, storage: Storage) -> None:
    """What :func:`quantize_many` does to one matrix, in plain PyTorch on any device."""
    if storage.is_2d:
        data, row_scale, column_scale = reference.quantize_2d(source)
        for target, value in (
            (storage.rowwise_data, data),
            (storage.rowwise_scale, row_scale),
            (storage.columnwise_data, data),
            (storage.columnwise_scale, column_scale),
        ):
            if target is not None:
                target.copy_(value)
        return
    if storage.rowwise_data is not None and storage.rowwise_scale is not None:
        data, scale = reference.quantize_rowwise(source)
        storage.rowwise_data.copy_(data)
        storage.rowwise_scale.copy_(scale)
    if storage.columnwise_data is not None and storage.columnwise_scale is not None:
        data, scale = reference.quantize_columnwise(source)
        storage.columnwise_data.copy_(data)
        storage.columnwise_scale.copy_(scale)
