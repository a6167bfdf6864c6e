"""The wrapper that gives a module buffers, and communication at the right moments."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.collectives import broadcast, group_size
from megatron.core.distributed.bucket_group import _ParamAndGradBucketGroup
from megatron.core.distributed.buffer import _ParamAndGradBuffer
from megatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig,
)
from megatron.core.distributed.layout_check import check_same_on_all_ranks, describe_layout
from megatron.core.distributed.partition import partition_buckets
from megatron.core.fp8_utils import forget_quantized_weights, is_float8tensor
from megatron.core.param_layout import (
    BufferKey,
    FullParamLayout,
    compute_full_param_layout,
    effective_bucket_size,
    group_params_for_buffers,
    unpadded_layout,
)
from megatron.core.process_groups_config import ProcessGroupCollection


class DistributedDataParallel(torch.nn.Module):
    """Data parallelism over contiguous buffers.

    Args:
        config: Gives ``calculate_per_token_loss``: sum gradients instead of averaging them.
        ddp_config: Options.
        module: The model; its parameters move into buffers.
        disable_bucketing: One bucket a buffer, and one bucket group an owner.
        pg_collection: Process groups; those of :mod:`megatron.core.parallel_state` if ``None``.
        full_param_layout: Where the parameters lie; computed from their tags if ``None``.

    Raises:
        ValueError: If the layout is not one of these parameters.
        RuntimeError: If the ranks do not agree on the layout.
    """

    def __init__(
        self,
        config: Any,
        ddp_config: DistributedDataParallelConfig,
        module: torch.nn.Module,
        disable_bucketing: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
        full_param_layout: FullParamLayout | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.ddp_config = ddp_config
        self.module = module
        self._set_groups(pg_collection or ProcessGroupCollection.use_mpu_process_groups())

        self.param_to_name = {p: n for n, p in module.named_parameters() if p.requires_grad}
        self.params_with_grad = list(self.param_to_name)
        if not self.params_with_grad:
            raise ValueError(
                "the module has no trainable parameter; DistributedDataParallel needs one"
            )
        self.bucket_size = (
            None
            if disable_bucketing
            else effective_bucket_size(
                ddp_config,
                sum(p.numel() for p in self.params_with_grad),
                group_size(self.intra_dp_cp_group),
            )
        )
        groups = group_params_for_buffers(self.params_with_grad, ddp_config.grad_reduce_in_fp32)
        self.full_param_layout = full_param_layout or self._compute_layout()
        layout = self.full_param_layout or FullParamLayout(
            {key: unpadded_layout(params, self.bucket_size) for key, (params, _) in groups.items()}
        )
        self._check_layout(layout, groups)

        self.buffers: list[_ParamAndGradBuffer] = []  # type: ignore[assignment]
        self.expert_parallel_buffers: list[_ParamAndGradBuffer] = []
        for key, (params, param_indices) in groups.items():
            expert = key.is_expert_parallel
            buffer = _ParamAndGradBuffer(
                ddp_config,
                key.param_dtype,
                key.grad_dtype,
                [(p, self.param_to_name[p]) for p in params],
                self.intra_expt_dp_group if expert else self.intra_dp_cp_group,
                self.bucket_size,
                self.param_to_name,
                self._gradient_scaling_factor(expert),
                param_indices,
                param_layout=layout.layouts[key],
            )
            (self.expert_parallel_buffers if expert else self.buffers).append(buffer)

        self.bucket_groups = self._partition(self.buffers, disable_bucketing)
        self.expert_parallel_bucket_groups = self._partition(
            self.expert_parallel_buffers, disable_bucketing
        )
        self._link_bucket_groups()
        self.param_to_bucket_group = {
            p: group for group in self.all_bucket_groups for p in group.params
        }
        self.force_all_reduce = False
        # Parameters keep hooks where the garbage collector does not see them; through a strong reference
        # model and process groups would never end.
        this = weakref.ref(self)

        def on_gradient(param: torch.Tensor) -> None:
            wrapper = this()
            if wrapper is not None:
                wrapper._backward_post_hook(param)

        for param in self.params_with_grad:
            param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
            gtp = getattr(param, "gtp_remat", None)
            if gtp is None:
                param.register_post_accumulate_grad_hook(on_gradient)
            else:
                gtp.grad_ready = partial(self._register_grad_ready, param)
                gtp.publish = partial(self._publish, param)
        self.use_forward_hook = ddp_config.overlap_param_gather
        self.overlap_param_gather_with_optimizer_step = False
        self.remove_forward_pre_hook_handles: dict[torch.nn.Module, Any] = {}
        if self.use_forward_hook:
            self.enable_forward_pre_hook()

    # Construction

    def _set_groups(self, groups: ProcessGroupCollection) -> None:
        def named(*names: str) -> dist.ProcessGroup | None:
            return next((getattr(groups, n) for n in names if hasattr(groups, n)), None)

        self.dp_group = named("dp", "dp_cp")
        self.dp_cp_group = named("dp_cp", "dp")
        self.intra_dp_cp_group = named("intra_dp_cp", "dp_cp", "dp")
        self.expt_dp_group = named("expt_dp", "dp_cp", "dp")
        self.intra_expt_dp_group = named("intra_expt_dp", "expt_dp", "dp_cp", "dp")
        self.inter_dist_opt_group = named("inter_dist_opt")
        # Ranks with batches of their own, which are more than those that hold the same parameters.
        self.batch_group = named("dp_cp_gtp_remat", "dp_cp", "dp")
        self.tp_group, self.expt_tp_group = named("tp"), named("expt_tp", "tp")
        self.gtp_remat_group, self.expt_gtp_remat_group = (
            named("gtp_remat"),
            named("expt_gtp_remat"),
        )
        if (
            self.ddp_config.num_distributed_optimizer_instances > 1
            and not self.inter_dist_opt_group
        ):
            raise ValueError(
                "num_distributed_optimizer_instances > 1 needs the group inter_dist_opt in pg_collection"
            )

    def _compute_layout(self) -> FullParamLayout | None:
        if not self.ddp_config.use_distributed_optimizer:
            return None
        return compute_full_param_layout(
            self.params_with_grad,
            self.bucket_size,
            group_size(self.intra_dp_cp_group),
            self.ddp_config,
            expert_data_parallel_world_size=group_size(self.intra_expt_dp_group),
        )

    def _check_layout(
        self,
        layout: FullParamLayout,
        groups: dict[BufferKey, tuple[list[torch.nn.Parameter], list[int]]],
    ) -> None:
        if set(layout.layouts) != set(groups):
            raise ValueError(
                f"full_param_layout has buffers {sorted(map(str, layout.layouts))}, the module needs "
                f"{sorted(map(str, groups))}; compute the layout from this module's parameters, "
                "with the same ddp_config"
            )
        for key, (params, _) in groups.items():
            if set(params) != set(layout.layouts[key].param_index_map):
                raise ValueError(
                    f"full_param_layout places other parameters in {key} than the module has; "
                    "compute it from this module's trainable parameters"
                )
        device = self.params_with_grad[0].device
        for expert, ranks in (
            (False, (self.dp_cp_group, self.gtp_remat_group, self.tp_group)),
            (True, (self.expt_dp_group, self.expt_gtp_remat_group, self.expt_tp_group)),
        ):
            part = {k: v for k, v in layout.layouts.items() if k.is_expert_parallel == expert}
            if not part:
                continue
            lines = describe_layout(FullParamLayout(part), self.param_to_name)
            # Peers in TP and GTP update their shards of a matrix together, so they own the same ones.
            for number, group in enumerate(ranks):
                if number == 0 or group is not None:
                    check_same_on_all_ranks(lines, group, device)

    def _gradient_scaling_factor(self, expert: bool) -> float:
        """Brings the reduced sum to the average over all data-parallel ranks."""
        if self.config.calculate_per_token_loss:
            if self.ddp_config.average_in_collective:
                raise ValueError(
                    "average_in_collective excludes calculate_per_token_loss, which sums gradients"
                )
            return 1.0
        # Sums over GTP ranks come on top, when a shard's gradient is formed or in finalize_model_grads.
        ranks = group_size(self.batch_group)
        if self.ddp_config.average_in_collective:
            if ranks != group_size(self.dp_cp_group) or _several(self.expt_gtp_remat_group):
                raise ValueError(
                    "average_in_collective excludes GTP: the average would be over the ranks that "
                    "hold the same shard alone"
                )
            return group_size(self.expt_dp_group) / ranks if expert else 1.0
        return 1.0 / ranks

    def _partition(
        self, buffers: list[_ParamAndGradBuffer], disable_bucketing: bool
    ) -> list[_ParamAndGradBucketGroup]:
        groups = partition_buckets(
            buffers,
            force_single_bucket_group=disable_bucketing,
            reduce_scatter_with_fp32_accumulation=(
                self.ddp_config.reduce_scatter_with_fp32_accumulation
            ),
        )
        for group in groups:
            group.inter_distributed_optimizer_instance_group = self.inter_dist_opt_group
        return groups

    def _link_bucket_groups(self) -> None:
        """Chains gathers in forward order and reductions in backward order."""
        for groups in (self.bucket_groups, self.expert_parallel_bucket_groups):
            for later, earlier in zip(groups[1:], groups[:-1], strict=True):
                later.next_param_gather_bucket_group = earlier
                later.previous_grad_reduce_bucket_group = earlier
                earlier.next_grad_reduce_bucket_group = later

    @property
    def all_bucket_groups(self) -> list[_ParamAndGradBucketGroup]:
        """Dense and expert bucket groups."""
        return self.bucket_groups + self.expert_parallel_bucket_groups

    @property
    def all_buffers(self) -> list[_ParamAndGradBuffer]:
        """Dense and expert buffers."""
        return self.buffers + self.expert_parallel_buffers

    # Forward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        return self.module(*inputs, **kwargs)

    def enable_forward_pre_hook(self) -> None:
        """From now on a module's parameters are gathered before it runs."""
        if not self.use_forward_hook or self.remove_forward_pre_hook_handles:
            raise RuntimeError(
                "forward pre-hooks are for overlap_param_gather=True, and are enabled once"
            )
        for module in self.module.modules():
            self.remove_forward_pre_hook_handles[module] = module.register_forward_pre_hook(
                self._forward_pre_hook
            )

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Stops gathering in the forward pass; unless told otherwise, gathers everything now."""
        if not self.use_forward_hook or not self.remove_forward_pre_hook_handles:
            raise RuntimeError("forward pre-hooks are not enabled")
        for handle in self.remove_forward_pre_hook_handles.values():
            handle.remove()
        self.remove_forward_pre_hook_handles = {}
        if param_sync:
            self.start_param_sync(force_sync=True)

    def _forward_pre_hook(self, module: torch.nn.Module, *unused: Any) -> None:
        for param in module.parameters(recurse=False):
            self._finish_param_sync(param)

    def _finish_param_sync(self, param: torch.Tensor) -> None:
        chained = not (
            self.ddp_config.align_param_gather or self.overlap_param_gather_with_optimizer_step
        )
        group = self.param_to_bucket_group.get(param)  # type: ignore[call-overload]
        if group is not None:
            group.finish_param_sync(skip_next_bucket_dispatch=not chained)

    def start_param_sync(
        self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False
    ) -> None:
        """Gathers all parameters: asynchronously with overlap, unless ``force_sync``."""
        if self.overlap_param_gather_with_optimizer_step and not (force_sync or force_dispatch):
            return
        for group in self.all_bucket_groups:
            group.start_param_sync(force_sync=force_sync)

    def free_overlap_buffers(self) -> None:
        """Finishes the gathers that are under way, so that nothing of theirs stays allocated."""
        for group in self.all_bucket_groups:
            if group.param_gather_handle is not None:
                group.start_param_sync(force_sync=True)

    # Backward

    def _backward_post_hook(self, param: torch.Tensor) -> None:
        if param.grad is not None and not param.grad_added_to_main_grad:  # type: ignore[attr-defined]
            param.main_grad.add_(param.grad)  # type: ignore[attr-defined]
        param.grad = None
        self._register_grad_ready(param)

    def _register_grad_ready(self, param: torch.Tensor) -> None:
        """Notes that ``param``'s gradient is in ``main_grad``."""
        if self.ddp_config.overlap_grad_reduce:
            group = self.param_to_bucket_group[param]  # type: ignore[index]
            group.register_grad_ready(param, self.force_all_reduce)  # type: ignore[arg-type]

    def _publish(self, param: torch.Tensor) -> None:
        """Finishes the gather of ``param``'s group: its shard is about to be read ahead of its module."""
        if self.remove_forward_pre_hook_handles:
            self._finish_param_sync(param)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it gradients only accumulate: for all microbatches but the last."""
        for group in self.all_bucket_groups:
            group.is_last_microbatch = False
        try:
            yield
        finally:
            for group in self.all_bucket_groups:
                group.is_last_microbatch = True

    def start_grad_sync(self, *unused: Any) -> None:
        """Reduces all gradients; with overlap it returns at once."""
        for group in self.all_bucket_groups:
            group.start_grad_sync()

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Returns when all gradients are reduced."""
        for group in self.all_bucket_groups:
            group.finish_grad_sync(force_all_reduce=force_all_reduce)

    def scale_gradients(self, scaling_factor: float) -> None:
        """Multiplies all gradients by ``scaling_factor``."""
        for buffer in self.all_buffers:
            buffer.scale_gradients(scaling_factor)

    def zero_grad_buffer(self) -> None:
        """Sets all gradients to zero; call it before the first forward pass of every step."""
        for group in self.all_bucket_groups:
            group.reset()
        for param in self.params_with_grad:
            param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        for buffer in self.all_buffers:
            buffer.reset()

    # Everything else

    def broadcast_params(self) -> None:
        """Gives every data-parallel rank the parameters of the first."""
        with torch.no_grad():
            for param in self.module.parameters():
                group = (
                    self.dp_cp_group if getattr(param, "allreduce", True) else self.expt_dp_group
                )
                if group_size(group) > 1:
                    for piece in _storage_of(param):
                        broadcast(piece, group)
        forget_quantized_weights(self.params_with_grad)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The module's state, without this wrapper's prefix."""
        return self.module.state_dict(*args, **kwargs)

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> Any:
        """Megatron's name for :meth:`state_dict`."""
        return self.module.state_dict(prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Loads the module's state into its buffers, by copy.

        Raises:
            ValueError: With ``assign=True``, which would take the parameters out of their buffers.
        """
        if assign:
            raise ValueError(
                "assign=True would take the parameters out of their buffers; use False"
            )
        result = self.module.load_state_dict(state_dict, strict=strict)
        forget_quantized_weights(self.params_with_grad)
        return result


def _several(group: dist.ProcessGroup | None) -> bool:
    return group is not None and group_size(group) > 1


def _storage_of(param: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that a parameter consists of."""
    if not is_float8tensor(param):
        return [param.data]
    names = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")
    return [piece for name in names if (piece := getattr(param, name, None)) is not None]
