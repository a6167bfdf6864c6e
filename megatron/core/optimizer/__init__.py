"""Optimizers: masters, flat and layer-wise sharding, update rules, and the factory for all of them."""

from megatron.core.optimizer.audit import ParamSyncError, audit_param_sync
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.factory import get_megatron_optimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)
from megatron.core.optimizer.optimizer_config import (
    AdamOptimizerConfig,
    OptimizerConfig,
    ParamKey,
    ParamPredicate,
    ParamWithNamePredicate,
    SGDOptimizerConfig,
)
from megatron.core.optimizer.param_groups import get_standard_config_overrides

__all__ = [
    "AdamOptimizerConfig",
    "ChainedOptimizer",
    "DistributedOptimizer",
    "FP32Optimizer",
    "Float16OptimizerWithFloat16Params",
    "LayerWiseDistributedOptimizer",
    "MegatronOptimizer",
    "OptimizerConfig",
    "ParamKey",
    "ParamPredicate",
    "ParamSyncError",
    "ParamWithNamePredicate",
    "SGDOptimizerConfig",
    "audit_param_sync",
    "get_megatron_optimizer",
    "get_standard_config_overrides",
]
