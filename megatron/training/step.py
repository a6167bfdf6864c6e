"""One training step: forward and backward over all microbatches, reductions, update."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core import parallel_state
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from .failure import PlainError
from .losses import SampleLosses, average_losses

# From the model's output: the loss summed over tokens, the number of tokens that count, and the
# losses of the single samples.
LossFunc = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, SampleLosses]]
ForwardStepFunc = Callable[[Iterator[Any], torch.nn.Module], tuple[torch.Tensor, LossFunc]]


@dataclass(frozen=True)
class StepResult:
    """What a training step reports.

    Attributes:
        losses: Averages over the tokens of the global batch.
        skipped: Whether the update was left out (NaN or Inf among the gradients).
        grad_norm: Global 2-norm of the gradients before clipping.
        num_zeros: Zeros among the gradients, if they were counted.
    """

    losses: dict[str, float]
    skipped: bool
    grad_norm: float | None
    num_zeros: int | None


def train_step(
    args: argparse.Namespace,
    forward_step_func: ForwardStepFunc,
    data_iterator: Iterator[Any],
    model: Sequence[Any],
    optimizer: MegatronOptimizer,
    opt_param_scheduler: OptimizerParamScheduler,
    gather_aligned: bool = False,
) -> StepResult:
    """Runs one iteration.

    Args:
        args: Checked arguments.
        forward_step_func: Runs the model on one microbatch.
        data_iterator: This rank's microbatches.
        model: Wrapped chunks.
        optimizer: Steps on the reduced gradients.
        opt_param_scheduler: Advances by the global batch, unless the update was skipped.
        gather_aligned: Start the gathers of all parameters now, rather than one ahead of another.
    """
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    if gather_aligned:
        for chunk in model:
            chunk.start_param_sync()

    samples, num_tokens = forward_backward(args, forward_step_func, data_iterator, model, optimizer)
    finalize_model_grads(model, num_tokens if args.calculate_per_token_loss else None)
    updated, grad_norm, num_zeros = optimizer.step()
    if updated:
        opt_param_scheduler.step(increment=args.global_batch_size)

    losses = average_losses(samples, batch_group())
    return StepResult(losses, not updated, grad_norm, num_zeros)


def forward_backward(
    args: argparse.Namespace,
    forward_step_func: ForwardStepFunc,
    data_iterator: Iterator[Any],
    model: Sequence[Any],
    optimizer: MegatronOptimizer,
) -> tuple[list[SampleLosses], torch.Tensor]:
    """Accumulates the gradients of all microbatches; only the last one's start reductions.

    Returns:
        The losses of this rank's samples, and the number of their tokens.
    """
    (chunk,) = model
    samples = []
    token_counts = []
    for index in range(args.num_microbatches):
        last = index == args.num_microbatches - 1
        with contextlib.nullcontext() if last else chunk.no_sync():
            output, loss_func = forward_step_func(data_iterator, chunk)
            loss_sum, tokens, losses = loss_func(output)
            if args.check_for_nan_in_loss_and_grad:
                _check_loss(args, loss_sum, index)
            loss = loss_sum
            if not args.calculate_per_token_loss:
                loss = loss_sum / tokens.clamp(min=1) / args.num_microbatches
            optimizer.scale_loss(loss).backward()
        samples.append(losses)
        token_counts.append(tokens)
    return samples, torch.stack(token_counts).sum()


def _check_loss(args: argparse.Namespace, loss: torch.Tensor, microbatch: int) -> None:
    value = float(loss.detach())
    if not math.isfinite(value):
        raise PlainError(
            f"the loss of microbatch {microbatch} on rank {args.rank} is {value}; look for bad data "
            "or too high a learning rate, or go on with --no-check-for-nan-in-loss-and-grad, which "
            "skips such steps"
        )


def batch_group() -> torch.distributed.ProcessGroup | None:
    """Returns the ranks that read batches of their own, GTP peers among them."""
    return parallel_state.get_data_parallel_group()


def enable_forward_pre_hook(model_chunks: Sequence[Any]) -> None:
    """From now on, parameters are gathered as the forward pass reaches them."""
    for chunk in model_chunks:
        chunk.enable_forward_pre_hook()


def disable_forward_pre_hook(model_chunks: Sequence[Any], param_sync: bool = True) -> None:
    """From now on, parameters are what they are; with ``param_sync``, freshly gathered first."""
    for chunk in model_chunks:
        chunk.disable_forward_pre_hook(param_sync=param_sync)
