"""What is left to do with gradients after the last backward pass of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.core.collectives import all_reduce, group_size
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.process_groups_config import ProcessGroupCollection


def finalize_model_grads(
    model: Sequence[DistributedDataParallel],
    num_tokens: torch.Tensor | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool | None = False,
) -> None:
    """Finishes the reductions, and scales to a mean over tokens if they were counted.

    Parameters that are whole on every GTP rank get the sum over these ranks, which read batches of
    their own; those of a sequence-parallel region the sum over tensor-parallel ranks, each of which saw
    a part of the tokens.

    Args:
        model: Model chunks.
        num_tokens: Tokens that this rank's loss sums over, int64 or float, one element; with it the
            gradients are sums and are divided by the count over all ranks with batches of their own.
            ``None`` where the loss of each microbatch is a mean.
        pg_collection: Gives the group of those ranks; DDP's own if ``None``.
        force_all_reduce: Reduce to every rank instead of to owners.
    """
    for chunk in model:
        chunk.finish_grad_sync(force_all_reduce=force_all_reduce)
    for chunk in model:
        _sum_partial_grads(chunk, whole=bool(force_all_reduce))
    if num_tokens is None:
        return
    group: dist.ProcessGroup | None = getattr(
        pg_collection, "dp_cp_gtp_remat", model[0].batch_group
    )
    total = num_tokens.detach().clone()
    all_reduce(total, group)
    scale = 1.0 / float(total.clamp(min=1))
    for chunk in model:
        chunk.scale_gradients(scale)


@torch.no_grad()
def _sum_partial_grads(chunk: DistributedDataParallel, whole: bool) -> None:
    """Sums, over groups beyond the data-parallel ones, gradients that are complete nowhere yet."""
    pieces: dict[tuple[dist.ProcessGroup, torch.dtype], list[torch.Tensor]] = {}
    for bucket in (bucket for buffer in chunk.all_buffers for bucket in buffer.buckets):
        for param, grad in bucket.reduced_grads(whole):
            for group in _partial_over(chunk, param):
                pieces.setdefault((group, grad.dtype), []).append(grad)
    for (group, _), grads in pieces.items():
        flat = torch.cat(grads)
        all_reduce(flat, group)
        torch._foreach_copy_(grads, list(flat.split([grad.numel() for grad in grads])))


def _partial_over(
    chunk: DistributedDataParallel, param: torch.nn.Parameter
) -> list[dist.ProcessGroup]:
    expert = not getattr(param, "allreduce", True)
    groups = []
    gtp = chunk.expt_gtp_remat_group if expert else chunk.gtp_remat_group
    if not hasattr(param, "gtp_remat"):
        groups.append(gtp)
    if getattr(param, "sequence_parallel", False):
        groups.append(chunk.expt_tp_group if expert else chunk.tp_group)
    return [group for group in groups if group is not None and group_size(group) > 1]
