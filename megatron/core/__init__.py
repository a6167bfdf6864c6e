"""The optimizer subsystem of Megatron-LM, written anew, under Megatron's own module paths.

Importing this package imports none of its parts: ``parallel_state`` and the layout arithmetic must
stay usable without the rest. The few names that code written for Megatron expects to find here are
looked up when they are first asked for.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any

__version__ = "0.1.0"

_FOREIGN_DISTRIBUTION = "megatron-core"

_LAZY_NAMES = {
    "mpu": ("megatron.core.parallel_state", None),
    "parallel_state": ("megatron.core.parallel_state", None),
    "tensor_parallel": ("megatron.core.tensor_parallel", None),
    "utils": ("megatron.core.utils", None),
    "DistributedDataParallel": ("megatron.core.distributed", "DistributedDataParallel"),
    "ModelParallelConfig": ("megatron.core.model_parallel_config", "ModelParallelConfig"),
}

__all__ = ["__version__", *_LAZY_NAMES]


def _refuse_foreign_distribution() -> None:
    """Raises if NVIDIA's distribution is installed too.

    Both provide ``megatron.core``, so which modules Python finds would depend on the order of
    ``sys.path``, and a program could run on half of each.
    """
    try:
        found = metadata.distribution(_FOREIGN_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return
    raise ImportError(
        f"megatron-layerwise and {_FOREIGN_DISTRIBUTION} {found.version} are both installed and "
        "both provide the package megatron.core; uninstall one of them "
        f"(pip uninstall {_FOREIGN_DISTRIBUTION}), or use a virtual environment for each"
    )


_refuse_foreign_distribution()


def __getattr__(name: str) -> Any:
    if name not in _LAZY_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module_name, attribute = _LAZY_NAMES[name]
    module = importlib.import_module(module_name)
    return module if attribute is None else getattr(module, attribute)
