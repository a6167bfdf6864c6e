"""The collectives the project uses, by one name each, whatever the torch version or backend.

Every function takes tensors and a group, and returns a :class:`Work` to wait on when ``async_op`` is
true and ``None`` otherwise. Sizes are in elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

ReduceOp = dist.ReduceOp
SUM = dist.ReduceOp.SUM
AVG = dist.ReduceOp.AVG
MAX = dist.ReduceOp.MAX

# torch 2.13 renamed both and warns about the old names; torch 2.11 has the old names only.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Work(Protocol):
    """Something under way that can be waited for."""

    def wait(self) -> Any:
        """Returns when the results may be read (on CUDA: by the current stream)."""


class WorkList:
    """Several pieces of work waited for as one."""

    def __init__(self, works: Sequence[Work | None]) -> None:
        self._works = [work for work in works if work is not None]

    def wait(self) -> None:
        """Waits for all of them, in the order in which they were started."""
        for work in self._works:
            work.wait()
        self._works = []


def group_size(group: dist.ProcessGroup | None) -> int:
    """Number of ranks; 1 where torch.distributed is not in use."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def group_rank(group: dist.ProcessGroup | None) -> int:
    """This process's rank inside ``group``; 0 where torch.distributed is not in use."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def all_gather_into_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup | None,
    async_op: bool = False,
) -> Work | None:
    """Concatenates every rank's ``input`` in ``output``, which may hold ``input`` in its own place.

    Args:
        output: Flat, ``group size * input.numel()`` elements.
        input: Flat; the same size and dtype on every rank.
        group: The ranks that take part.
        async_op: Return at once with a handle.
    """
    return _all_gather_single(output, input, group=group, async_op=async_op)


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup | None,
    op: Any = SUM,
    async_op: bool = False,
) -> Work | None:
    """Reduces ``input`` over the ranks and leaves this rank's equal share in ``output``.

    ``output`` may be this rank's share of ``input`` itself.
    """
    return _reduce_scatter_single(output, input, op=op, group=group, async_op=async_op)


def all_reduce(
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None,
    op: Any = SUM,
    async_op: bool = False,
) -> Work | None:
    """Reduces ``tensor`` in place over the ranks.

    Raises:
        ValueError: If ``tensor`` is not contiguous (gloo would give a wrong result silently).
    """
    if not tensor.is_contiguous():
        raise ValueError(
            f"all_reduce needs a contiguous tensor, got shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()}; call .contiguous() and copy the result back"
        )
    return dist.all_reduce(tensor, op=op, group=group, async_op=async_op)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup | None,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    async_op: bool = False,
) -> Work | None:
    """Sends the i-th piece of ``input`` to rank i and gathers what the others sent in ``output``."""
    return dist.all_to_all_single(
        output, input, output_split_sizes, input_split_sizes, group=group, async_op=async_op
    )


def all_gather_uneven(
    outputs: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None,
    async_op: bool = False,
) -> Work | None:
    """Fills every ``outputs[i]`` with rank i's values; ``outputs[own rank]`` holds this rank's.

    Args:
        outputs: One flat tensor a rank, of sizes that may differ, zero included; every rank passes
            the same sizes.
        group: The ranks that take part.
        async_op: Return at once with a handle.
    """
    rank = group_rank(group)
    if dist.get_backend(group) == "nccl":
        return dist.all_gather(list(outputs), outputs[rank], group=group, async_op=async_op)
    # gloo refuses uneven sizes in all_gather. Broadcasting each rank's piece moves the same bytes.
    works = [
        dist.broadcast(output, group=group, group_src=source, async_op=async_op)
        for source, output in enumerate(outputs)
        if output.numel() > 0
    ]
    return WorkList(works) if async_op else None


def broadcast(tensor: torch.Tensor, group: dist.ProcessGroup | None, source: int = 0) -> None:
    """Copies ``tensor`` from the rank that is number ``source`` inside ``group`` to the others."""
    dist.broadcast(tensor, group=group, group_src=source)


class ReduceScatterFP32Work:
    """The second half of :func:`reduce_scatter_with_fp32_accumulation`: sum what has arrived."""

    def __init__(
        self, work: Work | None, received: torch.Tensor, output: torch.Tensor, world_size: int
    ) -> None:
        self._work = work
        self._received: torch.Tensor | None = received
        self._output = output
        self._world_size = world_size

    def wait(self) -> None:
        """Waits for the exchange, sums in FP32 in rank order and frees the received pieces."""
        if self._received is None:
            return
        if self._work is not None:
            self._work.wait()
        pieces = self._received.view(self._world_size, -1)
        self._output.copy_(torch.sum(pieces, dim=0, dtype=torch.float32))
        self._received = None


def reduce_scatter_with_fp32_accumulation(
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup | None,
    op: Any = SUM,
    async_op: bool = False,
) -> ReduceScatterFP32Work | None:
    """Reduce-scatter that moves ``input``'s dtype over the wire and adds up in FP32.

    An all-to-all brings every rank the pieces of its own share; the sum is local. It moves as many
    bytes as a ring reduce-scatter and holds one extra copy of ``input`` until it is waited for.

    Raises:
        ValueError: If ``op`` is not SUM or ``input`` does not divide by the number of ranks.
    """
    world_size = group_size(group)
    if op != SUM:
        raise ValueError(f"FP32-accumulating reduce-scatter can only sum, got {op}")
    if input.numel() % world_size != 0:
        raise ValueError(f"{input.numel()} elements do not divide by {world_size} ranks")
    received = torch.empty_like(input)
    exchange = all_to_all_single(received, input, group, async_op=async_op)
    work = ReduceScatterFP32Work(exchange, received, output, world_size)
    if async_op:
        return work
    work.wait()
    return None
