"""Parameters that Transformer Engine quantised: recognised, and written through their own quantizer.

Only its public interface is used: the class ``MXFP8Tensor``, its ``_quantizer``, and
``update_quantized(source, destination)``. Transformer Engine need not be installed.
"""

from __future__ import annotations

import sys

import torch

# Where Transformer Engine has kept the class, newest first.
_MODULES = (
    "transformer_engine.pytorch.tensor.mxfp8_tensor",
    "transformer_engine.pytorch",
)


def _te_class() -> type | None:
    # A parameter can only be one of its tensors if the module has been imported by then.
    for name in _MODULES:
        candidate = getattr(sys.modules.get(name), "MXFP8Tensor", None)
        if candidate is not None:
            return candidate
    return None


def is_te_mxfp8tensor(tensor: torch.Tensor) -> bool:
    """Whether Transformer Engine holds this tensor in MXFP8."""
    te_class = _te_class()
    return te_class is not None and isinstance(tensor, te_class)


def write_te_tensor(source: torch.Tensor, destination: torch.Tensor) -> None:
    """Quantises ``source`` into ``destination`` with the quantizer that made it.

    Raises:
        TypeError: If it does not know its quantizer.
    """
    quantizer = getattr(destination, "_quantizer", None)
    if quantizer is None:
        raise TypeError(
            f"a {type(destination).__name__} without a quantizer cannot be written; build it under "
            "Transformer Engine's quantized_model_init"
        )
    quantizer.update_quantized(source, destination)
