"""The base class of model parts, and the wrapper that casts a model."""

from __future__ import annotations

from typing import Any

import torch


class MegatronModule(torch.nn.Module):
    """A module with the model's options.

    Args:
        config: Kept as :attr:`config`.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> Any:
        """Megatron's name for :meth:`state_dict`."""
        return self.state_dict(prefix=prefix, keep_vars=keep_vars)


class Float16Module(MegatronModule):
    """A model cast to FP16 or BF16 whose outputs are FP32.

    Args:
        config: Says which: ``fp16`` or ``bf16``.
        module: The model; it is cast in place.
    """

    def __init__(self, config: Any, module: torch.nn.Module) -> None:
        super().__init__(config)
        if not (config.fp16 or config.bf16):
            raise ValueError("Float16Module needs config.fp16 or config.bf16")
        self.dtype = torch.float16 if config.fp16 else torch.bfloat16
        self.module = module.to(self.dtype)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Casts floating inputs, runs the model, returns floating outputs in FP32."""

        def cast(value: Any, dtype: torch.dtype) -> Any:
            floating = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.to(dtype) if floating else value

        inputs = tuple(cast(value, self.dtype) for value in inputs)
        kwargs = {name: cast(value, self.dtype) for name, value in kwargs.items()}
        return cast(self.module(*inputs, **kwargs), torch.float32)
