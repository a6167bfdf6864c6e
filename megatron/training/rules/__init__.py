"""The rules that flags must keep together, checked before any process group is made."""

from __future__ import annotations

import argparse

from megatron.training.flags.refused import refuse_not_yet

from .check import FlagError, flag_name, require
from .model import check_batch, check_data, check_model, check_output, check_schedule
from .parallel import check_ddp, check_optimizer, check_parallel, check_precision

__all__ = ["FlagError", "flag_name", "validate_args"]

_REQUIRED = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "micro_batch_size",
    "train_iters",
    "lr",
)


def validate_args(args: argparse.Namespace, world_size: int) -> argparse.Namespace:
    """Checks every rule and fills in what follows from other flags.

    Args:
        args: Parsed arguments; changed in place.
        world_size: Number of ranks of the job.

    Returns:
        ``args``, with ``world_size``, ``data_parallel_size``, ``num_microbatches``,
        ``params_dtype``, ``use_layer_wise_distributed_optimizer`` and every derived default set.

    Raises:
        FlagError: If flags contradict each other or a required one is missing.
    """
    args.world_size = world_size
    missing = [flag_name(dest) for dest in _REQUIRED if getattr(args, dest) is None]
    require(not missing, f"missing required flags: {', '.join(missing)}")
    try:
        refuse_not_yet(args)
    except ValueError as error:
        raise FlagError(str(error)) from None
    check_model(args)
    check_parallel(args)
    check_batch(args)
    check_schedule(args)
    check_precision(args)
    check_optimizer(args)
    check_ddp(args)
    check_data(args)
    check_output(args)
    return args
