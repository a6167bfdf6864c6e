"""MXFP8: the format, tensors and quantizers, kernels behind one door, and linear layers."""

from megatron.core.quantization.kernels import Storage, quantize_many
from megatron.core.quantization.linear import forget_quantized_weight, mxfp8_linear
from megatron.core.quantization.quantizer import MXFP8Quantizer, quantized_like
from megatron.core.quantization.tensor import MXFP8Tensor

__all__ = [
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "Storage",
    "forget_quantized_weight",
    "mxfp8_linear",
    "quantize_many",
    "quantized_like",
]
