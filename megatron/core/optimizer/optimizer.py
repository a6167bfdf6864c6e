"""What all optimizers share: main parameters, one step, and chains of optimizers.

A step has the same parts for every optimizer: collect gradients into main parameters, take the norm
over all ranks, skip the step if that is not finite, clip, update, give the model its new values.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.collectives import group_rank
from megatron.core.fp8_utils import (
    copy_tensors_to_quantized_params,
    forget_quantized_weights,
    is_float8tensor,
)
from megatron.core.optimizer.clip_grads import (
    clip_grad_by_total_norm_fp32,
    local_zero_count,
    norm_over,
    sum_over,
)
from megatron.core.optimizer.grad_scaler import MegatronGradScaler
from megatron.core.optimizer.main_params import MainParam, make_main_param
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.step_graph import StepGraph
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.quantization.casts import cast_many

StepResult = tuple[bool, float | None, int | None]


class MegatronOptimizer(ABC):
    """An optimizer step over parameters that may lie on many ranks."""

    def __init__(self, config: OptimizerConfig) -> None:
        self.config = config

    # Parts of a step

    @abstractmethod
    def leaves(self) -> list[MainParamOptimizer]:
        """The optimizers that hold main parameters, in the order in which they step."""

    @abstractmethod
    def step_with_ready_grads(self) -> bool:
        """Updates the main parameters from their gradients and gives the model its new values."""

    @property
    def grad_scaler(self) -> MegatronGradScaler | None:
        """The loss scale's keeper; ``None`` without loss scaling."""
        return next((leaf.scaler for leaf in self.leaves() if leaf.scaler is not None), None)

    def prepare_grads(self) -> bool:
        """Collects and unscales gradients. Returns whether any on any rank is NaN or Inf."""
        self._collect_grads()
        return not math.isfinite(self.get_grad_norm())

    def _collect_grads(self) -> None:
        scaler = self.grad_scaler
        for leaf in self.leaves():
            leaf.collect_grads()
            if scaler is not None and leaf.main_grads():
                torch._foreach_mul_(leaf.main_grads(), float(scaler.inv_scale))

    def get_grad_norm(self) -> float:
        """2-norm of all gradients over all ranks, each element counted once."""
        leaves = self.leaves()
        return norm_over(
            [(leaf.grads_counted_here(), leaf.device, leaf.stats_group) for leaf in leaves]
        )

    def count_zeros(self) -> int:
        """Number of gradient elements over all ranks that are zero."""
        return int(
            sum_over(
                [
                    (local_zero_count(leaf.grads_counted_here(), leaf.device), leaf.stats_group)
                    for leaf in self.leaves()
                ]
            )
        )

    def clip_grad_norm(self, clip_grad: float) -> float:
        """Clips the collected gradients; returns the norm that they had."""
        norm = self.get_grad_norm()
        clip_grad_by_total_norm_fp32(self.get_parameters(), clip_grad, norm)
        return norm

    @torch.no_grad()
    def step(self) -> StepResult:
        """One step from the accumulated gradients.

        Returns:
            Whether the parameters were updated, the gradient norm before clipping, and with
            ``log_num_zeros_in_grad`` the number of zero gradients. A step whose norm is not finite
            or is above ``grad_norm_skip_threshold`` changes nothing but the loss scale.
        """
        self._collect_grads()
        norm = self.get_grad_norm()
        skip = not math.isfinite(norm) or norm > self.config.grad_norm_skip_threshold
        scaler = self.grad_scaler
        if scaler is not None:
            scaler.update(not math.isfinite(norm))
        if skip:
            self._drop_grads()
            return False, norm, None
        if self.config.clip_grad > 0:
            clip_grad_by_total_norm_fp32(self.get_parameters(), self.config.clip_grad, norm)
        zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else None
        return self.step_with_ready_grads(), norm, zeros

    def _drop_grads(self) -> None:
        for leaf in self.leaves():
            for main in leaf.get_parameters():
                main.grad = None

    # Everything else

    def get_parameters(self) -> list[torch.Tensor]:
        """All main parameters of this rank."""
        return [
            p for leaf in self.leaves() for g in leaf.optimizer.param_groups for p in g["params"]
        ]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all wrapped optimizers; schedulers set their ``lr``."""
        return [group for leaf in self.leaves() for group in leaf.optimizer.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears ``.grad``; accumulated gradients are cleared by DDP's ``zero_grad_buffer``."""
        for leaf in self.leaves():
            for record in leaf.main_params:
                for tensor in (record.model_param, record.main_param):
                    if tensor.grad is not None and not set_to_none:
                        tensor.grad.zero_()
                    elif tensor.grad is not None:
                        tensor.grad = None

    def get_loss_scale(self) -> torch.Tensor:
        """Factor by which losses are to be multiplied, FP32, one element."""
        scaler = self.grad_scaler
        return torch.ones(1) if scaler is None else scaler.scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss`` times the loss scale."""
        return loss if self.grad_scaler is None else loss * self.get_loss_scale().to(loss.device)

    def reload_model_params(self, state_dict: Any = None) -> None:
        """Makes masters anew from the model's parameters, after those were loaded."""
        for leaf in self.leaves():
            leaf.reload_model_params()

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to go on with the same ranks: masters, moments, scale."""
        return {"leaves": [leaf.own_state() for leaf in self.leaves()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from :meth:`state_dict` of the same rank of the same job.

        Raises:
            ValueError: If the state is of other parameters.
        """
        leaves = self.leaves()
        if len(leaves) != len(state_dict["leaves"]):
            raise ValueError(
                f"the state is of {len(state_dict['leaves'])} optimizers, this job has {len(leaves)}; "
                "load it with the flags it was saved with"
            )
        for leaf, state in zip(leaves, state_dict["leaves"], strict=True):
            leaf.load_own_state(state)


def _model_parallel_group() -> dist.ProcessGroup | None:
    if parallel_state.model_parallel_is_initialized():
        return parallel_state.get_model_parallel_group()
    return None


class MainParamOptimizer(MegatronOptimizer):
    """A torch optimizer over main parameters. Subclasses choose what this rank updates.

    Args:
        optimizer: Its groups hold model parameters; they come to hold main parameters.
        config: Options.
        grad_scaler: Loss scale, if any.
        init_state_fn: ``(optimizer, config)``: makes the optimizer's state before a step is taken.
        make_main_params: For a model parameter what this rank updates of it; ``None`` for nothing.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: OptimizerConfig,
        grad_scaler: MegatronGradScaler | None,
        init_state_fn: Callable[..., None] | None,
        make_main_params: Callable[[torch.nn.Parameter], MainParam | None],
    ) -> None:
        super().__init__(config)
        self.optimizer = optimizer
        self.scaler = grad_scaler
        self.init_state_fn = init_state_fn
        self.main_params: list[MainParam] = []
        # Everything that this optimizer updates on some rank.
        self.managed_params: list[torch.nn.Parameter] = []
        for group in optimizer.param_groups:
            self.managed_params += group["params"]
            records = [r for p in group["params"] if (r := make_main_params(p)) is not None]
            group["params"] = [record.main_param for record in records]
            self.main_params += records
        self.step_graph = StepGraph(optimizer) if config.optimizer_cuda_graph else None
        self.device = self.managed_params[0].device if self.managed_params else torch.device("cpu")
        # Ranks over which gradients are summed for the norm (None: all), and the groups that hold the
        # same replicated parameters, of which one rank counts.
        self.stats_group: dist.ProcessGroup | None = _model_parallel_group()
        self.pg_collection: ProcessGroupCollection | None = None
        # Whether parameters are shared out, and over which ranks.
        self.is_sharded = False
        self.ownership_group: dist.ProcessGroup | None = None
        self.expert_ownership_group: dist.ProcessGroup | None = None
        # Quantised parameters get their values when their bucket is gathered, not from here.
        self.quantized_params_are_staged = False

    def leaves(self) -> list[MainParamOptimizer]:
        return [self]

    def ownership_group_of(self, param: torch.nn.Parameter) -> dist.ProcessGroup | None:
        """Ranks among which ``param`` is shared out, if this optimizer is sharded."""
        expert = not getattr(param, "allreduce", True)
        return self.expert_ownership_group if expert else self.ownership_group

    def collect_grads(self) -> None:
        """Points every main parameter's ``.grad`` at its FP32 gradient, by view where it is one."""
        for record in self.main_params:
            grad = record.grad_view()
            record.main_param.grad = None if grad is None else grad.float()

    def main_grads(self) -> list[torch.Tensor]:
        """The collected gradients."""
        return [r.main_param.grad for r in self.main_params if r.main_param.grad is not None]

    def grads_counted_here(self) -> list[torch.Tensor]:
        """Of the collected gradients those that no other rank counts for the norm."""
        grads = []
        for record in self.main_params:
            grad = record.main_param.grad
            if grad is not None and self._counts_here(record.model_param):
                grads.append(record.without_padding(grad))
        return grads

    def _counts_here(self, param: torch.nn.Parameter) -> bool:
        """Whether this rank holds ``param``'s gradient as a shard, or is the first of those that do."""
        kind = "expt_" if not getattr(param, "allreduce", True) else ""
        replicated_over = []
        if not getattr(param, "tensor_model_parallel", False):
            replicated_over.append(f"{kind}tp")
        if not hasattr(param, "gtp_remat"):
            replicated_over.append(f"{kind}gtp_remat")
        groups = [getattr(self.pg_collection, name, None) for name in replicated_over]
        return all(group is None or group_rank(group) == 0 for group in groups)

    def step_with_ready_grads(self) -> bool:
        (self.step_graph or self.optimizer).step()
        self.copy_main_params_to_model_params()
        self._drop_grads()
        return True

    def copy_main_params_to_model_params(self) -> None:
        """Casts masters into the parameters that the model reads, unless their bucket stages them."""
        plain: list[MainParam] = []
        quantized: list[MainParam] = []
        for record in self.main_params:
            if record.is_master:
                (quantized if is_float8tensor(record.model_param) else plain).append(record)
        if plain:
            cast_many(
                [record.model_view() for record in plain], [record.main_param for record in plain]
            )
            forget_quantized_weights(record.model_param for record in plain)
        if quantized and not self.quantized_params_are_staged:
            # In the precision in which values travel elsewhere, so that all ways give the same bytes.
            copy_tensors_to_quantized_params(
                [record.model_param for record in quantized],
                [record.main_param.to(record.model_param.dtype) for record in quantized],
            )

    def reload_model_params(self, state_dict: Any = None) -> None:
        for record in self.main_params:
            if record.is_master:
                model = record.model_param
                if is_float8tensor(model):
                    value = model.dequantize(dtype=torch.float32)  # type: ignore[call-arg]
                    record.main_param.copy_(
                        value.view(-1)[record.start : record.end].view_as(record.main_param)
                    )
                else:
                    record.main_param.copy_(record.model_view())

    def own_state(self) -> dict[str, Any]:
        """This optimizer's part of :meth:`state_dict`."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "main_params": [record.main_param.detach() for record in self.main_params],
            "grad_scaler": None if self.scaler is None else self.scaler.state_dict(),
        }

    @torch.no_grad()
    def load_own_state(self, state: dict[str, Any]) -> None:
        """The other way round."""
        saved = state["main_params"]
        shapes = [tuple(record.main_param.shape) for record in self.main_params]
        if [tuple(value.shape) for value in saved] != shapes:
            raise ValueError(
                "the state is of main parameters of other shapes; load it with the model, ranks and "
                "flags it was saved with"
            )
        for record, value in zip(self.main_params, saved, strict=True):
            record.main_param.copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        if self.step_graph is not None:
            # Recorded over state that is somewhere else now.
            self.step_graph = StepGraph(self.optimizer)
        if self.scaler is not None:
            self.scaler.load_state_dict(state["grad_scaler"])
        self.copy_main_params_to_model_params()


class Float16OptimizerWithFloat16Params(MainParamOptimizer):
    """Updates FP32 masters of whole low-precision parameters.

    A master of a quantised parameter starts at the values that the parameter was quantised from,
    where it kept them, so a run starts alike whether weights are stored quantised or not (law L7).

    Args:
        optimizer: Over model parameters.
        config: Options.
        grad_scaler: Loss scale, if any.
        init_state_fn: See :class:`MainParamOptimizer`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: OptimizerConfig,
        grad_scaler: MegatronGradScaler | None = None,
        init_state_fn: Callable[..., None] | None = None,
    ) -> None:
        super().__init__(optimizer, config, grad_scaler, init_state_fn, make_main_param)


class FP32Optimizer(MainParamOptimizer):
    """Updates FP32 parameters in place.

    Raises:
        ValueError: If a parameter is not FP32.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: OptimizerConfig,
        init_state_fn: Callable[..., None] | None = None,
    ) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.dtype != torch.float32:
                    raise ValueError(
                        f"FP32Optimizer got a parameter of {param.dtype}; set bf16 or fp16 in "
                        "OptimizerConfig for a model of that precision"
                    )
        super().__init__(optimizer, config, None, init_state_fn, make_main_param)


class ChainedOptimizer(MegatronOptimizer):
    """Several optimizers that step as one: one gradient norm, one decision to skip.

    Raises:
        ValueError: If there is none.
    """

    def __init__(self, chained_optimizers: Sequence[MegatronOptimizer]) -> None:
        if not chained_optimizers:
            raise ValueError("a chain needs at least one optimizer")
        super().__init__(chained_optimizers[0].config)
        self.chained_optimizers = list(chained_optimizers)

    def leaves(self) -> list[MainParamOptimizer]:
        return [leaf for optimizer in self.chained_optimizers for leaf in optimizer.leaves()]

    def step_with_ready_grads(self) -> bool:
        return all([optimizer.step_with_ready_grads() for optimizer in self.chained_optimizers])
