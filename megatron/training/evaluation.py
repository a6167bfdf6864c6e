"""The loss on batches that nothing is learnt from."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .losses import average_losses
from .step import ForwardStepFunc, batch_group


@torch.no_grad()
def evaluate(
    args: argparse.Namespace,
    forward_step_func: ForwardStepFunc,
    data_iterator: Iterator[Any],
    model: Sequence[torch.nn.Module],
) -> dict[str, float]:
    """Averages the losses over ``--eval-iters`` global batches.

    The parameters must be in place: see
    :func:`~megatron.training.step.disable_forward_pre_hook`.
    """
    (chunk,) = model
    chunk.eval()
    samples = []
    for _ in range(args.eval_iters * args.num_microbatches):
        output, loss_func = forward_step_func(data_iterator, chunk)
        samples.append(loss_func(output)[2])
    chunk.train()
    return average_losses(samples, batch_group())
