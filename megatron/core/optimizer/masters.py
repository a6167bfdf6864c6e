"""Every master in full, whichever ranks hold it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch

from megatron.core.collectives import all_reduce, group_size
from megatron.core.optimizer.main_params import MainParam
from megatron.core.optimizer.optimizer import MainParamOptimizer, MegatronOptimizer


def _unwrapped_name(name: str) -> str:
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def iter_param_masters(
    optimizer: MegatronOptimizer, model_chunks: Sequence[torch.nn.Module]
) -> Iterator[tuple[str, torch.nn.Parameter, torch.Tensor]]:
    """Yields name, parameter and FP32 master of every trainable parameter, in name order.

    The master has the parameter's shape and device, and is whole on every rank, whichever rank
    updates it; of an FP32 parameter it is the owner's values themselves. Collective: every rank
    iterates to the end.
    """
    owners: dict[torch.nn.Parameter, MainParamOptimizer] = {}
    records: dict[torch.nn.Parameter, MainParam] = {}
    for leaf in optimizer.leaves():
        owners |= dict.fromkeys(leaf.managed_params, leaf)
        records |= {record.model_param: record for record in leaf.main_params}
    named = {
        _unwrapped_name(name): param
        for chunk in model_chunks
        for name, param in chunk.named_parameters()
        if param.requires_grad
    }
    for name, param in sorted(named.items(), key=lambda item: item[0]):
        leaf = owners[param]
        full = torch.zeros(param.numel(), dtype=torch.float32, device=param.device)
        record = records.get(param)
        if record is not None:
            full[record.start : record.end] = record.main_param.detach().reshape(-1)
        group = leaf.ownership_group_of(param)
        if leaf.is_sharded and group_size(group) > 1:
            # One rank holds each element and the others zero bits: an integer sum keeps every bit.
            all_reduce(full.view(torch.int32), group)
        yield name, param, full.view(param.shape)


def iter_full_masters(
    optimizer: MegatronOptimizer, model_chunks: Sequence[torch.nn.Module]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields name and FP32 master of every trainable parameter, in name order, on the CPU.

    Collective: every rank iterates to the end, and every rank gets the values.
    """
    for name, _, master in iter_param_masters(optimizer, model_chunks):
        yield name, master.cpu()


def master_sha256(optimizer: MegatronOptimizer, model_chunks: Sequence[torch.nn.Module]) -> str:
    """SHA-256 over names and FP32 bytes of all masters. Collective; every rank gets it."""
    digest = hashlib.sha256()
    for name, value in iter_full_masters(optimizer, model_chunks):
        digest.update(name.encode())
        digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()
