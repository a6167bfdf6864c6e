"""Edit 3: no bucket group mixes the buckets of two optimizers."""

from tools.backport.changes import Supersede
from tools.backport.model import BUFFER, LAYER_WISE, Edit, Site

_OF_ONE_OWNER = "_partition_buckets_of_one_owner"

EDIT = Edit(
    name="bucket partitioning",
    does="Separate the buckets of the two optimizers before any are merged into a group.",
    why="A group is gathered by the optimizer that owns its first bucket, so the other's buckets "
    "in it were gathered before they had been updated.",
    marks=(_OF_ONE_OWNER,),
    sites=(
        Site(
            BUFFER,
            "",
            "partition_buckets separates owners before buckets can merge",
            Supersede(
                "partition_buckets",
                _OF_ONE_OWNER,
                '''

def partition_buckets(
    buffers: List[_ParamAndGradBuffer],
    force_single_bucket_group: bool = False,
    reduce_scatter_with_fp32_accumulation: bool = False,
) -> List[_ParamAndGradBucketGroup]:
    """
    Regroup the buckets of the input buffers without mixing the optimizers that own them.

    Whether a bucket group belongs to LayerWiseDistributedOptimizer or to DistributedOptimizer is
    read from its first bucket, and its owner gathers the whole group after its own step. Buffers
    are therefore separated by owner wherever their buckets could be merged; see
    _partition_buckets_of_one_owner for how they are grouped within one owner. Where every group
    has a single bucket anyway, the order of all buckets is kept.

    Args:
        buffers (list): list of input buffers.
        force_single_bucket_group (bool, optional): put all buckets of an owner into one group.
        reduce_scatter_with_fp32_accumulation (bool, optional): every group has one bucket.
    """
    num_quantized = sum(buffer.param_dtype == torch.uint8 for buffer in buffers)
    may_merge = num_quantized > 0 and not reduce_scatter_with_fp32_accumulation
    if not (force_single_bucket_group or may_merge or num_quantized > 1):
        return _partition_buckets_of_one_owner(
            buffers, force_single_bucket_group, reduce_scatter_with_fp32_accumulation
        )

    buffers_by_owner = {}
    for buffer in buffers:
        is_layerwise = getattr(buffer.params[0], 'is_managed_by_layer_wise_optimizer', False)
        buffers_by_owner.setdefault(is_layerwise, []).append(buffer)
    bucket_groups = []
    # Embeddings and vectors get their grads last, so groups without quantized weights come last.
    for owner_buffers in sorted(
        buffers_by_owner.values(),
        key=lambda owned: all(buffer.param_dtype != torch.uint8 for buffer in owned),
    ):
        bucket_groups += _partition_buckets_of_one_owner(
            owner_buffers, force_single_bucket_group, reduce_scatter_with_fp32_accumulation
        )
    return bucket_groups''',
            ),
        ),
    ),
    relies_on=(
        (BUFFER, "partition_buckets"),
        (LAYER_WISE, "_bucket_is_managed_by_layer_wise_optimizer"),
    ),
)
