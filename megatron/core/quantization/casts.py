"""Casts of many tensors at once: FP32 masters into the dtype in which parameters travel."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.core.triton_support import has_triton


def cast_many(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies each source into the destination of the same number, rounding to nearest even.

    One launch for all on CUDA where Triton is there, ``torch._foreach_copy_`` elsewhere; the bits are the
    same.

    Args:
        destinations: Any dtype.
        sources: As many, of the same numbers of elements.
    """
    if not destinations:
        return
    if _can_fuse(destinations, sources):
        # Here, because it needs Triton.
        from megatron.core.quantization.triton_casts import cast_fp32_to_bf16

        cast_fp32_to_bf16(destinations, sources)
        return
    torch._foreach_copy_(
        [destination.view(-1) for destination in destinations],
        [source.reshape(-1) for source in sources],
    )


def _can_fuse(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> bool:
    return (
        destinations[0].is_cuda
        and has_triton()
        and all(d.dtype == torch.bfloat16 and d.is_contiguous() for d in destinations)
        and all(s.dtype == torch.float32 and s.is_cuda and s.is_contiguous() for s in sources)
    )
