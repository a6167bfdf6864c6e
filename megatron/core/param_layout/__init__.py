"""Where every parameter lives: pure arithmetic on shapes, without process groups."""

from megatron.core.param_layout.arithmetic import (
    bucket_end_divisor,
    newton_schulz_cost,
    pad_bucket_end,
    pad_param_start,
    pad_to_divisor,
)
from megatron.core.param_layout.layouts import (
    FullParamLayout,
    PerBufferParamLayout,
    compute_full_param_layout,
    effective_bucket_size,
    sharded_layout,
    unpadded_layout,
)
from megatron.core.param_layout.routing import (
    BufferKey,
    group_params_for_buffers,
    is_managed_by_layer_wise_optimizer,
    tag_params_for_buffer_routing,
)

__all__ = [
    "BufferKey",
    "FullParamLayout",
    "PerBufferParamLayout",
    "bucket_end_divisor",
    "compute_full_param_layout",
    "effective_bucket_size",
    "group_params_for_buffers",
    "is_managed_by_layer_wise_optimizer",
    "newton_schulz_cost",
    "pad_bucket_end",
    "pad_param_start",
    "pad_to_divisor",
    "sharded_layout",
    "tag_params_for_buffer_routing",
    "unpadded_layout",
]
