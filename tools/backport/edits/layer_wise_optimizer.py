"""Edit 1: the layer-wise optimizer decides once who starts the parameter gather."""

from tools.backport.changes import Insert, Replace
from tools.backport.model import BUFFER, LAYER_WISE, OPTIMIZER, Code, Edit, Site

_CLASS = "LayerWiseDistributedOptimizer"
_INIT = f"{_CLASS}.__init__"
_STEP = f"{_CLASS}.step_with_ready_grads"
_GROUP = "_ParamAndGradBucketGroup"
_MIXED_STEP = "MixedPrecisionOptimizer.step_with_ready_grads"
_GATHERS = "self.ddp_config.use_distributed_optimizer or self.ddp_config.overlap_param_gather"
_COPIES_TO_BUFFER = "if self.config.reuse_grad_buf_for_mxfp8_param_ag:"


def _takes_param_data_for_granted(code: Code) -> bool:
    return code.says(BUFFER, f"{_GROUP}._post_param_sync", "is_bf16_weight_bucket = False")


def _copies_to_a_buffer_it_may_lack(code: Code) -> bool:
    return code.says(OPTIMIZER, _MIXED_STEP, _COPIES_TO_BUFFER)


EDIT = Edit(
    name="layer-wise optimizer",
    does="Decide once, at construction, whether the bucket group starts the parameter gather: it "
    "does whenever parameters travel through its memory.",
    why="The layer-wise optimizer stepped its masters and then gathered by itself, from memory "
    "that held no MXFP8 weights.",
    marks=("layerwise_param_sync_via_bucket_group",),
    relies_on=((LAYER_WISE, f"{_CLASS}.start_param_sync_for_bucket_group_subset"),),
    sites=(
        Site(
            LAYER_WISE,
            _INIT,
            "one flag: does the bucket group start the parameter gather?",
            Insert(
                "self.use_buffer_param_sync = full_param_layouts is not None",
                """
# Who starts the parameter all-gather, decided once. The bucket group does when params are
# views into its buffer, and also when MXFP8 params travel through its gradient memory, that
# only it may write. The overlap setting has no say in it.
self.layerwise_param_sync_via_bucket_group = self.use_buffer_param_sync or any(
    chunk.ddp_config.reuse_grad_buf_for_mxfp8_param_ag
    for chunk in model_chunks or []
    if hasattr(chunk, 'ddp_config')
)""",
            ),
        ),
        Site(
            LAYER_WISE,
            _INIT,
            "legacy layout: per-bucket lists wherever the bucket group gathers",
            Replace(
                "if self.overlap_param_gather and not self.use_buffer_param_sync:",
                """\
if not self.use_buffer_param_sync and (
    self.overlap_param_gather
    # A single rank has no lists, and gathers nothing.
    or (self.layerwise_param_sync_via_bucket_group and self.dp_cp_params_list is not None)
):""",
            ),
        ),
        Site(
            LAYER_WISE,
            _STEP,
            "the flag is used where the gather starts",
            Replace(
                "if self.use_buffer_param_sync:", "if self.layerwise_param_sync_via_bucket_group:"
            ),
        ),
        Site(
            LAYER_WISE,
            _STEP,
            "note: MXFP8 parameters are no views",
            Insert(
                "self.start_param_sync_for_bucket_group_subset()",
                """\
# MXFP8 params are no views: their bucket group stages their main params itself.""",
                where="above",
            ),
        ),
        Site(
            BUFFER,
            f"{_GROUP}.__init__",
            "the group knows its ranks whenever it may have to gather",
            Replace(
                f"if {_GATHERS}:",
                """\
if (
    self.ddp_config.use_distributed_optimizer
    or self.ddp_config.overlap_param_gather
    or self.ddp_config.reuse_grad_buf_for_mxfp8_param_ag
):""",
            ),
        ),
        Site(
            BUFFER,
            f"{_GROUP}.start_param_sync",
            "a gather through gradient memory is allowed without overlap",
            Replace(
                f"assert {_GATHERS}",
                """\
assert (
    self.ddp_config.use_distributed_optimizer
    or self.ddp_config.overlap_param_gather
    or self.ddp_config.reuse_grad_buf_for_mxfp8_param_ag
)""",
            ),
        ),
        Site(
            BUFFER,
            f"{_GROUP}._post_param_sync",
            "legacy layout: there is no parameter buffer to install from",
            Insert(
                "is_bf16_weight_bucket = False",
                """\
if bucket.param_data is None:
    # Legacy layout: the gather itself has installed the params.
    continue""",
                where="before",
            ),
            when=_takes_param_data_for_granted,
        ),
        Site(
            OPTIMIZER,
            _MIXED_STEP,
            "optimizers without a parameter buffer copy to their parameters",
            Replace(
                _COPIES_TO_BUFFER,
                """\
# Only DistributedOptimizer has a param buffer to copy to.
if self.config.reuse_grad_buf_for_mxfp8_param_ag and hasattr(
    self, '_copy_main_params_to_param_buffer'
):""",
            ),
            when=_copies_to_a_buffer_it_may_lack,
        ),
    ),
)
