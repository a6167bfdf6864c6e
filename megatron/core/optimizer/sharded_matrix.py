"""Where the shards of a matrix lie in it: cut over tensor-parallel ranks, over GTP ranks, or both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.collectives import all_gather_into_tensor, group_rank, group_size
from megatron.core.process_groups_config import ProcessGroupCollection


@dataclass(frozen=True)
class ShardPlace:
    """One shard: its rows in the matrix (in the shard they come first, then padding) and columns."""

    rows: torch.Tensor
    columns: slice


class ShardedMatrix:
    """A matrix of which every rank of a group holds a shard of the same size.

    Args:
        local_shape: Of a shard, padding included.
        tp: Tensor-parallel ranks that cut it, this rank's number among them, the dimension that they
            cut and how many parts of it they cut each on its own.
        gtp: The parameter's GTP cut, if any, and this rank's number in it.
        group: Ranks that hold one copy together, GTP the slower axis.
        tp_group, gtp_group: The two axes alone; ``None`` where the matrix is not cut over it.

    Attributes:
        shape: Of the matrix without padding.
        places: By rank of ``group``.
    """

    def __init__(
        self,
        local_shape: tuple[int, int],
        tp: tuple[int, int, int],
        gtp: Any,
        group: dist.ProcessGroup,
        tp_group: dist.ProcessGroup | None,
        gtp_group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self.local_shape = local_shape
        self.group, self.tp_group, self.gtp_group = group, tp_group, gtp_group
        tp_ranks, self.tp_dim, stride = tp
        rows, columns = local_shape if gtp is None else gtp.matrix_shape
        by_rows = self.tp_dim == 0
        self.shape = (rows * tp_ranks, columns) if by_rows else (rows, columns * tp_ranks)
        gtp_ranks = 1 if gtp is None else gtp.shards.ranks
        self.places: list[ShardPlace] = []
        for gtp_rank in range(gtp_ranks):
            first, count = 0, rows
            if gtp is not None:
                first, count = gtp.shards.first_row(gtp_rank), gtp.shards.valid_rows(gtp_rank)
            own = torch.arange(first, first + count, device=device)
            for tp_rank in range(tp_ranks):
                in_matrix = own
                if by_rows:
                    part = rows // stride
                    in_matrix = own // part * (part * tp_ranks) + tp_rank * part + own % part
                start = 0 if by_rows else tp_rank * columns
                self.places.append(ShardPlace(in_matrix, slice(start, start + columns)))

    @property
    def ranks(self) -> int:
        """Number of shards."""
        return len(self.places)

    @property
    def own_place(self) -> ShardPlace:
        """This rank's."""
        return self.places[group_rank(self.group)]

    def assemble(self, shards: torch.Tensor) -> torch.Tensor:
        """The matrix, from ``[ranks, *local_shape]``."""
        full = shards.new_empty(self.shape)
        for shard, place in zip(shards.unbind(0), self.places, strict=True):
            full[place.rows, place.columns] = shard[: place.rows.numel()]
        return full

    def gather(self, shard: torch.Tensor) -> torch.Tensor:
        """The matrix, on every rank of the group."""
        shards = shard.new_empty((self.ranks, *self.local_shape))
        all_gather_into_tensor(shards.view(-1), shard.contiguous().view(-1), self.group)
        return self.assemble(shards)

    def shard(self, full: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """A rank's shard (by default this one's) of the matrix, its padding zero."""
        place = self.own_place if rank is None else self.places[rank]
        result = full.new_zeros(self.local_shape)
        result[: place.rows.numel()] = full[place.rows, place.columns]
        return result


def sharded_matrix_of(
    param: torch.Tensor, groups: ProcessGroupCollection | None
) -> ShardedMatrix | None:
    """How ``param``, ``[rows, columns]``, is cut; ``None`` if it is whole on every rank.

    A vector counts as one column.

    Args:
        param: A parameter, or a master with its attributes.
        groups: Gives ``tp`` and ``mp``; for experts ``expt_tp`` and ``expt_tp_gtp_remat``.

    Raises:
        RuntimeError: If it is cut over both axes and the group of both is not there.
    """
    expert = not getattr(param, "allreduce", True)
    tp_group = getattr(groups, "expt_tp" if expert else "tp", None)
    is_cut = getattr(param, "tensor_model_parallel", False)
    if not is_cut or tp_group is None or group_size(tp_group) == 1:
        tp_group = None
    gtp = getattr(param, "gtp_remat", None)
    gtp_group = None if gtp is None else gtp.group
    if tp_group is None and gtp_group is None:
        return None
    group: Any = gtp_group if tp_group is None else tp_group
    if tp_group is not None and gtp_group is not None:
        name = "expt_tp_gtp_remat" if expert else "mp"
        group = getattr(groups, name, None)
        if group is None:
            raise RuntimeError(
                f"a matrix that is cut over TP and GTP ranks needs the group of both, {name}, in "
                "pg_collection"
            )
    tp = (1, 0, 1)
    if tp_group is not None:
        tp = (group_size(tp_group), param.partition_dim, getattr(param, "partition_stride", 1))  # type: ignore[attr-defined]
    shape = (param.size(0), param.size(1) if param.dim() == 2 else 1)
    return ShardedMatrix(shape, tp, gtp, group, tp_group, gtp_group, param.device)
