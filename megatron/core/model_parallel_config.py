"""How a model is cut over ranks, and in which dtype it computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any

import torch


def options_not_available(name: str, parts: Mapping[str, Mapping[str, Any]]) -> type:
    """A dataclass of the fields that Megatron has and this project does not.

    Code written for Megatron may pass them at their defaults; :func:`refuse_not_available` refuses
    everything else.

    Args:
        name: Of the class.
        parts: For each missing part of the project, its fields and their default values.
    """
    specs = [
        (
            option,
            Any,
            field(default=default, repr=False, metadata={"part": part, "default": default}),
        )
        for part, defaults in parts.items()
        for option, default in defaults.items()
    ]
    return make_dataclass(name, specs)


def refuse_not_available(config: Any) -> None:
    """Raises ``ValueError`` if an option of a missing part is not at its default."""
    for option in fields(config):
        if "part" not in option.metadata:
            continue
        value, default = getattr(config, option.name), option.metadata["default"]
        if value is None and not default:
            continue
        if value != default:
            raise ValueError(
                f"{option.metadata['part']} is not available here: {option.name} must stay "
                f"{default!r}, got {value!r}"
            )


_NotAvailable: Any = options_not_available(
    "_NotAvailable",
    {
        "pipeline parallelism": {
            "pipeline_model_parallel_size": 1,
            "virtual_pipeline_model_parallel_size": None,
            "pipeline_model_parallel_comm_backend": None,
            "microbatch_group_size_per_vp_stage": None,
            "num_microbatches_with_partial_activation_checkpoints": None,
            "variable_seq_lengths": False,
            "overlap_p2p_comm": False,
            "overlap_p2p_comm_warmup_flush": False,
            "use_ring_exchange_p2p": False,
            "defer_embedding_wgrad_compute": False,
            "wgrad_deferral_limit": 0,
            "mtp_standalone": False,
        },
        "context parallelism": {
            "context_parallel_size": 1,
            "hierarchical_context_parallel_sizes": None,
            "max_seqlen_per_dp_cp_rank": None,
            "hybrid_context_parallel": False,
        },
        "autocast": {"enable_autocast": False},
        "fusion of weight gradients into main_grad": {
            "gradient_accumulation_fusion": False,
            "delay_wgrad_compute": False,
        },
        "overlap inside tensor-parallel matrix products": {
            "tp_comm_overlap": False,
            "tp_comm_overlap_rs_dgrad": False,
            "tp_comm_atomic_ag": False,
            "tp_comm_atomic_rs": False,
            "tp_comm_overlap_disable_qkv": False,
            "tp_comm_overlap_disable_fc1": False,
        },
        "overlap of expert communication": {
            "overlap_moe_expert_parallel_comm": False,
            "overlap_dispatch_backward_with_experts_wgrad": False,
            "ep_overlap_early_attn_memory_release": False,
        },
        "CPU offloading": {
            "cpu_offloading": False,
            "cpu_offloading_num_layers": 0,
            "cpu_offloading_weights": False,
            "cpu_offloading_double_buffering": False,
            "cpu_offloading_retain_pinned_cpu_buffers": False,
        },
    },
)


def resolve_weight_shards(
    tensor_parallel: int, shards: int | None, gtp: int, shards_name: str, tensor_name: str
) -> tuple[int, int]:
    """Weight shards (TP x GTP) and GTP size, from whichever of the two was given.

    Raises:
        ValueError: If the shards are not a multiple of the TP size.
    """
    if shards is None:
        return tensor_parallel * gtp, gtp
    if shards < 1 or shards % tensor_parallel != 0:
        raise ValueError(
            f"{shards_name} ({shards}) must be a multiple of {tensor_name} ({tensor_parallel}): it is "
            "TP x GTP"
        )
    return shards, shards // tensor_parallel


@dataclass
class ModelParallelConfig(_NotAvailable):
    """Parallel sizes, dtypes and hooks of a training loop.

    Attributes:
        tensor_model_parallel_size: TP.
        tensor_parallel_num_weight_shards: TP x GTP; the same as TP if ``None``.
        gtp_weight_remat_size: GTP; follows from the number of weight shards where that is given.
        sequence_parallel: Cut activations between tensor-parallel layers over the TP ranks by tokens.
        expert_model_parallel_size: EP.
        expert_tensor_parallel_size: TP of experts; that of the rest if ``None``.
        expert_tensor_parallel_num_weight_shards: Expert TP x expert GTP.
        expert_gtp_weight_remat_size: Expert GTP.
        perform_initialization: Draw initial weights; otherwise they hold what memory held.
        use_cpu_initialization: Initial weights are drawn on the CPU either way; with True, the
            parameters stay there.
        fp16: Compute in FP16.
        bf16: Compute in BF16.
        params_dtype: Dtype of the parameters as they are built.
        timers: For the training loop.
        finalize_model_grads_func: For the training loop.
        grad_scale_func: For the training loop.
        no_sync_func: For the training loop.
        grad_sync_func: For the training loop.
        param_sync_func: For the training loop.
        deterministic_mode: All kernels used are deterministic; accepted.
        autocast_dtype: Accepted; autocast is not available.
        pipeline_dtype: Accepted; there is no pipeline.
        cross_entropy_loss_fusion: Accepted; makes no difference.
        cross_entropy_fusion_impl: Accepted; makes no difference.
        tp_comm_bulk_wgrad: Like all of ``tp_comm_*`` and ``*p2p*`` below, accepted: they say how
            something would be done that is not done.

    Raises:
        ValueError: If sizes contradict each other, or an option is set that is not available.
    """

    tensor_model_parallel_size: int = 1
    tensor_parallel_num_weight_shards: int | None = None
    gtp_weight_remat_size: int = 1
    sequence_parallel: bool = False
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    expert_tensor_parallel_num_weight_shards: int | None = None
    expert_gtp_weight_remat_size: int = 1
    perform_initialization: bool = True
    use_cpu_initialization: bool = False
    fp16: bool = False
    bf16: bool = False
    params_dtype: torch.dtype = torch.float32
    timers: Callable | None = None
    finalize_model_grads_func: Callable | None = None
    grad_scale_func: Callable | None = None
    no_sync_func: Callable | None = None
    grad_sync_func: Callable | None = None
    param_sync_func: Callable | None = None
    deterministic_mode: bool = False
    autocast_dtype: torch.dtype | None = None
    pipeline_dtype: torch.dtype | None = None
    use_te_rng_tracker: bool = False
    cross_entropy_loss_fusion: bool = False
    cross_entropy_fusion_impl: str = "native"
    tp_comm_bulk_wgrad: bool = True
    tp_comm_bulk_dgrad: bool = True
    tp_comm_overlap_ag: bool = True
    tp_comm_overlap_rs: bool = True
    tp_comm_split_ag: bool = True
    tp_comm_split_rs: bool = True
    tp_comm_bootstrap_backend: str = "nccl"
    batch_p2p_comm: bool = True
    batch_p2p_sync: bool = True
    deallocate_pipeline_outputs: bool = False
    cpu_offloading_activations: bool = True
    barrier_with_L1_time: bool = True

    def __post_init__(self) -> None:
        refuse_not_available(self)
        for name in (
            "tensor_model_parallel_size",
            "gtp_weight_remat_size",
            "expert_model_parallel_size",
            "expert_gtp_weight_remat_size",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.fp16 and self.bf16:
            raise ValueError("fp16 and bf16 exclude each other; set one of them")
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ValueError(
                "sequence_parallel cuts activations over the tensor-parallel ranks; it needs "
                "tensor_model_parallel_size above 1, got 1"
            )
        if self.expert_tensor_parallel_size is None:
            self.expert_tensor_parallel_size = self.tensor_model_parallel_size
        self.tensor_parallel_num_weight_shards, self.gtp_weight_remat_size = resolve_weight_shards(
            self.tensor_model_parallel_size,
            self.tensor_parallel_num_weight_shards,
            self.gtp_weight_remat_size,
            "tensor_parallel_num_weight_shards",
            "tensor_model_parallel_size",
        )
        self.expert_tensor_parallel_num_weight_shards, self.expert_gtp_weight_remat_size = (
            resolve_weight_shards(
                self.expert_tensor_parallel_size,
                self.expert_tensor_parallel_num_weight_shards,
                self.expert_gtp_weight_remat_size,
                "expert_tensor_parallel_num_weight_shards",
                "expert_tensor_parallel_size",
            )
        )
        if self.autocast_dtype is None:
            self.autocast_dtype = self.params_dtype
