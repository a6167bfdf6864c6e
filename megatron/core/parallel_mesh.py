"""Parallel sizes as one value, and the process groups that they mean.

Ranks are numbered along two grids, both from the fastest axis to the slowest:

- dense parameters: TP, GTP, data-parallel replicas;
- routed experts: expert TP, EP, expert GTP, expert data-parallel replicas.

With several distributed-optimizer instances the replicas' axis is cut in two, with the instance as the
slowest axis of both grids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

_INSTANCE = "instance"
_ALONE = "alone"

# Group name -> grid and axes, slowest first.
_GROUPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "alone": ("dense", ()),
    "tp": ("dense", ("tp",)),
    "gtp_remat": ("dense", ("gtp_remat",)),
    "mp": ("dense", ("gtp_remat", "tp")),
    "dp": ("dense", (_INSTANCE, "dp")),
    "intra_dp": ("dense", ("dp",)),
    "dp_gtp_remat": ("dense", (_INSTANCE, "dp", "gtp_remat")),
    "intra_dp_gtp_remat": ("dense", ("dp", "gtp_remat")),
    "tp_dp": ("dense", (_INSTANCE, "dp", "gtp_remat", "tp")),
    "inter_dist_opt": ("dense", (_INSTANCE,)),
    "intra_dist_opt": ("dense", ("dp", "gtp_remat", "tp")),
    "expt_tp": ("expert", ("expt_tp",)),
    "ep": ("expert", ("ep",)),
    "expt_gtp_remat": ("expert", ("expt_gtp_remat",)),
    "tp_ep": ("expert", ("ep", "expt_tp")),
    "tp_ep_with_egtp_remat": ("expert", ("expt_gtp_remat", "ep", "expt_tp")),
    "expt_tp_gtp_remat": ("expert", ("expt_gtp_remat", "expt_tp")),
    "expt_dp": ("expert", (_INSTANCE, "expt_dp")),
    "intra_expt_dp": ("expert", ("expt_dp",)),
    "expt_dp_gtp_remat": ("expert", (_INSTANCE, "expt_dp", "expt_gtp_remat")),
    "intra_expt_dp_gtp_remat": ("expert", ("expt_dp", "expt_gtp_remat")),
}

# Those that a gloo twin is offered for where the ranks talk over another backend.
_GLOO_GROUPS = ("dp", "intra_dp", "expt_dp", "intra_expt_dp")


# Arguments of parts that this project does not have: the part, and the one value accepted.
_UNAVAILABLE: dict[str, tuple[str, Any]] = {
    "pipeline_model_parallel_size": ("pipeline parallelism", 1),
    "virtual_pipeline_model_parallel_size": ("pipeline parallelism", None),
    "pipeline_model_parallel_comm_backend": ("pipeline parallelism", None),
    "use_sharp": ("SHARP", False),
    "sharp_enabled_group": ("SHARP", None),
    "context_parallel_size": ("context parallelism", 1),
    "hierarchical_context_parallel_sizes": ("context parallelism", None),
    "hybrid_context_parallel": ("context parallelism", False),
    "nccl_communicator_config_path": ("configuration of NCCL communicators", None),
    "high_priority_stream_groups": ("configuration of NCCL communicators", None),
    "get_embedding_ranks": ("placement of embeddings", None),
    "get_position_embedding_ranks": ("placement of embeddings", None),
    "rank_offset": ("groups over a part of the world", 0),
}


@dataclass(frozen=True)
class ParallelSizes:
    """How many ranks there are along every axis.

    Attributes:
        world: All ranks.
        tp: Ranks that a layer's work is cut over.
        gtp_remat: Ranks that a TP-local weight is cut over, and gathered from for use.
        ep: Ranks that experts are spread over.
        expt_tp: Like ``tp``, for routed experts.
        expt_gtp_remat: Like ``gtp_remat``, for routed experts.
        instances: Replicas of the distributed optimizer's sharded state.

    Raises:
        RuntimeError: If the sizes do not divide one another; the message shows the arithmetic.
    """

    world: int
    tp: int = 1
    gtp_remat: int = 1
    ep: int = 1
    expt_tp: int = 1
    expt_gtp_remat: int = 1
    instances: int = 1

    def __post_init__(self) -> None:
        for name in ("world", "tp", "gtp_remat", "ep", "expt_tp", "expt_gtp_remat", "instances"):
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise RuntimeError(
                    f"the size of {name} must be a whole number above 0, got {size!r}"
                )
        dense = self.tp * self.gtp_remat
        if self.world % dense != 0:
            raise RuntimeError(
                f"world_size ({self.world}) is not divisible by {dense} = tensor_model_parallel_size "
                f"{self.tp} x gtp_remat_size {self.gtp_remat}"
            )
        expert = self.expt_tp * self.ep * self.expt_gtp_remat
        if self.world % expert != 0:
            raise RuntimeError(
                f"world_size ({self.world}) is not divisible by {expert} = "
                f"expert_tensor_parallel_size {self.expt_tp} x expert_model_parallel_size {self.ep} x "
                f"expert_gtp_remat_size {self.expt_gtp_remat}"
            )
        if self.instances > 1 and (self.gtp_remat > 1 or self.expt_gtp_remat > 1):
            raise RuntimeError(
                f"num_distributed_optimizer_instances {self.instances} excludes GTP (gtp_remat_size "
                f"{self.gtp_remat}, expert_gtp_remat_size {self.expt_gtp_remat}); set it to 1"
            )
        for what, replicas, arithmetic in (
            ("data-parallel", self.dp, f"{self.world} / {dense}"),
            ("expert data-parallel", self.expt_dp, f"{self.world} / {expert}"),
        ):
            if replicas % self.instances != 0:
                raise RuntimeError(
                    f"num_distributed_optimizer_instances {self.instances} does not divide the "
                    f"{arithmetic} = {replicas} {what} ranks"
                )

    @property
    def dp(self) -> int:
        """Ranks that hold the same dense parameters."""
        return self.world // (self.tp * self.gtp_remat)

    @property
    def expt_dp(self) -> int:
        """Ranks that hold the same experts' parameters."""
        return self.world // (self.expt_tp * self.ep * self.expt_gtp_remat)

    def axes(self, grid: str) -> dict[str, int]:
        """Names and sizes of the axes of the ``"dense"`` or ``"expert"`` grid, slowest first."""
        if grid == "dense":
            sizes = {"dp": self.dp // self.instances, "gtp_remat": self.gtp_remat, "tp": self.tp}
        else:
            sizes = {
                "expt_dp": self.expt_dp // self.instances,
                "expt_gtp_remat": self.expt_gtp_remat,
                "ep": self.ep,
                "expt_tp": self.expt_tp,
            }
        return {_INSTANCE: self.instances, **sizes}

    def rank_lists(self, name: str) -> list[list[int]]:
        """The global ranks of every group of that name, each in ascending order."""
        return self._rank_table(name).tolist()

    def _rank_table(self, name: str) -> np.ndarray:
        grid, wanted = _GROUPS[name]
        axes = self.axes(grid)
        ranks = np.arange(self.world, dtype=np.int64).reshape(tuple(axes.values()))
        inside = [i for i, axis in enumerate(axes) if axis in wanted]
        outside = [i for i, axis in enumerate(axes) if axis not in wanted]
        size = math.prod(axes[axis] for axis in wanted)
        return ranks.transpose(outside + inside).reshape(-1, size)


class _Grid:
    """A device mesh over the axes of one grid that have more than one rank."""

    def __init__(self, axes: dict[str, int], device_type: str) -> None:
        self.sizes = {name: size for name, size in axes.items() if size > 1}
        ranks = torch.arange(dist.get_world_size()).reshape(*self.sizes.values(), 1)
        self._mesh = DeviceMesh(device_type, ranks, mesh_dim_names=(*self.sizes, _ALONE))

    def group(self, axes: Sequence[str]) -> dist.ProcessGroup:
        names = tuple(name for name in axes if name in self.sizes)
        if not names:
            return self._mesh.get_group(_ALONE)
        if len(names) == 1:
            return self._mesh.get_group(names[0])
        return self._mesh[names]._flatten("_".join(names)).get_group()


def build_groups(
    sizes: ParallelSizes, with_gloo: bool
) -> tuple[dict[str, dist.ProcessGroup], dict[str, dist.ProcessGroup]]:
    """Makes the process groups of this rank; all ranks call it together.

    Groups of the same ranks are one object, so that a job without model parallelism costs hardly any
    group beyond the world's.

    Args:
        sizes: Of a world as large as the one that is running.
        with_gloo: Also make gloo twins of the data-parallel groups, unless they are gloo already.

    Returns:
        Groups by name, and gloo groups by name.
    """
    backend = dist.get_backend()
    device_type = "cuda" if backend != "gloo" and torch.cuda.is_available() else "cpu"
    grids: dict[str, _Grid] = {}
    groups: dict[str, dist.ProcessGroup] = {}
    by_ranks: dict[bytes, dist.ProcessGroup] = {}
    gloo: dict[str, dist.ProcessGroup] = {}
    gloo_by_ranks: dict[bytes, Any] = {}
    for name, (grid, axes) in _GROUPS.items():
        table = sizes._rank_table(name)
        key = table.tobytes() + bytes(str(table.shape), "ascii")
        if key not in by_ranks:
            if grid not in grids:
                grids[grid] = _Grid(sizes.axes(grid), device_type)
            by_ranks[key] = grids[grid].group(axes)
        groups[name] = by_ranks[key]
        if not with_gloo or name not in _GLOO_GROUPS:
            continue
        if backend == "gloo":
            gloo[name] = groups[name]
            continue
        if key not in gloo_by_ranks:
            gloo_by_ranks[key] = dist.new_subgroups_by_enumeration(
                table.tolist(), backend="gloo", group_desc=f"{name}_gloo"
            )[0]
        gloo[name] = gloo_by_ranks[key]
    return groups, gloo


def refuse_unavailable(arguments: dict[str, Any]) -> None:
    """Raises ``ValueError`` where an argument asks for a part that this project does not have."""
    for name, (part, accepted) in _UNAVAILABLE.items():
        value = arguments[name]
        if value != accepted and not (accepted is None and not value):
            raise ValueError(
                f"{part} is not available here: {name} must stay {accepted}, got {value!r}"
            )


def check_order(order: str, sizes: ParallelSizes) -> None:
    """Raises unless ``order`` is the order of axes that the grids here have."""
    tokens = order.split("-")
    unknown = set(tokens) - {"tp", "cp", "ep", "dp", "pp"}
    if unknown or len(set(tokens)) != len(tokens):
        raise ValueError(f"order must name each of tp, cp, ep, dp, pp once at most, got {order!r}")
    if [token for token in tokens if token in ("tp", "ep", "dp")] != [
        token for token in ("tp", "ep", "dp") if token in tokens
    ]:
        raise ValueError(
            f"order must be tp before ep before dp (TP is the fastest axis here), got {order!r}"
        )
    for token, size in (("tp", sizes.tp), ("ep", sizes.ep), ("dp", sizes.dp)):
        if size > 1 and token not in tokens:
            raise RuntimeError(f"the size of {token} is {size}, but order {order!r} leaves it out")
