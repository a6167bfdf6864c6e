"""Small helpers without a home of their own, under the names that Megatron gives them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import nn


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raises ``ValueError`` unless ``numerator`` is a multiple of ``denominator``."""
    if numerator % denominator != 0:
        raise ValueError(f"{numerator} is not divisible by {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """Returns the exact quotient; raises ``ValueError`` where there would be a remainder."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def round_up_to_nearest_multiple(value: int, multiple: int) -> int:
    """Returns the smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def get_pg_size(group: dist.ProcessGroup | None = None) -> int:
    """Returns the number of ranks in ``group``; 1 for no group and outside a distributed run."""
    if group is None or not dist.is_initialized():
        return 1
    return group.size()


def get_pg_rank(group: dist.ProcessGroup | None = None) -> int:
    """Returns this rank's place in ``group``; 0 for no group and outside a distributed run."""
    if group is None or not dist.is_initialized():
        return 0
    return group.rank()


def get_pg_src_rank(group: dist.ProcessGroup | None = None) -> int:
    """Returns the global rank of the first member of ``group``."""
    if group is None or not dist.is_initialized():
        return 0
    return dist.get_process_group_ranks(group)[0]


def _version_numbers(version: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version, without pre-release and local parts."""
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    if numbers is None:
        raise ValueError(f"{version!r} does not start with a version number")
    return tuple(int(number) for number in numbers.group().split("."))


def get_torch_version() -> tuple[int, ...]:
    """Returns torch's version as numbers, such as ``(2, 13, 0)``."""
    return _version_numbers(torch.__version__)


def is_torch_min_version(version: str, check_equality: bool = True) -> bool:
    """Tells whether torch is newer than ``version``, or equal to it if ``check_equality``."""
    found, wanted = get_torch_version(), _version_numbers(version)
    return found >= wanted if check_equality else found > wanted


@overload
def unwrap_model(
    model: list[nn.Module], module_instances: tuple[type[nn.Module], ...] | None = None
) -> list[nn.Module]: ...
@overload
def unwrap_model(
    model: nn.Module, module_instances: tuple[type[nn.Module], ...] | None = None
) -> nn.Module: ...
def unwrap_model(
    model: nn.Module | list[nn.Module],
    module_instances: tuple[type[nn.Module], ...] | None = None,
) -> nn.Module | list[nn.Module]:
    """Takes the wrappers off a model, or off each of a list of model chunks.

    Args:
        model: A module, or a list of them.
        module_instances: The wrapper classes to take off; by default, every module that says it is
            one by having ``module`` and ``ddp_config``.
    """
    if isinstance(model, list):
        return [unwrap_model(chunk, module_instances) for chunk in model]

    def wraps(candidate: nn.Module) -> bool:
        if module_instances is not None:
            return isinstance(candidate, module_instances)
        return hasattr(candidate, "ddp_config") and hasattr(candidate, "module")

    inner: Any = model
    while wraps(inner):
        inner = inner.module
    return inner


def get_attr_wrapped_model(
    model: nn.Module, attr: str, allow_none: bool = True, return_model_obj: bool = False
) -> Any:
    """Finds ``attr`` on a model or on the first module inside its wrappers that has it.

    Args:
        model: The outermost module.
        attr: Name of the attribute.
        allow_none: Whether a value of None counts as found.
        return_model_obj: Return the module that has the attribute instead of its value.

    Raises:
        RuntimeError: If ``model`` is a list, or no module inside the wrappers has the attribute.
    """
    if isinstance(model, list):
        raise RuntimeError("get_attr_wrapped_model takes one model chunk, got a list of them")
    candidate: nn.Module | None = model
    while candidate is not None:
        if hasattr(candidate, attr) and (allow_none or getattr(candidate, attr) is not None):
            return candidate if return_model_obj else getattr(candidate, attr)
        candidate = getattr(candidate, "module", None)
    raise RuntimeError(f"neither {type(model).__name__} nor a module it wraps has {attr!r}")


def get_model_config(model: nn.Module) -> Any:
    """Returns the ``TransformerConfig`` (or ``ModelParallelConfig``) a model was built with."""
    return get_attr_wrapped_model(model, "config", allow_none=False)


def named_parameters_of_chunks(model_chunks: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Returns the parameters of unwrapped model chunks by name.

    Names of several chunks are told apart by a ``model0.``, ``model1.``, ... prefix; a single
    chunk, which is what there is without pipeline parallelism, gets none.
    """
    named: dict[str, nn.Parameter] = {}
    for index, chunk in enumerate(model_chunks):
        prefix = f"model{index}." if len(model_chunks) > 1 else ""
        for name, parameter in unwrap_model(chunk).named_parameters():
            named[prefix + name] = parameter
    return named
