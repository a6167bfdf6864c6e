"""Edit 5, on demand: in the legacy layout an owner installs what its peers install."""

from tools.backport.changes import Insert, Replace
from tools.backport.model import BUFFER, LAYER_WISE, OPTIMIZER, Code, Edit, Site

_SYNC = "_ParamAndGradBucketGroup.start_param_sync"
_FLATTEN = """\
flat_local_params = _flatten_dense_tensors(
    bucket.layerwise_params_list[local_rank]
).detach()"""


def _flattens_quantized_params(code: Code) -> bool:
    return code.says(BUFFER, _SYNC, _FLATTEN)


EDIT = Edit(
    name="legacy parity",
    does="Quantise MXFP8 weights from the BF16 rounding of the FP32 master on their owner too, and "
    "send that rounding where a weight cannot be flattened.",
    why="In the legacy layout owners quantised the master itself and their peers its rounding, so "
    "that ranks multiplied with different weights.",
    needs_layouts=False,
    on_demand=True,
    relies_on=((BUFFER, _SYNC),),
    sites=(
        Site(
            OPTIMIZER,
            "",
            "import",
            Insert(
                "from ..dist_checkpointing.utils import add_prefix_for_sharding",
                "from ..fp8_utils import is_mxfp8tensor",
            ),
        ),
        Site(
            OPTIMIZER,
            "Float16OptimizerWithFloat16Params._copy_main_params_to_model_params",
            "the owner installs the BF16 rounding of its master",
            Insert(
                "model_data, main_data = self._get_model_and_main_params_data_float16()",
                """\
# MXFP8 params are quantized from BF16 on every rank: other ranks receive no more than that.
main_data = [
    main.to(model.dtype) if is_mxfp8tensor(model) else main
    for model, main in zip(model_data, main_data)
]""",
            ),
        ),
        Site(
            LAYER_WISE,
            "",
            "import",
            Insert(
                "from megatron.core.process_groups_config import ProcessGroupCollection",
                "from megatron.core.fp8_utils import is_mxfp8tensor",
                where="before",
            ),
        ),
        Site(
            LAYER_WISE,
            "LayerWiseDistributedOptimizer.allgather_params",
            "the owner sends the BF16 rounding of its master",
            Insert(
                "rank = get_pg_rank(group)",
                """\
# MXFP8 params cannot be flattened; what their owner installed is sent instead.
params_list = list(params_list)
params_list[rank] = [
    p.main_param.to(p.dtype) if is_mxfp8tensor(p) else p for p in params_list[rank]
]""",
            ),
        ),
        Site(
            BUFFER,
            _SYNC,
            "the owner sends the BF16 rounding of its master",
            Replace(
                _FLATTEN,
                """\
# MXFP8 params cannot be flattened; what their owner installed is sent instead.
flat_local_params = _flatten_dense_tensors(
    [
        p.main_param.to(p.dtype) if is_mxfp8tensor(p) else p
        for p in bucket.layerwise_params_list[local_rank]
    ]
).detach()""",
            ),
            when=_flattens_quantized_params,
        ),
    ),
)
