"""A linear layer's three products with MXFP8 operands.

Block-scaled products contract along blocks: forward along ``in_features`` (rowwise input and weight),
dgrad along ``out_features`` (rowwise output gradient, columnwise weight), wgrad along tokens
(columnwise output gradient and input). An E4M3 value times a power of two is exact in BF16, so a BF16
product of dequantised operands with FP32 accumulation emulates the block-scaled product.
"""

from __future__ import annotations

import torch

from megatron.core.cpu_bf16 import is_emulated
from megatron.core.quantization import format as reference


def check_input(input: torch.Tensor, weight: torch.Tensor) -> int:
    """The number of tokens in ``input``; raises :class:`ValueError` if it does not fit."""
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
    return tokens


def forward_product(
    input: torch.Tensor, row_data: torch.Tensor, row_scale: torch.Tensor
) -> torch.Tensor:
    """``input @ weight.T``, BF16 ``[tokens, N]``, from ``[tokens, K]`` and a weight's rowwise copy."""
    weight = reference.dequantize_rowwise(row_data, row_scale, _compute_dtype(input))
    return (_rowwise(input) @ weight.T).to(torch.bfloat16)


def dgrad_product(
    grad_output: torch.Tensor, column_data: torch.Tensor, column_scale: torch.Tensor
) -> torch.Tensor:
    """``grad_output @ weight``, BF16 ``[tokens, K]``, from a weight's columnwise copy."""
    weight = reference.dequantize_columnwise(column_data, column_scale, _compute_dtype(grad_output))
    return (_rowwise(grad_output) @ weight).to(torch.bfloat16)


def wgrad_product(
    grad_output: torch.Tensor, input_data: torch.Tensor, input_scale: torch.Tensor
) -> torch.Tensor:
    """``grad_output.T @ input``, BF16 ``[N, K]``, from the input's columnwise copy (along tokens)."""
    input = reference.dequantize_columnwise(input_data, input_scale, _compute_dtype(grad_output))
    return (_columnwise(grad_output).T @ input).to(torch.bfloat16)


def _compute_dtype(like: torch.Tensor) -> torch.dtype:
    """In which products of dequantised operands are formed: BF16 with FP32 sums, or FP32 outright."""
    return torch.float32 if is_emulated(like) else torch.bfloat16


def _rowwise(values: torch.Tensor) -> torch.Tensor:
    return reference.dequantize_rowwise(*reference.quantize_rowwise(values), _compute_dtype(values))


def _columnwise(values: torch.Tensor) -> torch.Tensor:
    quantized = reference.quantize_columnwise(values)
    return reference.dequantize_columnwise(*quantized, _compute_dtype(values))
