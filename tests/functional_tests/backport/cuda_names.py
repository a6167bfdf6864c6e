"""Lets code written for CUDA run on CPU tensors, in a process of its own.

Megatron-core names CUDA in four ways: it passes ``device='cuda'`` or the current device, it asks
a tensor for its type string, it waits on streams and events, and it imports Triton. Each gets a
stand-in here. Installing them changes ``torch`` for the whole process, so only the processes of
the proof do it.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


class _CudaMeansCpu(TorchFunctionMode):
    """Sends ``device='cuda'`` to the CPU, and calls a CPU tensor's type what CUDA would."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = dict(kwargs or {})
        if "device" in keywords and str(keywords["device"]).startswith("cuda"):
            keywords["device"] = _CPU
        result = func(*args, **keywords)
        if func is torch.Tensor.type and len(args) == 1 and not keywords:
            return result.replace("torch.", "torch.cuda.", 1)
        return result


class _Nothing:
    """A stream or event that has nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *args: Any) -> None:
        pass

    def wait_stream(self, *args: Any) -> None:
        pass

    def wait_event(self, *args: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass


def _uneven_all_gather(
    outputs: list[torch.Tensor], source: torch.Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """``all_gather`` of slots of different sizes, which gloo lacks, as one broadcast per slot."""
    me = dist.get_rank(group)
    outputs[me].copy_(source)
    works = [
        dist.broadcast(slot, dist.get_global_rank(group, index), group=group, async_op=async_op)
        for index, slot in enumerate(outputs)
        if slot.numel()
    ]
    return _InOrder(works) if async_op else None


class _InOrder:
    """Work that ends after all work before it, as NCCL's does: Megatron waits for the last of several."""

    _under_way: ClassVar[list[Any]] = []

    def __init__(self, works: list[Any]) -> None:
        self._under_way += works
        self._last = works[-1] if works else None

    def wait(self) -> None:
        while self._last in self._under_way:
            self._under_way.pop(0).wait()


def install_module(name: str, **members: Any) -> types.ModuleType:
    """Registers a module of the given members, as if it had been imported."""
    module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, loader=None)
    module.__path__ = []  # type: ignore[attr-defined]
    module.__dict__.update(members)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    return module


def _as_it_is(*args: Any, **kwargs: Any) -> Any:
    """A decorator, with or without arguments, that leaves the function alone."""
    if len(args) == 1 and not kwargs and callable(args[0]):
        return args[0]
    return lambda function: function


def _type_named(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


@contextlib.contextmanager
def triton_names() -> Iterator[None]:
    """While a release is imported: a Triton whose kernels can be declared, not launched.

    It goes again afterwards, because PyTorch too looks whether Triton is there, and would use it.
    """
    install_module(
        "triton",
        jit=_as_it_is,
        autotune=_as_it_is,
        heuristics=_as_it_is,
        Config=lambda *a, **k: None,
        __version__="3.0.0",  # old enough that fused kernels are not offered
    )
    language = install_module("triton.language")
    language.__getattr__ = _type_named  # type: ignore[method-assign]
    try:
        yield
    finally:
        del sys.modules["triton"], sys.modules["triton.language"]


def install() -> None:
    """Makes CUDA names work on CPU tensors, for the rest of this process."""
    torch.Tensor.cuda = lambda self, *a, **k: self  # type: ignore[method-assign, assignment]
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment, return-value]
    torch.cuda.current_stream = lambda *a, **k: _Nothing()  # type: ignore[assignment, return-value]
    torch.cuda.stream = lambda *a, **k: _Nothing()  # type: ignore[assignment, return-value]
    torch.cuda.Stream = torch.cuda.Event = _Nothing  # type: ignore[misc, assignment]
    torch.cuda.synchronize = lambda *a, **k: None
    torch.compile = _as_it_is  # type: ignore[assignment]  # importing the compiler takes seconds
    torch.distributed.all_gather = _uneven_all_gather  # type: ignore[assignment]
    _CudaMeansCpu().__enter__()
