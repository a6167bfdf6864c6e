"""Muon: momentum, orthogonalised matrix by matrix.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; names and options as in
NVIDIA's Megatron-LM and Emerging-Optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch.optim.optimizer import ParamsT

from megatron.core.optimizer.cuda_support import has_kernels
from megatron.core.optimizer.muon_parts import PartRows, PartShape
from megatron.core.optimizer.newton_schulz import (
    check_precision,
    get_coefficients,
    get_muon_scale_factor,
    newton_schulz,
)
from megatron.core.optimizer.sharded_matrix import ShardedMatrix, sharded_matrix_of
from megatron.core.optimizer.sharded_muon import (
    MatrixPart,
    Update,
    blockwise,
    distributed,
    duplicated,
    layer_sharded,
)
from megatron.core.process_groups_config import ProcessGroupCollection

if TYPE_CHECKING:
    from megatron.core.optimizer.muon_cuda import MuonOnCuda

TPMode = Literal["blockwise", "duplicated", "distributed", "layer_sharded"]


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
        tp_mode: How a matrix that is cut is orthogonalised: see
            :mod:`megatron.core.optimizer.sharded_muon`.
        split_qkv_per_head: With ``split_qkv``, every head of a fused weight is a matrix of its own.

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
        split_qkv_per_head: bool = False,
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
        self.split_qkv_per_head = split_qkv_per_head
        self._matrices: dict[torch.Tensor, ShardedMatrix | None] = {}
        self._on_cuda: MuonOnCuda | None = None
        self._tiles_fit: dict[torch.Tensor, bool] = {}
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

    def check_graph_capture(self) -> None:
        """Raises :class:`ValueError` if a step over these parameters cannot be a CUDA graph."""
        for group in self.param_groups:
            for param in group["params"]:
                if self._matrix_of(param) is not None or not self._fits_cuda(group, param):
                    raise ValueError(
                        "a CUDA graph of Muon's step needs whole FP32 matrices on a GPU of compute "
                        "capability 9 or more with Triton, rows and columns in multiples of 8, "
                        "fp32_matmul_prec='medium' and decoupled weight decay; one of shape "
                        f"{tuple(param.shape)} is not so: set optimizer_cuda_graph=False"
                    )

    def _step_group(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        # First, so that a matrix that is refused leaves all as they are.
        matrices = {param: self._matrix_of(param) for param in params}
        fused = [p for p in params if matrices[p] is None and self._fits_cuda(group, p)]
        taken = set(fused)
        others = [param for param in params if param not in taken]
        parts = [
            self._parts_of(param, tuple(param.shape) if matrix is None else matrix.shape)
            for param in others
            for matrix in (matrices[param],)
        ]
        if fused:
            self._step_on_cuda(group, fused)
        if others:
            self._step_by_operations(group, others, matrices, parts)

    def _step_by_operations(
        self,
        group: dict[str, Any],
        params: list[torch.Tensor],
        matrices: dict[torch.Tensor, ShardedMatrix | None],
        parts: list[list[PartRows]],
    ) -> None:
        grads = [param.grad for param in params if param.grad is not None]
        lr, decay, momentum = group["lr"], group["weight_decay"], group["momentum"]
        if decay and not self.use_decoupled_weight_decay:
            grads = list(torch._foreach_add(grads, params, alpha=decay))
        buffers = [self._momentum_buffer(param) for param in params]
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        updates = torch._foreach_lerp(grads, buffers, momentum) if group["nesterov"] else buffers
        if decay and self.use_decoupled_weight_decay:
            torch._foreach_mul_(params, 1 - lr * decay)
        cut: list[tuple[torch.Tensor, list[PartRows], Update]] = []
        for param, rows_of, update in zip(params, parts, updates, strict=True):
            matrix = matrices[param]
            if matrix is not None:
                cut.append((param, rows_of, Update(matrix, update)))
                continue
            for rows, orthogonal, scale in self._orthogonal_parts(rows_of, update):
                param.view(rows.view_shape)[rows.index].add_(orthogonal, alpha=-lr * scale)
        for param, result in self._sharded_updates(cut):
            param.add_(result, alpha=-lr)

    def _fits_cuda(self, group: dict[str, Any], param: torch.Tensor) -> bool:
        """Whether the fused step on CUDA, which iterates in 16 bits, is what is asked for."""
        grad = param.grad if param.grad is not None else param
        return (
            self.fp32_matmul_prec == "medium"
            and (self.use_decoupled_weight_decay or not group["weight_decay"])
            and has_kernels(param.device)
            and param.dtype == torch.float32
            and grad.dtype == torch.float32
            and param.is_contiguous()
            and grad.is_contiguous()
            and self._fits_tiles(param)
        )

    def _fits_tiles(self, param: torch.Tensor) -> bool:
        if param not in self._tiles_fit:
            shapes = self._part_shapes(0, param)
            self._tiles_fit[param] = all(shape.fits_tiles for shape in shapes)
        return self._tiles_fit[param]

    def _step_on_cuda(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        # Here, because it needs Triton.
        from megatron.core.optimizer.muon_cuda import MuonOnCuda

        def shapes() -> list[PartShape]:
            return [
                s for number, param in enumerate(params) for s in self._part_shapes(number, param)
            ]

        if self._on_cuda is None:
            self._on_cuda = MuonOnCuda(get_coefficients(self.coefficient_type, self.num_ns_steps))
        self._on_cuda.step(
            shapes,
            [param.grad for param in params if param.grad is not None],
            [self._momentum_buffer(param) for param in params],
            params,
            group["momentum"],
            group["nesterov"],
            group["lr"],
            group["weight_decay"],
        )

    def _part_shapes(self, number: int, param: torch.Tensor) -> list[PartShape]:
        """The matrices of a whole parameter, which is the one of this ``number``."""
        shape = (param.size(0), param.size(1))
        return [
            part
            for rows in self._parts_of(param, shape)
            for part in rows.shapes(number, *shape, self._factor)
        ]

    def _sharded_updates(
        self, cut: list[tuple[torch.Tensor, list[PartRows], Update]]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters and the FP32 updates of their shards, scaled."""
        updates = [update for _, _, update in cut]

        def whole(full: torch.Tensor, number: int) -> torch.Tensor:
            return self._orthogonalized(full, cut[number][1])

        if self.tp_mode in ("duplicated", "layer_sharded"):
            deal = duplicated if self.tp_mode == "duplicated" else layer_sharded
            for number, result in deal(updates, whole):
                yield cut[number][0], result
            return
        for param, rows_of, update in cut:
            shape = update.matrix.shape
            parts = [
                part for rows in rows_of for part in self._matrix_parts(rows, shape, param.device)
            ]
            if self.tp_mode == "blockwise":
                yield param, blockwise(update, parts, self._newton_schulz)
            else:
                coefficients = get_coefficients(self.coefficient_type, self.num_ns_steps)
                yield param, distributed(update, parts, coefficients, self.fp32_matmul_prec)

    def _matrix_parts(
        self, rows: PartRows, shape: tuple[int, int], device: torch.device
    ) -> list[MatrixPart]:
        """The matrices of ``rows``, one or as many as there are heads, by their rows."""
        numbers = torch.arange(shape[0], device=device).view(rows.view_shape[:-1])[rows.index]
        matrices = list(numbers) if rows.is_batch else [numbers.reshape(-1)]
        return [MatrixPart(m, self._factor(m.numel(), shape[1])) for m in matrices]

    def _momentum_buffer(self, param: torch.Tensor) -> torch.Tensor:
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(
                param, memory_format=torch.contiguous_format
            )
        return state["momentum_buffer"]

    def orthogonalize(self, p: torch.Tensor, grad: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """The update that ``grad``, a momentum of ``p``'s shape, gives: orthogonalised and scaled, FP32."""
        matrix = self._matrix_of(p)
        if matrix is None:
            return self._orthogonalized(grad, self._parts_of(p, tuple(p.shape)))
        cut = [(p, self._parts_of(p, matrix.shape), Update(matrix, grad.float()))]
        return next(self._sharded_updates(cut))[1]

    def _orthogonalized(self, matrix: torch.Tensor, parts: list[PartRows]) -> torch.Tensor:
        result = torch.empty_like(matrix, dtype=torch.float32)
        for rows, orthogonal, scale in self._orthogonal_parts(parts, matrix):
            result.view(rows.view_shape)[rows.index] = orthogonal.float() * scale
        return result

    def _orthogonal_parts(
        self, parts: list[PartRows], update: torch.Tensor
    ) -> Iterator[tuple[PartRows, torch.Tensor, float]]:
        """The matrices that ``update`` consists of, each orthogonalised, with its rows and its factor."""
        for rows in parts:
            part = update.view(rows.view_shape)[rows.index]
            matrix = part if rows.is_batch else part.reshape(-1, update.size(-1))
            orthogonal = self._newton_schulz(matrix)
            yield (
                rows,
                orthogonal.reshape(part.shape),
                self._factor(matrix.size(-2), matrix.size(-1)),
            )

    def _newton_schulz(self, matrix: torch.Tensor) -> torch.Tensor:
        return newton_schulz(
            matrix, self.num_ns_steps, self.coefficient_type, self.fp32_matmul_prec
        )

    def _factor(self, rows: int, columns: int) -> float:
        return get_muon_scale_factor(rows, columns, self.scale_mode) * self.extra_scale_factor

    def _matrix_of(self, param: torch.Tensor) -> ShardedMatrix | None:
        if param not in self._matrices:
            self._matrices[param] = sharded_matrix_of(param, self.pg_collection)
        return self._matrices[param]

    def _parts_of(self, param: torch.Tensor, shape: tuple[int, ...]) -> list[PartRows]:
        """The rows of the whole matrix that are orthogonalised together."""
        rows, columns = shape
        if not (self.split_qkv and self.is_qkv_fn(param)):
            return [PartRows((rows, columns), slice(None))]
        shapes = getattr(param, "qkv_split_shapes", None) or self.qkv_split_shapes
        if shapes is None:
            raise RuntimeError(
                "a fused query-key-value weight cannot be split: neither it nor the optimizer says "
                "qkv_split_shapes; set them, or split_qkv=False"
            )
        if rows % sum(shapes):
            raise RuntimeError(
                f"a fused query-key-value weight of {rows} rows does not divide into query "
                f"groups of {sum(shapes)} rows (qkv_split_shapes={list(shapes)})"
            )
        if self.split_qkv_per_head:
            head = math.gcd(*shapes)
            if head != shapes[-1]:
                raise RuntimeError(
                    f"a fused query-key-value weight with qkv_split_shapes={list(shapes)} is not made "
                    "of heads of one size; set split_qkv_per_head=False"
                )
            return [PartRows((rows // head, head, columns), slice(None), is_batch=True)]
        view_shape = (rows // sum(shapes), sum(shapes), columns)
        starts = [sum(shapes[:i]) for i in range(len(shapes))]
        return [
            PartRows(view_shape, (slice(None), slice(start, start + count)))
            for start, count in zip(starts, shapes, strict=True)
        ]
