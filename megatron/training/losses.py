"""Losses of single samples, gathered and averaged over a global batch exactly.

A sum of floats depends on its order, and with it on how many ranks share the batch. Here each
sample's loss is kept apart, in FP64, and the sum over the batch is correctly rounded
(``math.fsum``), so the reported loss is a function of the samples' losses alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.core.collectives import all_gather_into_tensor, group_size

# For each key the FP64 sums over the tokens of each sample, and the numbers of these tokens.
SampleLosses = dict[str, tuple[torch.Tensor, torch.Tensor]]


def average_losses(
    microbatches: Sequence[SampleLosses], group: dist.ProcessGroup | None
) -> dict[str, float]:
    """Averages over all tokens of all samples of all ranks.

    Args:
        microbatches: This rank's samples. Every rank must give the same keys and numbers of
            samples.
        group: The ranks that read batches of their own.

    Returns:
        For each key the mean per token, the same on every rank; 0 if no token counts.
    """
    averages = {}
    for key in microbatches[0] if microbatches else ():
        sums = torch.cat([losses[key][0].double().reshape(-1) for losses in microbatches])
        counts = torch.cat([losses[key][1].double().reshape(-1) for losses in microbatches])
        own = torch.cat([sums, counts])
        size = group_size(group)
        gathered = own
        if size > 1:
            gathered = torch.empty(size * own.numel(), dtype=own.dtype, device=own.device)
            all_gather_into_tensor(gathered, own, group)
        table = gathered.view(size, 2, -1).cpu()
        tokens = math.fsum(table[:, 1].reshape(-1).tolist())
        total = _sum(table[:, 0].reshape(-1).tolist())
        averages[key] = total / tokens if tokens else 0.0
    return averages


def _sum(values: list[float]) -> float:
    """``math.fsum``, which refuses to add infinities of both signs and to overflow."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return math.nan
