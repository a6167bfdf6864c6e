"""Prints the README's table of flags: ``python -m megatron.training.flags``."""

from __future__ import annotations

from . import GROUPS, Flag
from .refused import NOT_YET


def flags_table() -> str:
    """Returns every flag, its default and what it does, as Markdown."""
    planned = {entry.name for entry in NOT_YET}
    lines = ["| flag | default | what it does, and what it needs |", "| --- | --- | --- |"]
    for title, flags in GROUPS.items():
        lines.append(f"| **{title}** | | |")
        for flag in flags:
            note = " *(not available yet)*" if flag.name in planned else ""
            lines.append(f"| `{_spelling(flag)}` | {_default(flag)} | {flag.help}{note} |")
    return "\n".join(lines)


def _spelling(flag: Flag) -> str:
    name = flag.name
    if flag.paired:
        name = f"{name}`, `--no-{name.removeprefix('--')}"
    elif flag.choices is not None:
        # GitHub ends a table cell at a bar, even within code.
        name += " " + "\\|".join(flag.choices)
    elif flag.type is not None:
        name += " " + (flag.metavar or ("TEXT" if flag.type is str else "N"))
    return name


def _default(flag: Flag) -> str:
    if flag.type is None:
        return "on" if flag.paired and flag.default else "off"
    return "" if flag.default is None else f"`{flag.default}`"


if __name__ == "__main__":
    print(flags_table())
