"""How a rule is stated."""

from __future__ import annotations

import os
import sys


class FlagError(ValueError):
    """Flags that cannot go together; the message names flag, value and what to change."""


def require(condition: bool, message: str) -> None:
    """Raises ``FlagError(message)`` unless ``condition`` holds."""
    if not condition:
        raise FlagError(message)


def flag_name(dest: str) -> str:
    """Returns the flag that sets an attribute of the parsed arguments."""
    return "--" + dest.replace("_", "-")


def warn_once(message: str) -> None:
    """Warns on standard error, on the first rank alone: all ranks parse the same command line."""
    if os.environ.get("RANK", "0") == "0":
        print(f"warning: {message}", file=sys.stderr)
