"""What a flag is, and the parsers of its values."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Flag:
    """One command-line flag.

    ``type`` of None makes a switch: given alone, it sets ``dest`` to the opposite of ``default``.
    ``paired`` adds the ``--no-`` form of a switch beside it.
    """

    name: str
    help: str
    type: Callable[[str], Any] | None = None
    default: Any = None
    choices: Sequence[str] | None = None
    nargs: str | None = None
    dest: str | None = None
    metavar: str | None = None
    paired: bool = False

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        """Declares the flag on a parser or a group of one."""
        options: dict[str, Any] = {"help": self.help.replace("%", "%%")}
        if self.dest is not None:
            options["dest"] = self.dest
        if self.type is None:
            default = bool(self.default)
            if self.paired:
                options["action"] = argparse.BooleanOptionalAction
            else:
                options["action"] = "store_false" if default else "store_true"
            parser.add_argument(self.name, default=default, **options)
            return
        for key in ("choices", "nargs", "metavar"):
            if getattr(self, key) is not None:
                options[key] = getattr(self, key)
        parser.add_argument(self.name, type=self.type, default=self.default, **options)


def whole(minimum: int) -> Callable[[str], int]:
    """Returns a parser of integers of at least ``minimum``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a whole number of at least {minimum}"
            )
        return value

    return parse


def real(
    minimum: float, below: float = float("inf"), above: bool = False
) -> Callable[[str], float]:
    """Returns a parser of finite numbers in [minimum, below), or (minimum, below) if ``above``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        low_enough = value > minimum if above else value >= minimum
        if not (low_enough and value < below):
            bound = f"above {minimum:g}" if above else f"of at least {minimum:g}"
            limit = f" and below {below:g}" if below != float("inf") else ""
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {bound}{limit}")
        return value

    return parse
