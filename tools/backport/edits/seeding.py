"""Edit 4: masters start at the value that a quantised parameter was made from."""

from tools.backport.changes import Insert, Replace
from tools.backport.model import LAYER_WISE, OPTIMIZER, Edit, Site

_INIT = "LayerWiseDistributedOptimizer.__init__"

EDIT = Edit(
    name="master seeding",
    does="Make FP32 masters from the high-precision initial value where a weight kept one, and "
    "drop that value on every rank.",
    why="Masters made by dequantising start a run with FP8 primary weights elsewhere than one "
    "without.",
    needs_layouts=False,
    sites=(
        Site(
            OPTIMIZER,
            "Float16OptimizerWithFloat16Params.__init__",
            "masters are seeded from the high-precision initial value",
            Replace(
                "main_param = param.detach().clone().float()",
                """\
init_val = None
if hasattr(param, 'get_high_precision_init_val'):
    # Dequantizing would start training from other values than BF16.
    init_val = param.get_high_precision_init_val()
if init_val is None:
    main_param = param.detach().clone().float()
else:
    main_param = init_val.detach().to(param.device).clone().float()
    main_param = main_param.view(param.shape)
    param.clear_high_precision_init_val()""",
            ),
        ),
        Site(
            LAYER_WISE,
            _INIT,
            "every rank remembers all parameters before they are sharded",
            Insert(
                "self.pg_collection = pg_collection",
                """\
# Owners alone make main params, but every rank holds the values that seed them.
seeded_params = [
    param
    for optimizer in optimizers
    for group in optimizer.param_groups
    for param in group['params']
]""",
            ),
        ),
        Site(
            LAYER_WISE,
            _INIT,
            "every rank drops the initial values, owner or not",
            Insert(
                "super().__init__(optimizers)",
                """\
for param in seeded_params:
    if hasattr(param, 'clear_high_precision_init_val'):
        param.clear_high_precision_init_val()
""",
                where="before",
            ),
        ),
    ),
)
