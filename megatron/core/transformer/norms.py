"""Norms over the last dimension; statistics are FP32 whatever the input."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


class LayerNorm(torch.nn.Module):
    """Zero mean, unit variance, then weight and bias."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.shape, self.eps = (config.hidden_size,), config.layernorm_epsilon
        self.weight = _vector(config, 1.0)
        self.bias = _vector(config, 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., h]`` to the same."""
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)


class RMSNorm(torch.nn.Module):
    """Unit mean square, then weight."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.shape, self.eps = (config.hidden_size,), config.layernorm_epsilon
        self.weight = _vector(config, 1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., h]`` to the same."""
        return F.rms_norm(x, self.shape, self.weight, self.eps)


def _vector(config: Any, value: float) -> torch.nn.Parameter:
    vector = torch.nn.Parameter(torch.full((config.hidden_size,), value, dtype=config.params_dtype))
    vector.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return vector


def make_norm(config: Any) -> torch.nn.Module:
    """The norm that the options ask for."""
    return RMSNorm(config) if config.normalization == "RMSNorm" else LayerNorm(config)
