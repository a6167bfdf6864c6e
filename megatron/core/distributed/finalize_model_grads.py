"""What is left to do with gradients after the last backward pass of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.core.collectives import all_reduce
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.process_groups_config import ProcessGroupCollection


def finalize_model_grads(
    model: Sequence[DistributedDataParallel],
    num_tokens: torch.Tensor | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool | None = False,
) -> None:
    """Finishes the reductions, and scales to a mean over tokens if they were counted.

    Args:
        model: Model chunks.
        num_tokens: Tokens that this rank's loss sums over, int64 or float, one element; with it the
            gradients are sums and are divided by the count over all data-parallel ranks. ``None``
            where the loss of each microbatch is a mean.
        pg_collection: Gives the data-parallel group; DDP's own if ``None``.
        force_all_reduce: Reduce to every rank instead of to owners.
    """
    for chunk in model:
        chunk.finish_grad_sync(force_all_reduce=force_all_reduce)
    if num_tokens is None:
        return
    group: dist.ProcessGroup | None = getattr(pg_collection, "dp_cp", model[0].dp_cp_group)
    total = num_tokens.detach().clone()
    all_reduce(total, group)
    scale = 1.0 / float(total.clamp(min=1))
    for chunk in model:
        chunk.scale_gradients(scale)
