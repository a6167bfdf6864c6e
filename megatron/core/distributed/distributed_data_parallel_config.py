"""Options of :class:`~megatron.core.distributed.DistributedDataParallel`."""

from __future__ import annotations

from dataclasses import dataclass

# Megatron options whose feature this project does not have, with the value that leaves it off.
_ABSENT_FEATURES: dict[str, tuple[object, str]] = {
    "check_for_large_grads": (False, "the check for unexpectedly large gradients"),
    "param_name_patterns_for_fp32_local_accumulation": (
        (),
        "FP32 accumulation of chosen parameters (use grad_reduce_in_fp32 for all)",
    ),
    "fp4_param_gather": (False, "FP4 weights"),
    "use_megatron_fsdp": (False, "Megatron-FSDP"),
    "use_custom_fsdp": (False, "Megatron-FSDP"),
    "data_parallel_sharding_strategy": ("no_shard", "Megatron-FSDP"),
    "nccl_ub": (False, "NCCL user buffers"),
    "delay_wgrad_compute": (False, "delayed weight gradients"),
}


@dataclass
class DistributedDataParallelConfig:
    """How gradients are reduced and parameters gathered.

    Raises:
        ValueError: If options contradict each other or ask for a feature that is not here.
    """

    grad_reduce_in_fp32: bool = False
    """Accumulate and reduce gradients in FP32 rather than in the parameter's nominal dtype."""

    overlap_grad_reduce: bool = False
    """Start a bucket group's reduction in the backward pass, once its gradients are complete."""

    overlap_param_gather: bool = False
    """Gather parameters in the forward pass, group by group, ahead of their use."""

    align_param_gather: bool = False
    """Leave starting the gathers to the training loop instead of chaining them from pre-hooks."""

    use_distributed_optimizer: bool = False
    """Reduce-scatter gradients to the ranks that own them, instead of all-reducing them."""

    num_distributed_optimizer_instances: int = 1
    """Replicas of the sharded optimizer state within the data-parallel ranks."""

    check_for_nan_in_grad: bool = False
    """Before each reduction, stop with the name of any parameter whose local gradient is NaN or Inf."""

    bucket_size: int | None = None
    """Elements at which a bucket closes; ``None`` for max(40e6, 1e6 * ranks), or for one bucket
    without ``overlap_grad_reduce``."""

    num_buckets: int | None = None
    """Number of buckets to aim for, in place of ``bucket_size``."""

    pad_buckets_for_high_nccl_busbw: bool = False
    """Make bucket sizes multiples of 2**16, which NCCL rings of many ranks favour."""

    reduce_scatter_with_fp32_accumulation: bool = False
    """Reduce low-precision gradients by all-to-all and a local FP32 sum."""

    average_in_collective: bool = False
    """Average in the collective, instead of scaling gradients before a sum."""

    fp8_param_gather: bool = False
    """The model's matrices are stored quantised."""

    reuse_grad_buf_for_mxfp8_param_ag: bool = False
    """Gather MXFP8 parameters through the memory of their bucket's gradients."""

    check_for_large_grads: bool = False
    param_name_patterns_for_fp32_local_accumulation: tuple[str, ...] = ()
    fp4_param_gather: bool = False
    use_megatron_fsdp: bool = False
    use_custom_fsdp: bool = False
    data_parallel_sharding_strategy: str = "no_shard"
    nccl_ub: bool = False
    delay_wgrad_compute: bool = False

    def __post_init__(self) -> None:
        for name, (off, feature) in _ABSENT_FEATURES.items():
            if getattr(self, name) != off:
                raise ValueError(f"{name}={getattr(self, name)!r}: {feature} is not available here")
        if self.reuse_grad_buf_for_mxfp8_param_ag and not self.fp8_param_gather:
            raise ValueError(
                "reuse_grad_buf_for_mxfp8_param_ag needs fp8_param_gather=True: only quantised "
                "parameters are gathered through gradient memory"
            )
        if self.bucket_size is not None and self.num_buckets is not None:
            raise ValueError(
                f"bucket_size={self.bucket_size} and num_buckets={self.num_buckets} exclude each "
                "other; give one"
            )
        for name in ("bucket_size", "num_buckets", "num_distributed_optimizer_instances"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        instances = self.num_distributed_optimizer_instances
        if instances > 1 and not self.use_distributed_optimizer:
            raise ValueError(
                f"num_distributed_optimizer_instances={instances} needs "
                "use_distributed_optimizer=True"
            )
        if self.reduce_scatter_with_fp32_accumulation:
            if not self.use_distributed_optimizer:
                raise ValueError(
                    "reduce_scatter_with_fp32_accumulation needs use_distributed_optimizer=True; "
                    "without it gradients are all-reduced"
                )
            if self.average_in_collective or instances > 1:
                raise ValueError(
                    "reduce_scatter_with_fp32_accumulation excludes average_in_collective and "
                    "num_distributed_optimizer_instances > 1: it sums locally, within one group"
                )
