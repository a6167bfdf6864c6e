"""What the Triton kernels need around them. Triton is an optional extra."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


@cache
def has_triton() -> bool:
    """Whether it is installed.

    Looks once, without importing it: that takes a while, and nothing on a CPU needs it.
    """
    return find_spec("triton") is not None


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host, on ``device``; the host does not wait for the copy."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
