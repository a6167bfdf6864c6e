"""Rotary position embedding (Su et al., arXiv 2104.09864), halves rotated as in Llama and Megatron."""

from __future__ import annotations

import torch


class RotaryEmbedding(torch.nn.Module):
    """Angles of every position.

    Args:
        kv_channels: Features of a head.
        rotary_percent: Share of them that is rotated.
        rotary_base: Base of the wavelengths.
    """

    def __init__(
        self, kv_channels: int, rotary_percent: float = 1.0, rotary_base: float = 10000.0
    ) -> None:
        super().__init__()
        self.dim = int(kv_channels * rotary_percent) // 2 * 2
        self.base = rotary_base

    def forward(self, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, FP32, ``[length, 1, 1, rotated features]``."""
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32, device=device) / self.dim
        positions = torch.arange(length, dtype=torch.float32, device=device)
        angles = torch.outer(positions, self.base**-exponents)
        angles = torch.cat([angles, angles], dim=-1)[:, None, None, :]
        return angles.cos(), angles.sin()


def apply_rotary(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotates the first features of every head of ``[s, b, heads, features]``, in FP32."""
    cos, sin = rotation
    rotated, rest = x[..., : cos.size(-1)].float(), x[..., cos.size(-1) :]
    first, second = rotated.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    result = (rotated * cos + turned * sin).to(x.dtype)
    return torch.cat([result, rest], dim=-1) if rest.size(-1) else result
