"""The training loop."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.audit import ParamSyncError, audit_param_sync
from megatron.core.optimizer.masters import master_sha256
from megatron.core.optimizer_param_scheduler import (
    OptimizerParamScheduler,
    get_canonical_lr_for_logging,
)

from .evaluation import evaluate
from .failure import PlainError, errors_are_the_users
from .initialize import initialize_megatron, leave_job
from .model_setup import (
    ModelProvider,
    get_model,
    get_optimizer_param_scheduler,
    setup_model_and_optimizer,
    wrap_model_chunks_with_ddp,
)
from .reports import Reporter
from .step import (
    ForwardStepFunc,
    StepResult,
    disable_forward_pre_hook,
    enable_forward_pre_hook,
    train_step,
)

__all__ = [
    "DataIterators",
    "StepResult",
    "disable_forward_pre_hook",
    "enable_forward_pre_hook",
    "evaluate",
    "get_model",
    "get_optimizer_param_scheduler",
    "pretrain",
    "setup_model_and_optimizer",
    "train",
    "train_step",
    "wrap_model_chunks_with_ddp",
]


@dataclass
class DataIterators:
    """This rank's microbatches of each split; None for a split that is empty."""

    train: Iterator[Any]
    valid: Iterator[Any] | None = None
    test: Iterator[Any] | None = None


def pretrain(
    args: argparse.Namespace,
    data_iterators_provider: Callable[[argparse.Namespace], DataIterators],
    model_provider: ModelProvider,
    forward_step_func: ForwardStepFunc,
) -> None:
    """Joins the job, builds data, model and optimizer, trains, and leaves the job.

    Where ``torch.distributed`` is initialised already, the world is the caller's to take down.

    Args:
        args: Checked arguments.
        data_iterators_provider: Opens the data; what the model needs to know of it (such as the
            size of the vocabulary) it sets on ``args``.
        model_provider: Builds the model.
        forward_step_func: Runs the model on one microbatch.

    Raises:
        PlainError: If data or outputs cannot be opened, or an audit finds a difference.
    """
    joins = not dist.is_initialized()
    initialize_megatron(args)
    with errors_are_the_users():
        data = data_iterators_provider(args)
    reporter = Reporter(args)
    model, optimizer, scheduler = setup_model_and_optimizer(args, model_provider)
    _describe(args, model, reporter)
    train(args, forward_step_func, data, model, optimizer, scheduler, reporter)
    digest = None
    if args.metrics_jsonl is not None:
        digest = master_sha256(optimizer, model)
    reporter.finish(digest)
    if joins:
        # What refers to the process groups goes first, so that they end here.
        del data, model, optimizer, scheduler, reporter
        leave_job()


def _describe(
    args: argparse.Namespace, model: Sequence[torch.nn.Module], reporter: Reporter
) -> None:
    numel = sum(param.numel() for chunk in model for param in chunk.parameters())
    optimizer = args.optimizer
    if args.use_layer_wise_distributed_optimizer:
        optimizer += f", layer-wise ({args.layer_wise_param_layout} layout)"
    elif args.use_distributed_optimizer:
        optimizer += ", distributed"
    dtype = str(args.params_dtype).removeprefix("torch.")
    if args.fp8_format is not None:
        dtype += ", linear layers in MXFP8"
        dtype += " and their weights too" if args.fp8_param_gather else ""
    reporter.print(
        f"{numel:,} parameters in {dtype} | "
        f"{args.world_size} rank(s) on {args.device.type} with {args.distributed_backend} | "
        f"optimizer: {optimizer} | global batch {args.global_batch_size} = "
        f"{args.micro_batch_size} x {args.data_parallel_size} x {args.num_microbatches}"
    )


def train(
    args: argparse.Namespace,
    forward_step_func: ForwardStepFunc,
    data: DataIterators,
    model: Sequence[Any],
    optimizer: MegatronOptimizer,
    opt_param_scheduler: OptimizerParamScheduler,
    reporter: Reporter,
) -> None:
    """Trains for ``--train-iters`` iterations, with evaluations on the way and at the end.

    With ``--overlap-param-gather`` the model comes with its forward pre-hooks on. They are off
    whenever every rank has its weights already, and go on with the next update: at first the
    initial weights are in place, and an evaluation, like the end, has them gathered at once.
    """
    hooked = False
    if args.overlap_param_gather:
        disable_forward_pre_hook(model, param_sync=False)
    for chunk in model:
        chunk.train()

    evaluating = args.eval_interval is not None and args.eval_iters > 0
    iteration = 0
    while iteration < args.train_iters:
        started = time.perf_counter()
        learning_rate = _learning_rate(optimizer)
        loss_scale = float(optimizer.get_loss_scale())
        result = train_step(
            args,
            forward_step_func,
            data.train,
            model,
            optimizer,
            opt_param_scheduler,
            gather_aligned=hooked and args.align_param_gather,
        )
        elapsed_ms = (time.perf_counter() - started) * 1000.0
        iteration += 1
        leaving = iteration == args.train_iters or (
            args.exit_interval is not None and iteration % args.exit_interval == 0
        )
        due = evaluating and (leaving or iteration % args.eval_interval == 0)
        if args.overlap_param_gather and not hooked and not result.skipped:
            enable_forward_pre_hook(model)
            hooked = True
        interval = args.check_param_sync_interval
        if interval is not None and iteration % interval == 0:
            _audit(model, optimizer, iteration, reporter)
        reporter.iteration(iteration, result, learning_rate, loss_scale, elapsed_ms, leaving)
        if hooked and (due or leaving):
            disable_forward_pre_hook(model, param_sync=True)
            hooked = False
        if due:
            _evaluate_splits(args, forward_step_func, data, model, iteration, leaving, reporter)
        if leaving:
            break


def _audit(
    model: Sequence[Any], optimizer: MegatronOptimizer, iteration: int, reporter: Reporter
) -> None:
    started = time.perf_counter()
    try:
        audit_param_sync(model, optimizer)
    except ParamSyncError as error:
        raise PlainError(f"audit after iteration {iteration}: {error}") from error
    reporter.print(f" audit at iteration {iteration} | every rank holds what the owners computed |")
    reporter.interval.started += time.perf_counter() - started


def _learning_rate(optimizer: MegatronOptimizer) -> float:
    """The rate that the next step will use, of parameters without a rate of their own."""
    rate = get_canonical_lr_for_logging(optimizer.param_groups)
    return float(optimizer.param_groups[0]["lr"] if rate is None else rate)


def _evaluate_splits(
    args: argparse.Namespace,
    forward_step_func: ForwardStepFunc,
    data: DataIterators,
    model: Sequence[Any],
    iteration: int,
    leaving: bool,
    reporter: Reporter,
) -> None:
    started = time.perf_counter()
    if data.valid is not None:
        losses = evaluate(args, forward_step_func, data.valid, model)
        reporter.evaluation("validation loss", iteration, losses)
    if leaving and data.test is not None:
        losses = evaluate(args, forward_step_func, data.test, model)
        reporter.evaluation("test loss", iteration, losses)
    reporter.interval.started += time.perf_counter() - started
