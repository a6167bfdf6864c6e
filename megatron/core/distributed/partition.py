"""Which buckets communicate together."""

from __future__ import annotations

from megatron.core.distributed.bucket_group import _ParamAndGradBucketGroup
from megatron.core.distributed.buffer import _ParamAndGradBucket, _ParamAndGradBuffer


def partition_buckets(
    buffers: list[_ParamAndGradBuffer],
    force_single_bucket_group: bool = False,
    reduce_scatter_with_fp32_accumulation: bool = False,
) -> list[_ParamAndGradBucketGroup]:
    """Forms bucket groups, in the order in which the backward pass completes them.

    Owners are separated before anything is merged. Within one owner: one group for all with
    ``force_single_bucket_group``; otherwise a group a bucket, except that beside quantised buckets
    the others (small vectors, complete late) join the last quantised one, unless
    ``reduce_scatter_with_fp32_accumulation`` asks for single buckets.

    Args:
        buffers: :class:`_ParamAndGradBuffer` of one data-parallel group.
    """
    groups: list[list[_ParamAndGradBucket]] = []
    for layer_wise in (True, False):
        owned = [
            b for b in buffers if b.buckets[0].is_managed_by_layer_wise_optimizer == layer_wise
        ]
        buckets = [bucket for buffer in owned for bucket in buffer.buckets]
        quantized = [bucket for bucket in buckets if bucket.has_quantized_params]
        if force_single_bucket_group and not reduce_scatter_with_fp32_accumulation:
            groups += [buckets] if buckets else []
        elif not quantized or reduce_scatter_with_fp32_accumulation:
            groups += [[bucket] for bucket in buckets]
        else:
            others = [bucket for bucket in buckets if not bucket.has_quantized_params]
            groups += [[bucket] for bucket in quantized[:-1]] + [[quantized[-1], *others]]

    order = {p: i for buffer in buffers for i, p in enumerate(buffer.param_to_name)}

    def completed_by(buckets: list[_ParamAndGradBucket]) -> int:
        return min(order.get(p, 0) for bucket in buckets for p in bucket.params_list)

    groups.sort(key=completed_by, reverse=True)
    return [
        _ParamAndGradBucketGroup(
            group,
            buffers[0].ddp_config,
            buffers[0].data_parallel_group,
            buffers[0].data_parallel_world_size,
        )
        for group in groups
    ]
