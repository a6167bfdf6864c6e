"""Tensor parallelism and GTP: layers that are cut over ranks, and the moves between them."""

from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.gtp import GTPRemat, GTPWeight, is_gtp_param
from megatron.core.tensor_parallel.gtp_chain import GTPChain
from megatron.core.tensor_parallel.init import NormalInit, initialize_parameters
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    param_is_not_tensor_parallel_duplicate,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    all_gather_sequence,
    copy_to_tensor_model_parallel_region,
    gather_for_partial_use,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)

__all__ = [
    "ColumnParallelLinear",
    "GTPChain",
    "GTPRemat",
    "GTPWeight",
    "NormalInit",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "all_gather_sequence",
    "copy_to_tensor_model_parallel_region",
    "gather_for_partial_use",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "initialize_parameters",
    "is_gtp_param",
    "param_is_not_tensor_parallel_duplicate",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "set_tensor_model_parallel_attributes",
    "vocab_parallel_cross_entropy",
]
