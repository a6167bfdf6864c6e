"""The ranks that the parts of a layer are cut over, as one value."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist

from megatron.core.collectives import group_rank, group_size
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.gtp import GTPRemat
from megatron.core.tensor_parallel.gtp_chain import GTPChain

Group = dist.ProcessGroup | None


@dataclass(frozen=True)
class LayerGroups:
    """Process groups of a model's layers; ``None`` is one rank.

    Attributes:
        tp: Tensor parallel.
        gtp_remat: A TP-local weight is cut over it.
        ep: Experts are spread over it.
        expt_tp: Tensor parallel, of experts.
        expt_gtp_remat: A TP-local expert weight is cut over it.
        chain: Gathers weights that are cut over GTP ranks.
    """

    tp: Group = None
    gtp_remat: Group = None
    ep: Group = None
    expt_tp: Group = None
    expt_gtp_remat: Group = None
    chain: GTPChain = field(default_factory=GTPChain)

    @classmethod
    def from_collection(cls, groups: ProcessGroupCollection | None) -> LayerGroups:
        """Those of a collection that has them; those of parallel_state if it is ``None``."""
        names = ("tp", "gtp_remat", "ep", "expt_tp", "expt_gtp_remat")
        groups = groups or ProcessGroupCollection.use_mpu_process_groups(names)
        tp, gtp_remat, ep, expt_tp, expt_gtp_remat = (getattr(groups, name, None) for name in names)
        return cls(tp, gtp_remat, ep, expt_tp, expt_gtp_remat)

    @property
    def gtp(self) -> GTPRemat:
        """Where dense weights are cut over GTP ranks."""
        return GTPRemat(self.gtp_remat, self.chain)

    @property
    def expert_gtp(self) -> GTPRemat:
        """Where experts' weights are."""
        return GTPRemat(self.expt_gtp_remat, self.chain)


def ranks_in(group: Group) -> int:
    """Number of ranks; 1 without a group."""
    return 1 if group is None else group_size(group)


def rank_in(group: Group) -> int:
    """This rank's place; 0 without a group."""
    return 0 if group is None else group_rank(group)
