"""Initial weights that depend on the seed and a parameter's name, and on nothing else.

Every rank draws a parameter in full and keeps its part, so neither the number of ranks nor the way in
which they cut a matrix changes the model.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from megatron.core.collectives import group_rank, group_size
from megatron.core.tensor_parallel.gtp import GTPWeight


@dataclass(frozen=True)
class NormalInit:
    """Normal values of mean 0, drawn for the full matrix.

    Attributes:
        std: Standard deviation.
        full_shape: Shape before it is cut.
        partition_dim: Dimension that is cut over ``group``; -1 for none.
        partition_stride: Equal parts of that dimension that are cut each on its own and laid one
            after the other (2 for a fused gate and up projection).
        group: Ranks that it is cut over.
        gtp: How this rank's part is cut once more.
    """

    std: float
    full_shape: tuple[int, ...]
    partition_dim: int = -1
    partition_stride: int = 1
    group: torch.distributed.ProcessGroup | None = None
    gtp: GTPWeight | None = None

    def own_part(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of a full tensor."""
        part = self._tensor_parallel_part(full)
        if self.gtp is None:
            return part
        return self.gtp.shards.cut(part, group_rank(self.gtp.group))

    def _tensor_parallel_part(self, full: torch.Tensor) -> torch.Tensor:
        if self.partition_dim < 0 or self.group is None or group_size(self.group) == 1:
            return full
        ranks, rank = group_size(self.group), group_rank(self.group)
        parts = full.chunk(self.partition_stride, dim=self.partition_dim)
        own = [part.chunk(ranks, dim=self.partition_dim)[rank] for part in parts]
        return torch.cat(own, dim=self.partition_dim)


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") % 2**63)


@torch.no_grad()
def initialize_parameters(module: torch.nn.Module, seed: int) -> None:
    """Draws every parameter of ``module`` that carries a :class:`NormalInit` as ``normal_init``."""
    for name, param in module.named_parameters():
        rule = getattr(param, "normal_init", None)
        if rule is None:
            continue
        full = torch.empty(rule.full_shape, dtype=torch.float32, device="cpu")
        full.normal_(0.0, rule.std, generator=_generator(seed, name))
        param.copy_(rule.own_part(full))
