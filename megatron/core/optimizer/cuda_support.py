"""Where the Triton kernels of this folder run."""

from __future__ import annotations

import os
from functools import lru_cache

import torch

from megatron.core.triton_support import has_triton

# Triton's own switch: kernels run on CPU tensors, slowly, for tests.
_INTERPRETED = "TRITON_INTERPRET"


@lru_cache
def has_kernels(device: torch.device) -> bool:
    """Whether kernels can take tensors of ``device``: Triton is there, and a GPU with a copy engine
    for tiles (compute capability 9 or more)."""
    if not has_triton():
        return False
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= 9
    return os.environ.get(_INTERPRETED) == "1"
