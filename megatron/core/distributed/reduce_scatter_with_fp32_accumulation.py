"""Megatron's path for the FP32-accumulating reduce-scatter."""

from megatron.core.collectives import reduce_scatter_with_fp32_accumulation

__all__ = ["reduce_scatter_with_fp32_accumulation"]
