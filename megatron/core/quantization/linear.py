"""A linear layer's three products with MXFP8 operands.

Block-scaled products contract along blocks: forward along ``in_features`` (rowwise input and weight),
dgrad along ``out_features`` (rowwise output gradient, columnwise weight), wgrad along tokens
(columnwise output gradient and input). An E4M3 value times a power of two is exact in BF16, so a BF16
product of dequantised operands with FP32 accumulation emulates the block-scaled product.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.core.cpu_bf16 import is_emulated
from megatron.core.quantization import format as reference
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
    if input.size(-1) != weight.size(-1):
        raise ValueError(
            f"a weight of shape {tuple(weight.shape)} does not fit an input of shape "
            f"{tuple(input.shape)}"
        )
    tokens = input.numel() // max(input.size(-1), 1)
    if tokens % reference.BLOCK:
        raise ValueError(
            f"MXFP8 needs the tokens of a microbatch to be a multiple of {reference.BLOCK}, got "
            f"{tokens} in an input of shape {tuple(input.shape)}; change the micro batch size or the "
            "sequence length"
        )
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
        left = _rowwise(input)
        right = quantized.dequantize(_compute_dtype(input))
        # Bytes, not values, wait for the backward pass.
        by_tokens = reference.quantize_columnwise(input) if ctx.needs_input_grad[1] else ()
        storage = quantized.storage_bytes
        ctx.save_for_backward(*by_tokens, storage.columnwise_data, storage.columnwise_scale)
        return (left @ right.T).to(torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:  # type: ignore[override]
        *by_tokens, column_data, column_scale = ctx.saved_tensors
        grad_input = grad_weight = None
        if ctx.needs_input_grad[0]:
            dtype = _compute_dtype(grad_output)
            weight = reference.dequantize_columnwise(column_data, column_scale, dtype)
            grad_input = (_rowwise(grad_output) @ weight).to(torch.bfloat16)
        if ctx.needs_input_grad[1]:
            dtype = _compute_dtype(grad_output)
            input = reference.dequantize_columnwise(*by_tokens, dtype)  # type: ignore[misc, call-arg]
            grad_weight = (_columnwise(grad_output).T @ input).to(torch.bfloat16)
        return grad_input, grad_weight, None


def _compute_dtype(like: torch.Tensor) -> torch.dtype:
    """In which products of dequantised operands are formed: BF16 with FP32 sums, or FP32 outright."""
    return torch.float32 if is_emulated(like) else torch.bfloat16


def _rowwise(values: torch.Tensor) -> torch.Tensor:
    return reference.dequantize_rowwise(*reference.quantize_rowwise(values), _compute_dtype(values))


def _columnwise(values: torch.Tensor) -> torch.Tensor:
    quantized = reference.quantize_columnwise(values)
    return reference.dequantize_columnwise(*quantized, _compute_dtype(values))
