"""What the rest of the project may ask of a quantised parameter, whoever quantised it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from megatron.core.quantization.kernels import quantize_many
from megatron.core.quantization.linear import forget_quantized_weight
from megatron.core.quantization.tensor import MXFP8Tensor
from megatron.core.quantization.transformer_engine import is_te_mxfp8tensor, write_te_tensor


def is_mxfp8tensor(tensor: torch.Tensor) -> bool:
    """Whether the tensor's own storage is MXFP8: this project's or Transformer Engine's."""
    return isinstance(tensor, MXFP8Tensor) or is_te_mxfp8tensor(tensor)


def is_float8tensor(tensor: torch.Tensor) -> bool:
    """Whether the tensor's own storage is quantised; MXFP8 is the one format here."""
    return is_mxfp8tensor(tensor)


@torch.no_grad()
def copy_tensors_to_quantized_params(
    params: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> None:
    """Quantises high-precision values into parameters: one call for all of a bucket.

    Args:
        params: Quantised parameters.
        tensors: As many, of the same shapes, BF16, FP16 or FP32.

    Raises:
        ValueError: If a shape differs.
        TypeError: If a parameter is not quantised.
    """
    sources, storages = [], []
    for param, tensor in zip(params, tensors, strict=True):
        if param.shape != tensor.shape:
            raise ValueError(
                f"cannot quantise values of shape {tuple(tensor.shape)} into a parameter of shape "
                f"{tuple(param.shape)}"
            )
        if isinstance(param, MXFP8Tensor):
            sources.append(tensor)
            storages.append(param.storage_bytes)
        elif is_te_mxfp8tensor(param):
            write_te_tensor(tensor, param)
        else:
            raise TypeError(
                f"a {type(param).__name__} of {param.dtype} is not a quantised parameter"
            )
    quantize_many(sources, storages)


def copy_tensor_to_quantized_param(param: torch.Tensor, tensor: torch.Tensor) -> None:
    """Quantises ``tensor`` into ``param``, whose shape it takes on."""
    copy_tensors_to_quantized_params([param], [tensor.view(param.shape)])


def pop_high_precision_init_val(param: torch.Tensor) -> torch.Tensor | None:
    """The values that ``param`` was first quantised from, if it kept them; it lets go of them."""
    get = getattr(param, "get_high_precision_init_val", None)
    if get is None:
        return None
    value = get()
    if value is not None:
        param.clear_high_precision_init_val()  # type: ignore[attr-defined]
    return value


def forget_quantized_weights(params: Iterable[torch.Tensor]) -> None:
    """Has high-precision weights that layers quantise on the fly quantised anew at their next use."""
    for param in params:
        if getattr(param, "computes_in_mxfp8", False):
            forget_quantized_weight(param)


def dequantize_fp8_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A quantised tensor's values in its nominal dtype."""
    return tensor.dequantize()
