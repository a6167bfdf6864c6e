"""Muon: momentum, orthogonalised matrix by matrix.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; names and options as in
NVIDIA's Megatron-LM and Emerging-Optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import torch
from torch.optim.optimizer import ParamsT

from megatron.core.collectives import group_size
from megatron.core.optimizer.newton_schulz import (
    check_precision,
    get_coefficients,
    get_muon_scale_factor,
    newton_schulz,
)
from megatron.core.process_groups_config import ProcessGroupCollection

TPMode = Literal["blockwise", "duplicated", "distributed"]


class TensorParallelMuon(torch.optim.Optimizer):
    """Muon over FP32 matrices.

    ``buf = lerp(buf, grad, 1 - momentum)``; the update is ``buf``, or with ``nesterov``
    ``lerp(grad, buf, momentum)``, orthogonalised and scaled; weights decay before it is subtracted.
    The result for a matrix does not depend on which others are updated beside it.

    Args:
        params: FP32 matrices, or groups of them.
        lr: Learning rate.
        momentum: Decay of the momentum.
        nesterov: Look ahead.
        weight_decay: Per unit of learning rate if decoupled; added to the gradient if not.
        use_decoupled_weight_decay: Decay weights rather than add to gradients.
        split_qkv: Orthogonalise queries, keys and values of a fused weight apart.
        is_qkv_fn: Whether a parameter is such a weight; its ``is_qkv`` if ``None``.
        qkv_split_shapes: Rows of queries, keys and values in one query group; a parameter's own
            ``qkv_split_shapes`` goes first.
        fp32_matmul_prec: See :func:`~megatron.core.optimizer.newton_schulz.newton_schulz`.
        coefficient_type: Name of a coefficient set.
        num_ns_steps: Newton-Schulz steps.
        scale_mode: See :func:`~megatron.core.optimizer.newton_schulz.get_muon_scale_factor`.
        extra_scale_factor: Times this.
        pg_collection: Process groups that matrices may be cut over.
        tp_mode: What is orthogonalised of a matrix that is: see :data:`TPMode`.

    Raises:
        ValueError: If an option is out of range or a parameter is not a matrix.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 3e-4,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.01,
        use_decoupled_weight_decay: bool = True,
        split_qkv: bool = False,
        is_qkv_fn: Callable[[torch.Tensor], bool] | None = None,
        qkv_split_shapes: list[int] | None = None,
        fp32_matmul_prec: str = "medium",
        coefficient_type: str = "quintic",
        num_ns_steps: int = 5,
        scale_mode: str = "spectral",
        extra_scale_factor: float = 1.0,
        pg_collection: ProcessGroupCollection | None = None,
        tp_mode: str = "duplicated",
    ) -> None:
        if lr < 0:
            raise ValueError(f"lr must be at least 0, got {lr}")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, got {momentum}")
        if weight_decay < 0:
            raise ValueError(f"weight_decay must be at least 0, got {weight_decay}")
        if tp_mode not in get_args(TPMode):
            raise ValueError(
                f"tp_mode must be one of {', '.join(get_args(TPMode))}, got {tp_mode!r}"
            )
        check_precision(fp32_matmul_prec)
        get_coefficients(coefficient_type, num_ns_steps)
        get_muon_scale_factor(1, 1, scale_mode)
        self.use_decoupled_weight_decay = use_decoupled_weight_decay
        self.split_qkv = split_qkv
        self.is_qkv_fn = is_qkv_fn or (lambda param: getattr(param, "is_qkv", False))
        self.qkv_split_shapes = qkv_split_shapes
        self.fp32_matmul_prec = fp32_matmul_prec
        self.coefficient_type = coefficient_type
        self.num_ns_steps = num_ns_steps
        self.scale_mode = scale_mode
        self.extra_scale_factor = extra_scale_factor
        self.pg_collection = pg_collection
        self.tp_mode = tp_mode
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Takes a group in, if all its parameters are matrices."""
        super().add_param_group(param_group)
        for param in param_group["params"]:
            if param.dim() != 2:
                self.param_groups.pop()
                raise ValueError(
                    f"Muon updates matrices, got a parameter of shape {tuple(param.shape)}; give it "
                    "to another optimizer"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self._step_group(group, params)
        return loss

    def _step_group(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        # First, so that a matrix that is refused leaves all as they are.
        parts = [self._parts_of(param) for param in params]
        grads = [param.grad for param in params if param.grad is not None]
        lr, decay, momentum = group["lr"], group["weight_decay"], group["momentum"]
        if decay and not self.use_decoupled_weight_decay:
            grads = list(torch._foreach_add(grads, params, alpha=decay))
        buffers = [self._momentum_buffer(param) for param in params]
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        updates = torch._foreach_lerp(grads, buffers, momentum) if group["nesterov"] else buffers
        if decay and self.use_decoupled_weight_decay:
            torch._foreach_mul_(params, 1 - lr * decay)
        for param, rows_of, update in zip(params, parts, updates, strict=True):
            for rows, orthogonal, scale in self._orthogonal_parts(rows_of, update):
                param.view(rows.view_shape)[rows.index].add_(orthogonal, alpha=-lr * scale)

    def _momentum_buffer(self, param: torch.Tensor) -> torch.Tensor:
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(
                param, memory_format=torch.contiguous_format
            )
        return state["momentum_buffer"]

    def orthogonalize(self, p: torch.Tensor, grad: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """The update that ``grad``, a momentum of ``p``'s shape, gives: orthogonalised and scaled, FP32."""
        result = torch.empty_like(grad, dtype=torch.float32)
        for rows, orthogonal, scale in self._orthogonal_parts(self._parts_of(p), grad):
            result.view(rows.view_shape)[rows.index] = orthogonal.float() * scale
        return result

    def _orthogonal_parts(
        self, parts: list[_Rows], update: torch.Tensor
    ) -> Iterator[tuple[_Rows, torch.Tensor, float]]:
        """The matrices that ``update`` consists of, each orthogonalised, with its rows and its factor."""
        for rows in parts:
            part = update.view(rows.view_shape)[rows.index]
            matrix = part.reshape(-1, update.size(-1))
            orthogonal = newton_schulz(
                matrix, self.num_ns_steps, self.coefficient_type, self.fp32_matmul_prec
            )
            scale = get_muon_scale_factor(matrix.size(0), matrix.size(1), self.scale_mode)
            yield rows, orthogonal.reshape(part.shape), scale * self.extra_scale_factor

    def _parts_of(self, param: torch.Tensor) -> list[_Rows]:
        """The rows that are orthogonalised together; refuses what cannot be updated rightly."""
        self._check_not_cut(param)
        if not (self.split_qkv and self.is_qkv_fn(param)):
            return [_Rows(tuple(param.shape), slice(None))]
        shapes = getattr(param, "qkv_split_shapes", None) or self.qkv_split_shapes
        if shapes is None:
            raise RuntimeError(
                "a fused query-key-value weight cannot be split: neither it nor the optimizer says "
                "qkv_split_shapes; set them, or split_qkv=False"
            )
        if param.size(0) % sum(shapes):
            raise RuntimeError(
                f"a fused query-key-value weight of {param.size(0)} rows does not divide into query "
                f"groups of {sum(shapes)} rows (qkv_split_shapes={list(shapes)})"
            )
        view_shape = (param.size(0) // sum(shapes), sum(shapes), param.size(1))
        starts = [sum(shapes[:i]) for i in range(len(shapes))]
        return [
            _Rows(view_shape, (slice(None), slice(start, start + rows)))
            for start, rows in zip(starts, shapes, strict=True)
        ]

    def _check_not_cut(self, param: torch.Tensor) -> None:
        if self.tp_mode == "blockwise" or not getattr(param, "tensor_model_parallel", False):
            return
        if group_size(getattr(self.pg_collection, "tp", None)) > 1:
            raise RuntimeError(
                f"tp_mode={self.tp_mode!r} is not available for matrices that are cut over tensor-"
                "parallel ranks; use 'blockwise'"
            )


class _Rows:
    """Rows of a matrix: an index into a view of it."""

    def __init__(self, view_shape: tuple[int, ...], index: Any) -> None:
        self.view_shape = view_shape
        self.index = index
