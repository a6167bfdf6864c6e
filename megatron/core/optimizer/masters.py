"""Every master in full, whichever ranks hold it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from megatron.core.collectives import all_reduce, group_rank, group_size
from megatron.core.optimizer.main_params import MainParam
from megatron.core.optimizer.optimizer import MainParamOptimizer, MegatronOptimizer
from megatron.core.optimizer.sharded_matrix import sharded_matrix_of


def _unwrapped_name(name: str) -> str:
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


class _Masters:
    """Masters of a model's trainable parameters, by name. Reading one is collective."""

    def __init__(
        self, optimizer: MegatronOptimizer, model_chunks: Sequence[torch.nn.Module]
    ) -> None:
        self._leaves: dict[torch.nn.Parameter, MainParamOptimizer] = {}
        self._records: dict[torch.nn.Parameter, MainParam] = {}
        for leaf in optimizer.leaves():
            self._leaves |= dict.fromkeys(leaf.managed_params, leaf)
            self._records |= {record.model_param: record for record in leaf.main_params}
        self.params = {
            _unwrapped_name(name): param
            for chunk in model_chunks
            for name, param in chunk.named_parameters()
            if param.requires_grad
        }

    def local(self, param: torch.nn.Parameter) -> torch.Tensor:
        """Of ``param``'s shape, whichever data-parallel rank updates it."""
        leaf = self._leaves[param]
        full = torch.zeros(param.numel(), dtype=torch.float32, device=param.device)
        record = self._records.get(param)
        if record is not None:
            full[record.start : record.end] = record.main_param.detach().reshape(-1)
        group = leaf.ownership_group_of(param)
        if leaf.is_sharded and group_size(group) > 1:
            # One rank holds each element and the others zero bits: an integer sum keeps every bit.
            all_reduce(full.view(torch.int32), group)
        return full.view(param.shape)

    def whole(self, param: torch.nn.Parameter) -> torch.Tensor:
        """Put together over the tensor-parallel and GTP ranks that ``param`` is cut over."""
        local = self.local(param)
        matrix = sharded_matrix_of(param, self._leaves[param].pg_collection)
        if matrix is None:
            return local
        full = matrix.gather(local.view(matrix.local_shape))
        return full if param.dim() == 2 else full.view(-1)

    def groups_of_experts(self) -> set[dist.ProcessGroup]:
        """The expert-parallel group, if there is more than one rank in it."""
        groups = {getattr(leaf.pg_collection, "ep", None) for leaf in self._leaves.values()}
        return {group for group in groups if group is not None and group_size(group) > 1}


def iter_param_masters(
    optimizer: MegatronOptimizer, model_chunks: Sequence[torch.nn.Module]
) -> Iterator[tuple[str, torch.nn.Parameter, torch.Tensor]]:
    """Yields name, parameter and FP32 master of this rank's trainable parameters, in name order.

    The master has the parameter's shape and device, and is the same on all ranks that hold the
    parameter, whichever updates it; of an FP32 parameter it is the owner's values themselves.
    Collective: every rank iterates to the end.
    """
    masters = _Masters(optimizer, model_chunks)
    for name, param in sorted(masters.params.items(), key=lambda item: item[0]):
        yield name, param, masters.local(param)


@torch.no_grad()
def iter_full_masters(
    optimizer: MegatronOptimizer, model_chunks: Sequence[torch.nn.Module]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields name and FP32 master of every trainable parameter of the model, in name order, on the CPU.

    They are whole: put together over tensor-parallel and GTP ranks, and experts of all ranks are among
    them. Collective: every rank iterates to the end, and every rank gets the values.
    """
    masters = _Masters(optimizer, model_chunks)
    holders: dict[str, int | None] = dict.fromkeys(masters.params)
    (group,) = masters.groups_of_experts() or (None,)
    if group is not None:
        experts = [n for n, p in masters.params.items() if not getattr(p, "allreduce", True)]
        everyone: list[list[str]] = [[] for _ in range(group_size(group))]
        dist.all_gather_object(everyone, experts, group=group)
        holders |= {name: rank for rank, names in enumerate(everyone) for name in names}
    for name in sorted(holders):
        holder = holders[name]
        if holder is None:
            yield name, masters.whole(masters.params[name]).cpu()
            continue
        box: list[torch.Tensor | None] = [None]
        if holder == group_rank(group):
            box = [masters.whole(masters.params[name]).cpu()]
        dist.broadcast_object_list(box, group=group, group_src=holder)
        assert box[0] is not None
        yield name, box[0]


def master_sha256(optimizer: MegatronOptimizer, model_chunks: Sequence[torch.nn.Module]) -> str:
    """SHA-256 over names and FP32 bytes of all masters. Collective; every rank gets it."""
    digest = hashlib.sha256()
    for name, value in iter_full_masters(optimizer, model_chunks):
        digest.update(name.encode())
        digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()
