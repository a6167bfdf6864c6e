"""Prints the README's table of flags: ``python -m megatron.training.flags``."""

from __future__ import annotations

from . import GROUPS, Flag
from .refused import NOT_YET, NotYet


def flags_table() -> str:
    """Returns every flag, its default and what it does, as Markdown."""
    planned = {entry.name: entry for entry in NOT_YET}
    lines = ["| flag | default | what it does, and what it needs |", "| --- | --- | --- |"]
    for title, flags in GROUPS.items():
        lines.append(f"| **{title}** | | |")
        for flag in flags:
            note = _what_is_planned(flag, planned.get(flag.name))
            lines.append(f"| `{_spelling(flag)}` | {_default(flag)} | {flag.help}{note} |")
    return "\n".join(lines)


def _what_is_planned(flag: Flag, entry: NotYet | None) -> str:
    if entry is None:
        return ""
    missing = [choice for choice in flag.choices or () if choice not in entry.allowed]
    if missing and len(missing) < len(flag.choices or ()):
        return f" *({', '.join(missing)}: not available yet)*"
    numbers = [str(value) for value in entry.allowed if value is not None]
    return f" *(above {numbers[0]}: not available yet)*" if numbers else " *(not available yet)*"


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
