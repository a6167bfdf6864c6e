"""When weights that are cut over GTP ranks are gathered, and their gradients summed.

A model owns one chain, which all its weights share. It notes in which order a pass over the model asks
for weights, forward, backward and recomputation alike, and in later passes gathers each one while the
one before it is multiplied with. A weight that is asked for out of turn is gathered on the spot.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from megatron.core.collectives import (
    Work,
    WorkList,
    all_gather_into_tensor,
    reduce_scatter_tensor,
)
from megatron.core.quantization import MXFP8Tensor
from megatron.core.tensor_parallel.gtp import GTPWeight, gtp_weight_of

# Parts of one gather begin at multiples of this in its memory.
_PART_BYTES = 256


class Direction(Enum):
    """Which copy of a weight is needed. Only quantised weights have two."""

    FORWARD = "forward"
    DGRAD = "dgrad"


Event = tuple[torch.Tensor, Direction]


@dataclass
class Gathered:
    """A weight put together, rows of padding included.

    Attributes:
        event: The weight and the direction it was gathered for.
        parts: ``[padded rows, columns]`` values, or data and scales of a quantised copy.
        memory: What the parts lie in.
        work: What is still under way.
    """

    event: Event
    parts: list[torch.Tensor]
    memory: torch.Tensor
    work: Work | None

    def wait(self) -> None:
        """Makes the parts readable."""
        if self.work is not None:
            self.work.wait()
            self.work = None


class GatherMemory:
    """Memory of gathered weights: two pieces in turn, so that neighbours never share one.

    Attributes:
        peak_bytes: The most that was held at once.
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._used = 0
        self._used_bytes = 0
        self.peak_bytes = 0

    def take(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """At least ``nbytes`` bytes."""
        fitting = [m for m in self._free if m.numel() >= nbytes and m.device == device]
        if fitting:
            memory = min(fitting, key=torch.Tensor.numel)
            self._free = [m for m in self._free if m is not memory]
        else:
            # A piece that is too small now is too small at every pass, so a larger one replaces it.
            if len(self._free) + self._used >= 2:
                self._free.sort(key=torch.Tensor.numel)
                self._free = self._free[1:]
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._used += 1
        self._used_bytes += memory.numel()
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return memory

    def give_back(self, memory: torch.Tensor) -> None:
        """Ends a use."""
        self._used -= 1
        self._used_bytes -= memory.numel()
        self._free.append(memory)

    def clear(self) -> None:
        """Lets go of what is not in use."""
        self._free = []

    @property
    def held_bytes(self) -> int:
        """Bytes in use or kept for the next use."""
        return self._used_bytes + sum(memory.numel() for memory in self._free)


class _Tape:
    """The order in which a kind of pass asks for weights."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.is_complete = False
        self.position = 0
        self.surprised = False

    def rewind(self) -> None:
        """Begins a pass. One that went another way than the one before makes the next learn anew."""
        if self.surprised:
            self.events, self.is_complete = [], False
        elif self.events:
            self.is_complete = True
        self.position, self.surprised = 0, False

    def follow(self, event: Event) -> Event | None:
        """Notes a request; returns the one that is expected next, if it is known."""
        if not self.is_complete:
            self.events.append(event)
            return None
        place = self._find(event)
        if place is None:
            self.surprised = True
            return None
        self.surprised |= place != self.position
        self.position = place + 1
        return self.events[self.position] if self.position < len(self.events) else None

    def _find(self, event: Event) -> int | None:
        order = [*range(self.position, len(self.events)), *range(self.position)]
        return next((i for i in order if _same(self.events[i], event)), None)


def _same(one: Event, other: Event) -> bool:
    return one[0] is other[0] and one[1] is other[1]


@dataclass
class _Reducing:
    param: torch.Tensor
    own: torch.Tensor
    whole: torch.Tensor
    work: Work | None


class GTPChain:
    """Gathers a model's weights one step ahead, and sums their gradients one step behind.

    Attributes:
        memory: Of gathered weights.
        gathers: How often each parameter was gathered, by ``(id(parameter), direction)``.
        wasted: Gathers made ahead that nobody used.
    """

    def __init__(self) -> None:
        self.memory = GatherMemory()
        self.gathers: Counter[tuple[int, Direction]] = Counter()
        self.wasted = 0
        self._tapes: dict[bool, _Tape] = {}
        self._tape: _Tape | None = None
        self._ahead: Gathered | None = None
        self._reducing: _Reducing | None = None
        self._flush_is_queued = False

    def __deepcopy__(self, memo: object) -> GTPChain:
        """A copy of the model learns its own order."""
        return memo.setdefault(id(self), GTPChain())  # type: ignore[attr-defined]

    def start_pass(self) -> None:
        """Called by the model at the start of its forward pass.

        Nothing that was gathered before is used afterwards, so weights may have changed.
        """
        self._drop_ahead()
        self.flush()
        self._tape = self._tapes.setdefault(torch.is_grad_enabled(), _Tape())
        self._tape.rewind()

    # Weights

    def acquire(self, param: torch.Tensor, direction: Direction) -> Gathered:
        """The whole weight; starts to gather the one that will be asked for next.

        Args:
            param: This rank's shard; every GTP rank asks for the same weights in the same order.
            direction: Which copy of a quantised weight.
        """
        event = (param, direction)
        gathered, self._ahead = self._ahead, None
        if gathered is not None and not _same(gathered.event, event):
            self._ahead = gathered
            self._drop_ahead()
            gathered = None
        if gathered is None:
            gathered = self._gather(event, asynchronous=False)
        gathered.wait()
        following = None if self._tape is None else self._tape.follow(event)
        if following is not None:
            self._ahead = self._gather(following, asynchronous=True)
        return gathered

    def release(self, gathered: Gathered) -> None:
        """Ends the use of a weight: its memory is written again."""
        gathered.parts = []
        self.memory.give_back(gathered.memory)

    def _gather(self, event: Event, asynchronous: bool) -> Gathered:
        param, direction = event
        weight = _weight(param)
        if weight.publish is not None:
            weight.publish()
        self.gathers[id(param), direction] += 1
        pieces = _pieces(param, direction)
        ranks = weight.shards.ranks
        sizes = [
            -(-piece.numel() * piece.element_size() * ranks // _PART_BYTES) * _PART_BYTES
            for piece in pieces
        ]
        memory = self.memory.take(sum(sizes), param.device)
        parts: list[torch.Tensor] = []
        works: list[Work | None] = []
        start = 0
        for piece, size in zip(pieces, sizes, strict=True):
            nbytes = piece.numel() * piece.element_size() * ranks
            output = memory[start : start + nbytes].view(piece.dtype)
            works.append(
                all_gather_into_tensor(output, piece.reshape(-1), weight.group, asynchronous)
            )
            parts.append(output.view(ranks * piece.size(0), *piece.shape[1:]))
            start += size
        return Gathered(event, parts, memory, WorkList(works) if asynchronous else None)

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.wait()
            self.release(self._ahead)
            self._ahead = None
            self.wasted += 1

    # Gradients

    def reduce(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        """Sums the gradient of a whole weight over the ranks and adds each its rows to its shard.

        It returns at once. The addition, and the word to DDP that the gradient is there, follow with
        the next gradient or at the end of the backward pass.

        Args:
            param: The shard.
            grad: ``[rows, columns]`` of the whole weight on this rank, without padding.
        """
        if not self._flush_is_queued:
            torch.autograd.Variable._execution_engine.queue_callback(self.flush)  # type: ignore[attr-defined]
            self._flush_is_queued = True
        weight = _weight(param)
        main_grad: Any = getattr(param, "main_grad", None)
        dtype = grad.dtype if main_grad is None else main_grad.dtype
        shards = weight.shards
        if shards.pad_length or grad.dtype != dtype or not grad.is_contiguous():
            whole = grad.new_zeros((shards.padded_rows, weight.columns), dtype=dtype)
            whole[: shards.rows] = grad
        else:
            whole = grad
        own = whole.new_empty((shards.shard_rows, weight.columns))
        work = reduce_scatter_tensor(own.view(-1), whole.view(-1), weight.group, async_op=True)
        previous, self._reducing = self._reducing, _Reducing(param, own, whole, work)
        if previous is not None:
            self._finish(previous)

    def flush(self) -> None:
        """Adds what has been summed to the last shard; returns when every gradient is in its place."""
        self._flush_is_queued = False
        last, self._reducing = self._reducing, None
        if last is not None:
            self._finish(last)

    @torch.no_grad()
    def _finish(self, reducing: _Reducing) -> None:
        if reducing.work is not None:
            reducing.work.wait()
        param, weight = reducing.param, _weight(reducing.param)
        main_grad = getattr(param, "main_grad", None)
        if main_grad is not None:
            main_grad.add_(reducing.own)
        elif param.grad is None:
            param.grad = reducing.own
        else:
            param.grad.add_(reducing.own)
        if weight.grad_ready is not None:
            weight.grad_ready()


def _weight(param: torch.Tensor) -> GTPWeight:
    weight = gtp_weight_of(param)
    if weight is None:
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} is not cut over GTP ranks; make it with a "
            "layer that was given a GTP group"
        )
    return weight


def _pieces(param: torch.Tensor, direction: Direction) -> list[torch.Tensor]:
    """What this rank sends: values, or data and scales of the copy that is needed."""
    if not isinstance(param, MXFP8Tensor):
        return [param.detach()]
    storage = param.storage_bytes
    pieces = (
        [storage.rowwise_data, storage.rowwise_scale]
        if direction is Direction.FORWARD
        else [storage.columnwise_data, storage.columnwise_scale]
    )
    present = [piece for piece in pieces if piece is not None]
    if len(present) < 2:
        raise ValueError(
            f"the {direction.value} product needs a copy of the weight that it does not keep; quantise "
            "it with both"
        )
    return present
