"""Generalized tensor parallelism (GTP): weights cut over a second axis, put together for each use.

A weight's rows (dim 0 of what tensor parallelism leaves of it) are dealt out over the GTP ranks.
Whoever multiplies with it gathers it first and lets go of it afterwards; its gradient is summed over
the ranks and stays with the shard. See :mod:`~megatron.core.tensor_parallel.gtp_chain` for when.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron.core.collectives import group_rank, group_size

if TYPE_CHECKING:
    from megatron.core.tensor_parallel.gtp_chain import GTPChain

# Rows of a shard are a multiple of this: of an MXFP8 block, or of what BF16 kernels like.
MXFP8_ALIGNMENT = 32
ALIGNMENT = 16


@dataclass(frozen=True)
class RowShards:
    """Rows of a matrix in equal shards; the last ones end with rows that are only padding.

    Attributes:
        rows: Rows of the matrix.
        ranks: Number of shards.
        alignment: What a shard's rows are a multiple of.
    """

    rows: int
    ranks: int
    alignment: int = 1

    @property
    def shard_rows(self) -> int:
        """Rows of every shard."""
        return -(-self.rows // (self.ranks * self.alignment)) * self.alignment

    @property
    def padded_rows(self) -> int:
        """Rows of all shards."""
        return self.ranks * self.shard_rows

    @property
    def pad_length(self) -> int:
        """Rows at the end that are no part of the matrix."""
        return self.padded_rows - self.rows

    def first_row(self, rank: int) -> int:
        """The row with which a shard begins."""
        return rank * self.shard_rows

    def valid_rows(self, rank: int) -> int:
        """How many rows of a shard are rows of the matrix; they come first."""
        return min(max(self.rows - rank * self.shard_rows, 0), self.shard_rows)

    def cut(self, matrix: torch.Tensor, rank: int) -> torch.Tensor:
        """A shard of ``matrix``, its padding zero."""
        first, valid = self.first_row(rank), self.valid_rows(rank)
        shard = matrix.new_zeros((self.shard_rows, *matrix.shape[1:]))
        shard[:valid] = matrix[first : first + valid]
        return shard


class GTPWeight:
    """How a parameter is cut over GTP ranks; the parameter carries it as ``gtp_remat``.

    Args:
        shards: Its rows.
        columns: Its columns.
        group: The ranks.
        chain: Gathers it.

    Attributes:
        publish: Called before the parameter is read to be gathered: whoever updates it in the
            background finishes first.
        grad_ready: Called when a gradient has been added to the parameter's ``main_grad``.
    """

    def __init__(
        self, shards: RowShards, columns: int, group: dist.ProcessGroup, chain: GTPChain
    ) -> None:
        self.shards = shards
        self.columns = columns
        self.group = group
        self.chain = chain
        self.publish: Callable[[], None] | None = None
        self.grad_ready: Callable[[], None] | None = None

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Of the matrix without padding, on this tensor-parallel rank."""
        return self.shards.rows, self.columns

    @property
    def pad_length(self) -> int:
        """Rows of padding at the end of the last shards."""
        return self.shards.pad_length

    @property
    def valid_numel(self) -> int:
        """Elements at the start of this rank's shard that are no padding."""
        return self.shards.valid_rows(group_rank(self.group)) * self.columns

    def __deepcopy__(self, memo: object) -> GTPWeight:
        """A copy of the parameter is cut the same way; groups and chain are not its own."""
        return self


@dataclass(frozen=True)
class GTPRemat:
    """Where a layer's weights are to be cut: over which ranks, and who gathers them.

    Attributes:
        group: The ranks.
        chain: The model's chain.
    """

    group: dist.ProcessGroup | None
    chain: GTPChain

    @property
    def ranks(self) -> int:
        """Number of ranks; 1 without a group."""
        return 1 if self.group is None else group_size(self.group)


def gtp_weight_of(param: torch.Tensor) -> GTPWeight | None:
    """How ``param`` is cut over GTP ranks; ``None`` if it is not."""
    return getattr(param, "gtp_remat", None)


def is_gtp_param(param: torch.Tensor) -> bool:
    """Whether ``param`` is a shard of a weight that is cut over GTP ranks."""
    return gtp_weight_of(param) is not None


def cut_over_gtp(param: torch.nn.Parameter, weight: GTPWeight) -> None:
    """Marks ``param`` as this rank's shard."""
    param.gtp_remat = weight  # type: ignore[attr-defined]
    param.is_gtp_weight_remat = True  # type: ignore[attr-defined]
