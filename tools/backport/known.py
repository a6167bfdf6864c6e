"""The code that this tool knows: one digest for each shape that a function has had.

A digest is of the function's code without comments and blank lines, and without this tool's edits
(:attr:`tools.backport.tree.Scope.fingerprint`); beside it stand the releases that have it. Code is
told apart by these alone, never by a version string: a branch whose functions are those of a
release is treated as that release is. ``python -m tools.backport fingerprints PATH`` prints the
digests of other code.
"""

from tools.backport.model import BUFFER, LAYER_WISE, OPTIMIZER

KNOWN_FUNCTIONS: dict[str, dict[str, dict[str, str]]] = {
    LAYER_WISE: {
        "LayerWiseDistributedOptimizer.__init__": {
            "83c1a2609a36723e": "0.16",
            "9c3b94d43f3d6532": "0.17",
            "8e17047c100b8753": "0.18",
            "0072de0535848df7": "0.19",
        },
        "LayerWiseDistributedOptimizer.allgather_params": {
            "9c6b9b97cce03109": "0.16",
            "07b456da1eb386ff": "0.17",
            "ed51546ae2e325c2": "0.18",
            "05fb68bf4abbd387": "0.19",
        },
        "LayerWiseDistributedOptimizer.start_param_sync_for_bucket_group_subset": {
            "bf69a5123391d373": "0.18, 0.19",
        },
        "LayerWiseDistributedOptimizer.step_with_ready_grads": {
            "8a54c41d5f6f8157": "0.18, 0.19",
        },
        "_bucket_is_managed_by_layer_wise_optimizer": {
            "b63177de3c94fa77": "0.18, 0.19",
        },
    },
    OPTIMIZER: {
        "Float16OptimizerWithFloat16Params.__init__": {
            "feaad1631aa67246": "0.16, 0.17, 0.18",
            "e03a691df810e3ff": "0.19",
        },
        "Float16OptimizerWithFloat16Params._copy_main_params_to_model_params": {
            "31abcad51d8ebaab": "0.16, 0.17, 0.18, 0.19",
        },
        "MixedPrecisionOptimizer.step_with_ready_grads": {
            "a4783835d6aee1c2": "0.18",
            "9213e175f8321053": "0.19",
        },
    },
    BUFFER: {
        "_ParamAndGradBucket.__init__": {
            "3c7aea805c7d1141": "0.18, 0.19",
        },
        "_ParamAndGradBucketGroup.__init__": {
            "e2af27f8e65a880b": "0.18, 0.19",
        },
        "_ParamAndGradBucketGroup._post_param_sync": {
            "46a27982aff6ab38": "0.18",
            "50ae11fe888d6503": "0.19",
        },
        "_ParamAndGradBucketGroup.finish_param_sync": {
            "c50c5244367edd40": "0.18, 0.19",
        },
        "_ParamAndGradBucketGroup.start_param_sync": {
            "b2c2a7c778618a5d": "0.16",
            "c482f0950c34d4d0": "0.17",
            "ab5fe72d21768235": "0.18",
            "251a46aa0b70b63d": "0.19",
        },
        "_ParamAndGradBuffer.__init__": {
            "3a1902a06f32844c": "0.18",
            "496cca959038518f": "0.19",
        },
        "partition_buckets": {
            "d95dbece95924ce2": "0.18, 0.19",
        },
        "shard_buffer": {
            "4ba2cc53483b6eb9": "0.18, 0.19",
        },
    },
}
