"""BF16 products on CPUs that have no instructions for them.

There, torch multiplies BF16 matrices tens of times slower than FP32 ones. Multiplying in FP32 and
rounding the result once is what BF16 products with FP32 accumulation mean, so that is done instead.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F


@cache
def _cpu_multiplies_bf16() -> bool:
    flags = torch.backends.cpu.get_cpu_capability()
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return flags.startswith("AVX512") and supported is not None and bool(supported())


def is_emulated(tensor: torch.Tensor) -> bool:
    """Whether products of ``tensor`` are better computed in FP32 and rounded."""
    return (
        tensor.dtype == torch.bfloat16
        and tensor.device.type == "cpu"
        and not _cpu_multiplies_bf16()
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        return (x.float() @ weight.float().T).bfloat16()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        grad = grad.float()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ weight.float()).bfloat16()
        if ctx.needs_input_grad[1]:
            grad_weight = (grad.flatten(0, -2).T @ x.float().flatten(0, -2)).bfloat16()
        return grad_x, grad_weight


def matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``left @ right`` without history, whichever way is better on this device."""
    if not is_emulated(left):
        return left @ right
    return (left.float() @ right.float()).bfloat16()


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``torch.nn.functional.linear``, whichever way is better on this device."""
    if not is_emulated(x):
        return F.linear(x, weight, bias)
    output = _Linear.apply(x, weight)
    return output if bias is None else output + bias


def scaled_dot_product_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
) -> torch.Tensor:
    """``torch.nn.functional.scaled_dot_product_attention``, whichever way is better on this device."""
    if not is_emulated(query):
        return F.scaled_dot_product_attention(query, key, value, **options)
    query, key, value = query.float(), key.float(), value.float()
    return F.scaled_dot_product_attention(query, key, value, **options).bfloat16()
