"""The command line: Megatron's flags in, checked arguments and configurations out."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch.nn.functional as F

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from .flags import GROUPS
from .flags.refused import ABSENT, NEEDLESS
from .rules import FlagError, validate_args

__all__ = [
    "add_megatron_arguments",
    "core_transformer_config_from_args",
    "get_megatron_ddp_config",
    "get_megatron_optimizer_config",
    "parse_and_validate_args",
    "parse_args",
    "validate_args",
]

USAGE_EXIT_CODE = 2

# How long the other ranks of a job wait for the first to say what is wrong with their common
# command line, before they say it themselves.
_FIRST_RANK_S = 5.0


class MegatronArgumentParser(argparse.ArgumentParser):
    """A parser that answers a mistake in one sentence, and on one rank."""

    def error(self, message: str) -> NoReturn:
        """Prints what is wrong and exits with code 2.

        All ranks read the same command line. The launcher ends a job as soon as one rank has
        ended, so the others give the first rank time to speak.
        """
        if os.environ.get("RANK", "0") != "0":
            time.sleep(_FIRST_RANK_S)
        self.exit(USAGE_EXIT_CODE, f"{self.prog}: error: {_with_suggestion(self, message)}\n")


def _with_suggestion(parser: argparse.ArgumentParser, message: str) -> str:
    """Adds the flags that look like an unknown one."""
    unknown = re.search(r"unrecognized arguments: (--[\w-]+)", message)
    if unknown is None:
        return message
    known = [name for name in parser._option_string_actions if name.startswith("--")]
    close = difflib.get_close_matches(unknown.group(1), known, n=2)
    return f"{message} (did you mean {' or '.join(close)}?)" if close else message


def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Declares every flag on ``parser``, those that are refused included."""
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            flag.add_to(group)
    for refused in ABSENT:
        refused.add_to(parser)
    for name in NEEDLESS:
        parser.add_argument(
            name, action="store_true", dest=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
    return parser


def _new_parser() -> MegatronArgumentParser:
    return MegatronArgumentParser(
        description="Pretrains a GPT.",
        allow_abbrev=False,
        formatter_class=lambda prog: _HelpFormatter(prog, width=100),
    )


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults of values; of a switch argparse would show that of what it sets."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_switch = action.nargs == 0 and not isinstance(action, argparse.BooleanOptionalAction)
        return action.help if is_switch else super()._get_help_string(action)


def parse_args(
    extra_args_provider: Callable[[argparse.ArgumentParser], Any] | None = None,
    ignore_unknown_args: bool = False,
    argv: Sequence[str] | None = None,
) -> argparse.Namespace:
    """Parses the command line without checking that flags go together.

    Args:
        extra_args_provider: Adds flags of the caller's own to the parser it is given.
        ignore_unknown_args: Leave unknown flags to others.
        argv: The command line; ``sys.argv[1:]`` by default.
    """
    return _parse(extra_args_provider, ignore_unknown_args, argv)[1]


def parse_and_validate_args(
    extra_args_provider: Callable[[argparse.ArgumentParser], Any] | None = None,
    ignore_unknown_args: bool = False,
    args_defaults: dict[str, Any] | None = None,
    argv: Sequence[str] | None = None,
) -> argparse.Namespace:
    """Parses the command line and checks every rule; a mistake exits with code 2.

    Args:
        extra_args_provider: See :func:`parse_args`.
        ignore_unknown_args: See :func:`parse_args`.
        args_defaults: Values for arguments that are None.
        argv: See :func:`parse_args`.

    Returns:
        Checked arguments: see :func:`~megatron.training.rules.validate_args`.
    """
    parser, args = _parse(extra_args_provider, ignore_unknown_args, argv)
    for name, value in (args_defaults or {}).items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    try:
        return validate_args(args, int(os.environ.get("WORLD_SIZE", "1")))
    except FlagError as error:
        parser.error(str(error))


def _parse(
    extra_args_provider: Callable[[argparse.ArgumentParser], Any] | None,
    ignore_unknown_args: bool,
    argv: Sequence[str] | None,
) -> tuple[MegatronArgumentParser, argparse.Namespace]:
    parser = add_megatron_arguments(_new_parser())
    if extra_args_provider is not None:
        extra_args_provider(parser)
    argv = sys.argv[1:] if argv is None else argv
    if ignore_unknown_args:
        args, _ = parser.parse_known_args(argv)
    else:
        args = parser.parse_args(argv)
    assert isinstance(parser, MegatronArgumentParser)
    return parser, args


def _fields_from_args(config_class: type, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments that a configuration has fields of the same name for."""
    return {
        field.name: getattr(args, field.name)
        for field in dataclasses.fields(config_class)
        if hasattr(args, field.name)
    }


def core_transformer_config_from_args(
    args: argparse.Namespace, config_class: type[TransformerConfig] = TransformerConfig
) -> TransformerConfig:
    """Returns the model's configuration from checked arguments."""
    options = _fields_from_args(config_class, args)
    options["layernorm_epsilon"] = args.norm_epsilon
    options["num_moe_experts"] = args.num_experts
    options["fp8"] = args.fp8_format
    options["fp8_param"] = args.fp8_param_gather
    if options["num_query_groups"] is None:
        options["num_query_groups"] = args.num_attention_heads
    if args.swiglu:
        options["gated_linear_unit"] = True
        options["activation_func"] = F.silu
    return config_class(**options)


def get_megatron_optimizer_config(args: argparse.Namespace) -> OptimizerConfig:
    """Returns the optimizers' configuration from checked arguments."""
    return OptimizerConfig(**_fields_from_args(OptimizerConfig, args))


def get_megatron_ddp_config(args: argparse.Namespace) -> DistributedDataParallelConfig:
    """Returns the configuration of buffers and reductions from checked arguments."""
    options = _fields_from_args(DistributedDataParallelConfig, args)
    options["grad_reduce_in_fp32"] = args.accumulate_allreduce_grads_in_fp32
    options["check_for_nan_in_grad"] = args.check_for_nan_in_loss_and_grad
    # Under the padded layout the layer-wise optimizer's gradients are reduce-scattered too.
    legacy = args.use_layer_wise_distributed_optimizer and not args.use_layer_wise_param_layout
    options["use_distributed_optimizer"] = args.has_distributed_optimizer and not legacy
    options["bucket_size"] = args.ddp_bucket_size
    options["num_buckets"] = args.ddp_num_buckets
    options["pad_buckets_for_high_nccl_busbw"] = args.ddp_pad_buckets_for_high_nccl_busbw
    options["reduce_scatter_with_fp32_accumulation"] = (
        args.ddp_reduce_scatter_with_fp32_accumulation
    )
    options["average_in_collective"] = args.ddp_average_in_collective
    return DistributedDataParallelConfig(**options)
