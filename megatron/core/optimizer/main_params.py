"""The values that optimizers update, and their ties to the parameters that the model reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.core.fp8_utils import is_float8tensor, pop_high_precision_init_val

# What an update rule may ask of a parameter; the rest (gradients, buffers, masters) is not its matter.
_UPDATE_RULE_ATTRIBUTES = (
    "allreduce",
    "expert_tp",
    "gtp_remat",
    "is_embedding_or_output_parameter",
    "is_qkv",
    "partition_dim",
    "partition_stride",
    "qkv_split_shapes",
    "shared_embedding",
    "tensor_model_parallel",
)


@dataclass(frozen=True)
class MainParam:
    """What this rank updates of one model parameter.

    Attributes:
        model_param: The parameter that the model reads.
        main_param: What the optimizer updates: an FP32 master, or a view of an FP32 parameter.
        start, end: Range of it in the flattened model parameter.
    """

    model_param: torch.nn.Parameter
    main_param: torch.Tensor
    start: int
    end: int

    @property
    def is_master(self) -> bool:
        """Whether it is a copy, whose value has to reach the model parameter after a step."""
        return self.model_param.dtype != torch.float32 or is_float8tensor(self.model_param)

    def model_view(self) -> torch.Tensor:
        """The same range of the model parameter."""
        return self._view(self.model_param.data)

    def grad_view(self) -> torch.Tensor | None:
        """The same range of the accumulated gradient; ``None`` if there is none."""
        grad = getattr(self.model_param, "main_grad", None)
        if grad is None:
            grad = self.model_param.grad
        return None if grad is None else self._view(grad)

    def without_padding(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of a tensor of the main parameter's shape the elements that are elements of a matrix."""
        gtp = getattr(self.model_param, "gtp_remat", None)
        if gtp is None or self.end <= gtp.valid_numel:
            return tensor
        return tensor.view(-1)[: max(gtp.valid_numel - self.start, 0)]

    def _view(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape == self.main_param.shape:
            return tensor
        return tensor.view(-1)[self.start : self.end]


def seed_value(param: torch.nn.Parameter) -> torch.Tensor:
    """FP32 values to start a master from: those that a quantised parameter was made of, if it kept them.

    A quantised parameter gives up what it kept.
    """
    initial = pop_high_precision_init_val(param)
    if initial is not None:
        return initial.detach().to(param.device, torch.float32)
    if is_float8tensor(param):
        return param.dequantize(dtype=torch.float32)  # type: ignore[call-arg]
    return param.detach().float()


def make_main_param(param: torch.nn.Parameter, start: int = 0, end: int | None = None) -> MainParam:
    """What this rank updates of ``param``: all of it, or the range ``start`` to ``end``.

    The master gets the attributes that update rules read, and is reachable as ``param.main_param``.
    """
    end = param.numel() if end is None else end
    whole = end - start == param.numel()
    if param.dtype == torch.float32 and not is_float8tensor(param):
        main = param if whole else param.detach().view(-1)[start:end]
        return MainParam(param, main, start, end)
    value = seed_value(param)
    if not whole:
        value = value.reshape(-1)[start:end]
    # A copy even where the value is FP32 already: masters outlive what they were made from.
    main = value.detach().clone(memory_format=torch.contiguous_format)
    for name in _UPDATE_RULE_ATTRIBUTES:
        if hasattr(param, name):
            setattr(main, name, getattr(param, name))
    param.main_param = main  # type: ignore[attr-defined]
    param.main_param_sharded = not whole  # type: ignore[attr-defined]
    return MainParam(param, main, start, end)
