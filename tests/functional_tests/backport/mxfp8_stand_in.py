"""An MXFP8 tensor that stands in for Transformer Engine's class in the backport's proof.

It has what Megatron-core touches: a base class ``QuantizedTensor``, storage of its own that only
``copy_`` and ``quantize_`` write, a nominal dtype of BF16, and no flat views. Both copies of a
weight are kept, as the hardware keeps them: ``rowwise`` for the forward product and ``columnwise``
for the gradient of the input, each quantised from the same source.

It is written apart from ``megatron.core.quantization`` because in the processes of the proof
``megatron.core`` is the released package; a unit test holds the two to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, cast

import torch

BLOCK = 32
_LARGEST_E4M3 = 448.0


def quantize_rows(source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises blocks of 32 along the last dimension (OCP Microscaling v1.0).

    Args:
        source: ``[M, K]``, any float dtype, ``K`` a multiple of 32.

    Returns:
        E4M3 bytes ``[M, K]`` and E8M0 scale bytes ``[M, K / 32]``, both uint8.
    """
    rows, columns = source.shape
    if columns % BLOCK:
        raise ValueError(f"MXFP8 needs dimensions that are multiples of {BLOCK}, got {columns}")
    blocks = source.float().reshape(rows, columns // BLOCK, BLOCK)
    scale = blocks.abs().amax(dim=-1) * torch.tensor(1.0 / _LARGEST_E4M3)
    bits = scale.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    carries = torch.where(exponent == 0, mantissa > 0x400000, mantissa > 0) & (exponent < 254)
    exponent = exponent + carries.int()
    exponent = torch.where(scale.isnan(), 255, torch.where(scale.isinf(), 254, exponent))
    scaled = blocks * _power_of_two(254 - exponent).unsqueeze(-1)
    elements = scaled.clamp(-_LARGEST_E4M3, _LARGEST_E4M3).to(torch.float8_e4m3fn)
    return elements.view(torch.uint8).reshape(rows, columns), exponent.to(torch.uint8)


def dequantize_rows(elements: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Inverts :func:`quantize_rows`; FP32 ``[M, K]``."""
    rows, columns = elements.shape
    values = elements.view(torch.float8_e4m3fn).float().reshape(rows, columns // BLOCK, BLOCK)
    return (values * _power_of_two(exponents.int()).unsqueeze(-1)).reshape(rows, columns)


def _power_of_two(biased_exponent: torch.Tensor) -> torch.Tensor:
    power = torch.ldexp(
        torch.ones_like(biased_exponent, dtype=torch.float32), biased_exponent - 127
    )
    return torch.where((biased_exponent < 0) | (biased_exponent == 255), torch.nan, power)


class QuantizedTensor(torch.Tensor):
    """What Megatron-core takes for the base class of every quantised tensor."""


class MXFP8Tensor(QuantizedTensor):
    """A ``[M, K]`` weight held as MXFP8 alone; see the module's docstring."""

    _rowwise_data: torch.Tensor
    _rowwise_scale_inv: torch.Tensor
    _columnwise_data: torch.Tensor
    _columnwise_scale_inv: torch.Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, *storage: torch.Tensor) -> MXFP8Tensor:
        tensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, storage[0].shape, dtype=torch.bfloat16, device=storage[0].device
        )
        tensor._rowwise_data, tensor._rowwise_scale_inv = storage[:2]
        tensor._columnwise_data, tensor._columnwise_scale_inv = storage[2:]
        return cast(MXFP8Tensor, tensor)

    @classmethod
    def quantized_from(cls, source: torch.Tensor) -> MXFP8Tensor:
        """A new tensor that holds the quantised ``source``."""
        columnwise, column_scales = quantize_rows(source.T)
        return cls(*quantize_rows(source), columnwise, column_scales)

    def storage_parts(self) -> tuple[torch.Tensor, ...]:
        """The four uint8 tensors that are this tensor's value (columnwise ones transposed)."""
        return (
            self._rowwise_data,
            self._rowwise_scale_inv,
            self._columnwise_data,
            self._columnwise_scale_inv,
        )

    def quantize_(self, source: torch.Tensor) -> MXFP8Tensor:
        """Overwrites the value with the quantised ``source``, in place."""
        if isinstance(source, MXFP8Tensor):
            source = source.dequantize()
        new = MXFP8Tensor.quantized_from(source.detach().reshape(self.shape))
        for mine, other in zip(self.storage_parts(), new.storage_parts(), strict=True):
            mine.copy_(other)
        return self

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:  # type: ignore[override]
        """The rowwise copy as a plain tensor."""
        return dequantize_rows(self._rowwise_data, self._rowwise_scale_inv).to(dtype)

    def dequantize_columnwise(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """The columnwise copy as a plain tensor, ``[M, K]`` too."""
        return dequantize_rows(self._columnwise_data, self._columnwise_scale_inv).T.to(dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.alias.default, aten.expand.default):
            return cls(*args[0].storage_parts())
        if func == aten.clone.default:
            return cls(*(part.clone() for part in args[0].storage_parts()))
        if func == aten.copy_.default and isinstance(args[0], MXFP8Tensor):
            return args[0].quantize_(args[1])
        if func in (aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default):
            raise RuntimeError(f"an MXFP8 tensor has no view of shape {tuple(args[1])}")

        def plain(value: Any) -> Any:
            return value.dequantize() if isinstance(value, MXFP8Tensor) else value

        args, keywords = torch.utils._pytree.tree_map(plain, (args, kwargs or {}))
        return func(*args, **keywords)


def mxfp8_parameter(source: torch.Tensor) -> torch.nn.Parameter:
    """A quantised parameter that remembers ``source`` until its master has been made of it."""
    parameter: Any = torch.nn.Parameter(MXFP8Tensor.quantized_from(source))
    parameter._high_precision_init_val = source.detach().clone()

    def get(self: Any) -> torch.Tensor | None:
        return getattr(self, "_high_precision_init_val", None)

    def clear(self: Any) -> None:
        if hasattr(self, "_high_precision_init_val"):
            del self._high_precision_init_val

    parameter.get_high_precision_init_val = MethodType(get, parameter)
    parameter.clear_high_precision_init_val = MethodType(clear, parameter)
    return cast(torch.nn.Parameter, parameter)
