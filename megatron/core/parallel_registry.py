"""The process groups that exist in this process: the state behind ``parallel_state``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron.core.parallel_mesh import ParallelSizes


@dataclass(frozen=True)
class Registry:
    """Groups by name, and the world that they are groups of."""

    sizes: ParallelSizes
    groups: dict[str, dist.ProcessGroup]
    gloo_groups: dict[str, dist.ProcessGroup]
    world: dist.ProcessGroup | None


_registry: Registry | None = None


def current() -> Registry | None:
    """The registry, unless the world that its groups belong to is gone."""
    if _registry is None or not dist.is_initialized() or dist.group.WORLD is not _registry.world:
        return None
    return _registry


def replace(registry: Registry | None) -> Registry | None:
    """Sets the registry and returns the one that was there, if its world still is."""
    global _registry
    before = current()
    _registry = registry
    return before


def group(name: str, check_initialized: bool = True) -> Any:
    """The group of that name; without groups ``None``, or an error with ``check_initialized``."""
    registry = current()
    if registry is not None:
        return registry.groups[name]
    if check_initialized:
        raise RuntimeError(
            f"the {name} process group does not exist yet; call "
            "parallel_state.initialize_model_parallel() first"
        )
    return None


def size(name: str) -> int:
    """Number of ranks in the group of that name; 0 outside a distributed run."""
    return group(name).size() if dist.is_initialized() else 0


def rank(name: str) -> int:
    """This rank's place in the group of that name; 0 outside a distributed run."""
    return group(name).rank() if dist.is_initialized() else 0


def gloo_group(name: str) -> dist.ProcessGroup:
    """The gloo twin of the group of that name."""
    registry = current()
    if registry is None or name not in registry.gloo_groups:
        raise RuntimeError(
            f"there is no gloo twin of the {name} process group; call "
            "initialize_model_parallel(create_gloo_process_groups=True)"
        )
    return registry.gloo_groups[name]
