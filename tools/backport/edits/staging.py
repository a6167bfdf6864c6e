"""Edit 2: a bucket group stages the layer-wise MXFP8 masters before it gathers."""

from tools.backport.changes import Insert
from tools.backport.model import BUFFER, Edit, Site

_GROUP = "_ParamAndGradBucketGroup"

EDIT = Edit(
    name="staging in the bucket",
    does="Cast the FP32 masters that a rank owns into the parameter buffer right before it is "
    "gathered.",
    why="An MXFP8 weight is no view of that buffer, so every rank quantised whatever the gradient "
    "memory held.",
    marks=("_stage_layerwise_mxfp8_params",),
    relies_on=(
        (BUFFER, "shard_buffer"),
        (BUFFER, f"{_GROUP}._post_param_sync"),
        (BUFFER, f"{_GROUP}.finish_param_sync"),
    ),
    sites=(
        Site(
            BUFFER,
            "_ParamAndGradBucket.__init__",
            "buckets know the names of their parameters",
            Insert(
                "self.params_with_extra_main_grads = params_with_extra_main_grads",
                """\
# Set by _ParamAndGradBuffer, so that errors can name a param.
self.param_to_name = {}""",
            ),
        ),
        Site(
            BUFFER,
            "_ParamAndGradBuffer.__init__",
            "buckets are told the names of their parameters",
            Insert(
                "log_strs = []",
                """\
for bucket in self.buckets:
    bucket.param_to_name = param_to_name
""",
                where="before",
            ),
        ),
        Site(
            BUFFER,
            _GROUP,
            "_stage_layerwise_mxfp8_params",
            Insert(
                "def check_grads",
                '''
@torch.no_grad()
def _stage_layerwise_mxfp8_params(self):
    """
    Cast the fp32 main params that this rank owns into its shard of each bucket's param_data.

    MXFP8 params own their storage, so param_data holds no weights until they are staged; a
    gather before that would make every rank quantize whatever the gradient memory holds.
    Params of DistributedOptimizer are staged by its _copy_main_params_to_param_buffer.

    Raises:
        RuntimeError: If a param crosses a shard boundary, or if the rank that owns it has no
            fp32 main param of the size of its slot.
    """
    if not (
        self.ddp_config.use_distributed_optimizer
        and self.ddp_config.reuse_grad_buf_for_mxfp8_param_ag
    ):
        return

    rank = self.intra_distributed_optimizer_instance_rank
    for bucket in self.buckets:
        shard_size = bucket.param_data.numel() // self.intra_distributed_optimizer_instance_size
        for param in bucket.params_list:
            if not is_mxfp8tensor(param) or not getattr(
                param, 'is_managed_by_layer_wise_optimizer', False
            ):
                continue
            start, end = bucket.param_to_index[param]
            name = bucket.param_to_name.get(param, f'of shape {tuple(param.shape)}')
            owner = start // shard_size
            if (end - 1) // shard_size != owner:
                raise RuntimeError(
                    f'Param {name} cannot be staged: it is split across shards (elements '
                    f'{start} to {end} of a bucket with shards of {shard_size} elements).'
                )
            if owner != rank:
                continue
            main_param = getattr(param, 'main_param', None)
            if main_param is None:
                raise RuntimeError(
                    f'Param {name} cannot be staged: rank {rank} owns it but has no fp32 main '
                    f'param for it.'
                )
            if main_param.numel() != end - start:
                raise RuntimeError(
                    f'Param {name} cannot be staged: its fp32 main param has '
                    f'{main_param.numel()} elements, its slot {end - start}.'
                )
            bucket.param_data[start:end].copy_(main_param.reshape(-1))''',
            ),
        ),
        Site(
            BUFFER,
            f"{_GROUP}.start_param_sync",
            "staging right before the collective",
            Insert(
                "async_op = self.ddp_config.overlap_param_gather and not force_sync",
                "self._stage_layerwise_mxfp8_params()",
            ),
        ),
    ),
)
