"""The command line: ``check``, ``apply``, ``revert``, ``fingerprints``."""

from __future__ import annotations

import argparse
import difflib
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from tools.backport.model import Edit
from tools.backport.survey import Finding, NotAMegatronCore, State, Survey, find_core
from tools.backport.tree import MissingLibCST, split_lines
from tools.backport.writing import CannotWrite, Checkout, write_all

SUCCESS, INCOMPLETE, REFUSED = 0, 1, 2


class Refused(Exception):
    """Nothing was changed; the message says why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command on every path.

    Returns:
        0 when all went well; 1 when ``check`` found edits missing; 2 when a path was refused.
    """
    options = _parser().parse_args(arguments)
    worst = SUCCESS
    for path in options.paths:
        try:
            core = find_core(path)
            survey = Survey.of(core)
            if options.command == "check":
                result = _check(core, survey)
            elif options.command == "apply":
                result = _apply(core, survey, options)
            elif options.command == "revert":
                result = _revert(core, survey, options)
            else:
                result = _fingerprints(core, survey)
        except (Refused, NotAMegatronCore, CannotWrite, MissingLibCST) as error:
            print(error, file=sys.stderr)
            result = REFUSED
        worst = max(worst, result)
    return worst


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.backport",
        description="Brings the fix for MXFP8 primary weights under Muon to released Megatron-LM.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="say of every edit whether it is there")
    apply = commands.add_parser("apply", help="make the edits that are missing")
    revert = commands.add_parser("revert", help="undo the edits, back to the original bytes")
    fingerprints = commands.add_parser(
        "fingerprints", help="print the digests by which this tool would know the code"
    )
    for command in (check, apply, revert, fingerprints):
        command.add_argument(
            "paths",
            nargs="+",
            type=Path,
            metavar="PATH",
            help="a Megatron-LM checkout, an unpacked wheel or an installed megatron/core",
        )
    apply.add_argument(
        "--legacy-parity",
        action="store_true",
        help="also make owners in the legacy layout install the BF16 rounding of their masters",
    )
    for command in (apply, revert):
        command.add_argument(
            "--dry-run", action="store_true", help="print a unified diff and change nothing"
        )
        command.add_argument(
            "--commit", action="store_true", help="commit the changed files, and nothing else"
        )
    return parser


def _check(core: Path, survey: Survey) -> int:
    print(core)
    for finding in survey.findings:
        _print_finding(finding)
    states = {finding.state for finding in survey.findings if not finding.edit.on_demand}
    if any(finding.state is State.UNKNOWN for finding in survey.findings):
        return REFUSED
    return INCOMPLETE if State.MISSING in states else SUCCESS


def _print_finding(finding: Finding) -> None:
    demand = " (on demand: --legacy-parity)" if finding.edit.on_demand else ""
    print(f"  {finding.state.value:<15} {finding.edit.name}{demand}")
    for place in finding.places:
        line = f":{place.line}" if place.line else ""
        print(f"      {place.path}{line}: {place.note}")


def _apply(core: Path, survey: Survey, options: argparse.Namespace) -> int:
    _refuse_unknown(core, survey)
    present = [finding.edit for finding in survey.findings if finding.state is State.PRESENT]
    wanted = [
        finding.edit
        for finding in survey.findings
        if finding.state is State.MISSING and (options.legacy_parity or not finding.edit.on_demand)
    ]
    if not wanted:
        print(f"{core}: nothing to do, every edit that applies is there")
        return SUCCESS
    after = survey.with_edits([*present, *wanted])
    _verify(core, survey, after, [*present, *wanted])
    _finish(core, survey, after, options, _apply_message(wanted), "made", wanted)
    return SUCCESS


def _revert(core: Path, survey: Survey, options: argparse.Namespace) -> int:
    _refuse_unknown(core, survey)
    present = [finding.edit for finding in survey.findings if finding.state is State.PRESENT]
    if not present:
        print(f"{core}: nothing to do, none of the edits is there")
        return SUCCESS
    message = "Undo the backport of MXFP8 primary weights under the layer-wise optimizer\n"
    _finish(core, survey, survey.original, options, message, "undone", present)
    return SUCCESS


def _refuse_unknown(core: Path, survey: Survey) -> None:
    unknown = [finding for finding in survey.findings if finding.state is State.UNKNOWN]
    if not unknown:
        return
    places = {
        f"  {core / place.path}{f':{place.line}' if place.line else ''}: {place.note}": None
        for finding in unknown
        for place in finding.places
    }
    raise Refused("\n".join((f"{core}: this is not the code that this tool knows", *places)))


def _verify(core: Path, survey: Survey, after: dict[str, str], edits: list[Edit]) -> None:
    """Sees that the result compiles, shows the edits, and leads back to the original."""
    for path, text in after.items():
        compile(text, str(core / path), "exec")
    result = Survey(after)
    if result.original != survey.original or any(
        result.finding(edit).state is not State.PRESENT for edit in edits
    ):
        raise Refused(f"{core}: the edits do not fit together here; please report this release")


def _finish(
    core: Path,
    survey: Survey,
    after: dict[str, str],
    options: argparse.Namespace,
    message: str,
    verb: str,
    edits: list[Edit],
) -> None:
    changed = {core / path: text for path, text in after.items() if text != survey.sources[path]}
    if options.dry_run:
        for file, text in changed.items():
            path = file.relative_to(core).as_posix()
            before, after_lines = split_lines(survey.sources[path]), split_lines(text)
            names = (f"a/megatron/core/{path}", f"b/megatron/core/{path}")
            sys.stdout.writelines(difflib.unified_diff(before, after_lines, *names))
        return
    if not options.commit:
        write_all(changed)
    else:
        checkout = Checkout(core)
        checkout.check_committed(list(changed))
        write_all(changed)
        try:
            commit = checkout.commit(list(changed), message)
        except CannotWrite:
            write_all({file: survey.sources[file.relative_to(core).as_posix()] for file in changed})
            raise
    print(f"{core}: {verb}: {', '.join(edit.name for edit in edits)}")
    for file in changed:
        print(f"  {file.relative_to(core).as_posix()}")
    if options.commit:
        print(f"  committed as {commit}")


def _apply_message(edits: list[Edit]) -> str:
    title = "Fix MXFP8 primary weights under the layer-wise optimizer"
    if all(edit.on_demand for edit in edits):
        title = "Give all ranks the same MXFP8 weights in the legacy layer-wise layout"
    points = (f"- {edit.name}: {edit.does} {edit.why}" for edit in edits)
    wrapped = (textwrap.fill(point, width=72, subsequent_indent="  ") for point in points)
    return "\n".join((title, "", *wrapped)) + "\n"


def _fingerprints(core: Path, survey: Survey) -> int:
    print(core)
    for (path, name), digest in survey.fingerprints().items():
        print(f"  {digest}  {path}  {name}")
    return SUCCESS
