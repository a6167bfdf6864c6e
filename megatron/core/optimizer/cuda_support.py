"""Where the Triton kernels of this folder run."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

# Triton's own switch: kernels run on CPU tensors, slowly, for tests.
_INTERPRETED = "TRITON_INTERPRET"


def has_kernels(tensor: torch.Tensor) -> bool:
    """Whether kernels can take ``tensor``: Triton is there, and a GPU of compute capability 8 or more."""
    if find_spec("triton") is None:
        return False
    if tensor.is_cuda:
        return torch.cuda.get_device_capability(tensor.device)[0] >= 8
    return os.environ.get(_INTERPRETED) == "1"
