"""Megatron's path for the layout types, which live in :mod:`megatron.core.param_layout`."""

from megatron.core.param_layout import (
    BufferKey,
    FullParamLayout,
    PerBufferParamLayout,
    bucket_end_divisor,
    pad_bucket_end,
    pad_param_start,
    pad_to_divisor,
)

__all__ = [
    "BufferKey",
    "FullParamLayout",
    "PerBufferParamLayout",
    "bucket_end_divisor",
    "pad_bucket_end",
    "pad_param_start",
    "pad_to_divisor",
]
