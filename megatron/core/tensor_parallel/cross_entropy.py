"""Cross entropy over logits whose vocabulary is cut over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.core.collectives import MAX, all_reduce, group_rank, group_size


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        shifted = logits.float()
        largest = shifted.amax(dim=-1).contiguous()
        all_reduce(largest, group, MAX)
        shifted = shifted - largest.unsqueeze(-1)
        local = target - group_rank(group) * logits.size(-1)
        elsewhere = (local < 0) | (local >= logits.size(-1))
        local = local.masked_fill(elsewhere, 0)
        predicted = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0.0)
        exponentials = shifted.exp_()
        sums = torch.stack([predicted, exponentials.sum(dim=-1)])
        all_reduce(sums, group)
        predicted, total = sums.unbind(0)
        exponentials.div_(total.unsqueeze(-1))
        ctx.save_for_backward(exponentials, local, elsewhere)
        ctx.dtype = logits.dtype
        return total.log() - predicted

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        probabilities, local, elsewhere = ctx.saved_tensors
        hit = (~elsewhere).to(probabilities.dtype).unsqueeze(-1)
        result = probabilities.scatter_add(-1, local.unsqueeze(-1), -hit)
        return (result * grad.unsqueeze(-1)).to(ctx.dtype), None, None


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, tp_group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Loss of every token, FP32.

    Args:
        logits: ``[s, b, tokens of this rank]``, any floating dtype.
        target: ``[s, b]``, token numbers over all ranks.
        tp_group: Ranks over which the vocabulary is cut.

    Returns:
        ``[s, b]``.
    """
    if tp_group is None or group_size(tp_group) == 1:
        flat = F.cross_entropy(logits.flatten(0, 1).float(), target.flatten(), reduction="none")
        return flat.view(target.shape)
    return _VocabParallelCrossEntropy.apply(logits, target, tp_group)
