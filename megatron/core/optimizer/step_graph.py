"""An optimizer's step as a CUDA graph: one launch in place of hundreds."""

from __future__ import annotations

from typing import Any

import torch

from megatron.core.optimizer.muon import TensorParallelMuon

# How often a step must have looked alike before it is recorded: the first makes tables.
_ALIKE = 2


class StepGraph:
    """Takes ``optimizer``'s steps; records the first one that repeats its predecessor, then replays it.

    Learning rates may change between steps. When anything else does that a step depends on (which
    parameters have gradients, where they and the state lie, weight decay), it is taken without a graph
    and recorded anew. Memory that the step works in stays reserved.

    Args:
        optimizer: ``torch.optim.Adam`` or ``AdamW`` with ``capturable=True``, or Muon.

    Raises:
        ValueError: If a step of ``optimizer`` cannot be recorded.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, TensorParallelMuon):
            optimizer.check_graph_capture()
        elif not all(group.get("capturable", False) for group in optimizer.param_groups):
            raise ValueError(
                f"a step of {type(optimizer).__name__} cannot be a CUDA graph; choose adam or muon, or "
                "set optimizer_cuda_graph=False"
            )
        self._optimizer = optimizer
        self._graph: torch.cuda.CUDAGraph | None = None
        self._rates: list[torch.Tensor] = []
        self._seen: tuple[Any, ...] = ()
        self._alike = 0

    @property
    def is_recorded(self) -> bool:
        """Whether the next step, if it is like the last one, is a replay."""
        return self._graph is not None

    def step(self) -> None:
        """One step."""
        groups = self._optimizer.param_groups
        if not any(group["params"] for group in groups):
            return
        rates = [group["lr"] for group in groups]
        self._set_rates(rates)
        seen = _what_a_step_reads(self._optimizer)
        self._alike = self._alike + 1 if seen == self._seen else 1
        if self._alike == 1:
            self._seen, self._graph = seen, None
        if self._graph is not None:
            self._graph.replay()
            return
        try:
            for group, rate in zip(groups, self._rates, strict=True):
                group["lr"] = rate
            if self._alike < _ALIKE:
                self._optimizer.step()
            else:
                graph = torch.cuda.CUDAGraph()
                # Threads that watch over collectives may look at events meanwhile.
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    self._optimizer.step()
                self._graph = graph
                graph.replay()
        finally:
            for group, lr in zip(groups, rates, strict=True):
                group["lr"] = lr

    def _set_rates(self, rates: list[float]) -> None:
        """Brings learning rates to where the kernels read them."""
        if not self._rates:
            device = next(p for g in self._optimizer.param_groups for p in g["params"]).device
            self._rates = list(torch.zeros(len(rates), device=device).unbind(0))
        for tensor, rate in zip(self._rates, rates, strict=True):
            tensor.fill_(rate)


def _what_a_step_reads(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """Everything but learning rates that a recorded step has fixed in itself."""
    options = tuple(
        (name, value)
        for group in optimizer.param_groups
        for name, value in group.items()
        if isinstance(value, (int, float, str, tuple)) and name != "lr"
    )
    tensors = (
        tensor
        for group in optimizer.param_groups
        for param in group["params"]
        if param.grad is not None
        for tensor in (param, param.grad, *optimizer.state.get(param, {}).values())
    )
    places = tuple(tensor.data_ptr() for tensor in tensors if isinstance(tensor, torch.Tensor))
    return options, places
