"""Alignment rules of parameter buffers. All sizes are in elements."""

import math

PARAM_ALIGNMENT = 64
BUCKET_ALIGNMENT = 128
NCCL_BUSBW_ALIGNMENT = 2**16


def pad_to_divisor(value: int, divisor: int) -> int:
    """The smallest multiple of ``divisor`` that is not below ``value``."""
    return -(-value // divisor) * divisor


def pad_param_start(param_start_index: int) -> int:
    """The next place at which a parameter may start."""
    return pad_to_divisor(param_start_index, PARAM_ALIGNMENT)


def bucket_end_divisor(data_parallel_world_size: int, pad_for_high_nccl_busbw: bool) -> int:
    """What a bucket's size must divide by: the ranks, and NCCL's favoured message sizes."""
    if pad_for_high_nccl_busbw:
        return math.lcm(data_parallel_world_size, BUCKET_ALIGNMENT, NCCL_BUSBW_ALIGNMENT)
    return math.lcm(data_parallel_world_size, BUCKET_ALIGNMENT)


def pad_bucket_end(
    bucket_end_index: int, data_parallel_world_size: int, pad_for_high_nccl_busbw: bool
) -> int:
    """The next place at which a bucket may end."""
    return pad_to_divisor(
        bucket_end_index, bucket_end_divisor(data_parallel_world_size, pad_for_high_nccl_busbw)
    )


def shard_divisor(data_parallel_world_size: int, pad_for_high_nccl_busbw: bool) -> int:
    """What a shard's size must divide by, so that shard starts are parameter starts too."""
    bucket_divisor = bucket_end_divisor(data_parallel_world_size, pad_for_high_nccl_busbw)
    return math.lcm(PARAM_ALIGNMENT, bucket_divisor // data_parallel_world_size)


def default_bucket_size(data_parallel_world_size: int) -> int:
    """Bucket size when none is given: large data-parallel groups need larger messages."""
    return max(40_000_000, 1_000_000 * data_parallel_world_size)


def newton_schulz_cost(shape: tuple[int, ...]) -> int:
    """Relative cost of orthogonalising a matrix of ``shape``; element count for anything else."""
    if len(shape) != 2:
        return math.prod(shape)
    rows, columns = shape
    return max(rows, columns) * min(rows, columns) ** 2
