"""Megatron's path for buffers, buckets and bucket groups."""

from megatron.core.distributed.bucket_group import _ParamAndGradBucketGroup
from megatron.core.distributed.buffer import (
    BufferType,
    _ParamAndGradBucket,
    _ParamAndGradBuffer,
    shard_buffer,
)
from megatron.core.distributed.partition import partition_buckets
from megatron.core.param_layout import BufferKey, group_params_for_buffers

__all__ = [
    "BufferKey",
    "BufferType",
    "_ParamAndGradBucket",
    "_ParamAndGradBucketGroup",
    "_ParamAndGradBuffer",
    "group_params_for_buffers",
    "partition_buckets",
    "shard_buffer",
]
