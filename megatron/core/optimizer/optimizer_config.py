"""Options of the optimizers, and keys that select parameters for other options."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

OPTIMIZERS = ("adam", "sgd", "lion", "muon")

_ABSENT_FEATURES: dict[str, tuple[object, str]] = {
    "use_precision_aware_optimizer": (False, "optimizer state in low precision"),
    "overlap_param_gather_with_optimizer_step": (False, "gathering during the optimizer step"),
    "optimizer_cpu_offload": (False, "optimizer state on the CPU"),
}


@dataclass(frozen=True)
class ParamPredicate:
    """A named condition on a parameter; equal if the names are."""

    name: str
    fn: Callable[[torch.nn.Parameter], bool] = field(compare=False, hash=False)

    def __call__(self, param: torch.nn.Parameter) -> bool:
        return self.fn(param)


@dataclass(frozen=True)
class ParamWithNamePredicate:
    """A named condition on a parameter and its name; equal if the condition names are."""

    name: str
    fn: Callable[[torch.nn.Parameter, str], bool] = field(compare=False, hash=False)

    def __call__(self, param: torch.nn.Parameter, name: str) -> bool:
        return self.fn(param, name)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


@dataclass(frozen=True)
class ParamKey:
    """Selects parameters: any one of the conditions is enough.

    Attributes:
        name: Shell patterns for the parameter's name.
        attr: Attributes of the parameter that are true.
        predicate: Conditions on the parameter.
        with_name_predicate: Conditions on the parameter and its name.
    """

    name: str | tuple[str, ...] = ()
    attr: str | tuple[str, ...] = ()
    predicate: ParamPredicate | tuple[ParamPredicate, ...] = ()
    with_name_predicate: ParamWithNamePredicate | tuple[ParamWithNamePredicate, ...] = ()

    def matches(self, param: torch.nn.Parameter, param_name: str) -> bool:
        """Whether this key selects ``param``."""
        return (
            any(fnmatch.fnmatch(param_name, pattern) for pattern in _as_tuple(self.name))
            or any(getattr(param, attr, False) for attr in _as_tuple(self.attr))
            or any(predicate(param) for predicate in _as_tuple(self.predicate))
            or any(p(param, param_name) for p in _as_tuple(self.with_name_predicate))
        )


@dataclass
class OptimizerConfig:
    """Options of all optimizers; each reads those that concern it.

    Raises:
        ValueError: If an option is out of range or asks for a feature that is not here.
    """

    optimizer: str = "adam"
    """One of ``adam``, ``sgd``, ``lion`` and ``muon`` (matrices; the rest to ``muon_scalar_optimizer``)."""

    lr: float | None = None
    min_lr: float | None = None
    decoupled_lr: float | None = None
    """Learning rate of embeddings and output layer, where it differs."""
    decoupled_min_lr: float | None = None
    weight_decay: float = 0.01
    apply_wd_to_qk_layernorm: bool = False
    decoupled_weight_decay: bool = True
    """Decay weights (AdamW) rather than add to gradients (Adam)."""

    fp16: bool = False
    bf16: bool = False
    params_dtype: torch.dtype = torch.float32
    reuse_grad_buf_for_mxfp8_param_ag: bool = False
    fp8_recipe: str | None = None

    loss_scale: float | None = None
    """Constant loss scale; ``None`` for a dynamic one with ``fp16``, and for none without."""
    initial_loss_scale: float = 2**32
    min_loss_scale: float = 1.0
    loss_scale_window: float = 1000
    hysteresis: int = 2

    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    sgd_momentum: float = 0.9

    muon_momentum: float = 0.95
    muon_nesterov: bool = False
    muon_split_qkv: bool = True
    muon_split_qkv_per_head: bool = False
    muon_scale_mode: str = "spectral"
    muon_coefficient_type: str = "quintic"
    muon_num_ns_steps: int = 5
    muon_tp_mode: str = "blockwise"
    muon_extra_scale_factor: float = 1.0
    muon_fp32_matmul_prec: str = "medium"
    muon_scalar_optimizer: str = "adam"

    use_distributed_optimizer: bool = False
    use_layer_wise_distributed_optimizer: bool = False
    overlap_param_gather: bool = False

    clip_grad: float = 1.0
    """Largest gradient norm; 0 for no clipping."""
    grad_norm_skip_threshold: float = math.inf
    """Skip steps whose gradient norm is above this."""
    log_num_zeros_in_grad: bool = False
    barrier_with_L1_time: bool = False
    timers: Any = None
    """Accepted for Megatron's callers; this project's timing is done by profilers from outside."""

    use_precision_aware_optimizer: bool = False
    overlap_param_gather_with_optimizer_step: bool = False
    optimizer_cpu_offload: bool = False
    optimizer_cuda_graph: bool = False
    """Record the update of Muon or Adam as a CUDA graph; needs FP32 gradients and a GPU."""

    def __post_init__(self) -> None:
        for name, (off, feature) in _ABSENT_FEATURES.items():
            if getattr(self, name) != off:
                raise ValueError(f"{name}={getattr(self, name)!r}: {feature} is not available here")
        bare = self.optimizer.removeprefix("dist_")
        if bare not in OPTIMIZERS:
            raise ValueError(
                f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}"
            )
        if self.muon_scalar_optimizer not in ("adam", "lion"):
            raise ValueError(
                f"muon_scalar_optimizer must be adam or lion, got {self.muon_scalar_optimizer!r}"
            )
        if self.fp16 and self.bf16:
            raise ValueError("fp16 and bf16 exclude each other; choose one")
        if self.fp16 and bare == "muon":
            raise ValueError("optimizer='muon' works with bf16 or FP32, not with fp16=True")
        if self.clip_grad < 0:
            raise ValueError(
                f"clip_grad must be at least 0 (0 for no clipping), got {self.clip_grad}"
            )


# Megatron's names for the same options.
AdamOptimizerConfig = OptimizerConfig
SGDOptimizerConfig = OptimizerConfig
