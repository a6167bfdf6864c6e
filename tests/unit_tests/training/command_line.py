"""A command line that is right, for tests that change one thing about it."""

from __future__ import annotations

import argparse

from megatron.training.arguments import parse_and_validate_args

MODEL = {
    "--num-layers": "2",
    "--hidden-size": "64",
    "--num-attention-heads": "4",
    "--seq-length": "32",
    "--max-position-embeddings": "32",
    "--micro-batch-size": "2",
    "--global-batch-size": "8",
    "--train-iters": "3",
    "--lr": "1e-3",
}


def command_line(*changes: str) -> list[str]:
    """Returns a small job's command line; a flag in ``changes`` replaces its value here.

    ``-flag`` in place of ``--flag`` leaves a flag out.
    """
    flags = dict(MODEL)
    rest = []
    position = 0
    while position < len(changes):
        flag = changes[position]
        if flag.startswith("-") and not flag.startswith("--"):
            del flags[f"-{flag}"]
            position += 1
        elif flag in flags:
            flags[flag] = changes[position + 1]
            position += 2
        else:
            rest.append(flag)
            position += 1
    return [word for pair in flags.items() for word in pair] + rest


def parse(*changes: str) -> argparse.Namespace:
    """Parses and checks :func:`command_line`."""
    return parse_and_validate_args(argv=command_line(*changes))
