"""A linear layer that computes in MXFP8, whatever its weight is stored in."""

from __future__ import annotations

from typing import Any

import torch

from megatron.core.quantization import format as reference
from megatron.core.quantization.products import (
    check_input,
    dgrad_product,
    forward_product,
    wgrad_product,
)
from megatron.core.quantization.quantizer import MXFP8Quantizer
from megatron.core.quantization.tensor import MXFP8Tensor

_CACHE = "_quantized_for_compute"


def mxfp8_linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``input @ weight.T + bias``, computed in MXFP8, forward and backward.

    The result depends on the BF16 values of the weight alone: one that is stored in MXFP8 and one
    that is quantised here give the same bits.

    Args:
        input: ``[..., K]``, BF16; the product of the other sizes (tokens) a multiple of 32.
        weight: ``[N, K]``: an :class:`MXFP8Tensor`, or a BF16 parameter, which is quantised once (in
            1-D blocks) and then remembered until :func:`forget_quantized_weight`.
        bias: ``[N]``.

    Returns:
        ``[..., N]``, BF16. The gradients of input and weight come in BF16.

    Raises:
        ValueError: If a size is no multiple of 32, the input's width is not the weight's, or a stored
            weight lacks one of its two copies.
    """
    tokens = check_input(input, weight)
    quantized = weight if isinstance(weight, MXFP8Tensor) else _quantized(weight)
    storage = quantized.storage_bytes
    if storage.rowwise_data is None or storage.columnwise_data is None:
        raise ValueError(
            "a weight needs its rowwise copy for the forward product and its columnwise copy for "
            "dgrad; quantise it with both"
        )
    output = _MXFP8Linear.apply(input.reshape(tokens, input.size(-1)), weight, quantized)
    if bias is not None:
        output = output + bias
    return output.view(*input.shape[:-1], weight.size(0))


def _quantized(weight: torch.Tensor) -> MXFP8Tensor:
    cached = getattr(weight, _CACHE, None)
    if cached is None:
        cached = MXFP8Quantizer().quantize(weight.detach())
        setattr(weight, _CACHE, cached)
    return cached


def forget_quantized_weight(weight: torch.Tensor) -> None:
    """To be called when a high-precision weight has changed: it is quantised anew at its next use."""
    weight.__dict__.pop(_CACHE, None)


class _MXFP8Linear(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, quantized: MXFP8Tensor
    ) -> torch.Tensor:
        storage = quantized.storage_bytes
        # Bytes, not values, wait for the backward pass.
        by_tokens = reference.quantize_columnwise(input) if ctx.needs_input_grad[1] else ()
        ctx.save_for_backward(*by_tokens, storage.columnwise_data, storage.columnwise_scale)
        return forward_product(input, storage.rowwise_data, storage.rowwise_scale)  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:  # type: ignore[override]
        *by_tokens, column_data, column_scale = ctx.saved_tensors
        grad_input = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_input = dgrad_product(grad_output, column_data, column_scale)
        if ctx.needs_input_grad[1]:
            grad_weight = wgrad_product(grad_output, *by_tokens)
        return grad_input, grad_weight, None
