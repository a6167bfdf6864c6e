"""Trains with released Megatron-core before and after the backport, and compares ON with OFF.

    python -m tests.functional_tests.backport.prove --versions 0.18.2 0.19.2

ON keeps MXFP8 primary weights and gathers them through gradient memory; OFF keeps BF16 primary
weights and quantises them on the fly. They must agree bit for bit: every loss, the FP32 masters
at the start and every weight at the end, on every rank. The command exits with 1 where they do not
after the backport.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.functional_tests.backport.rank_server import RankServer, RunFailed
from tests.functional_tests.backport.recipe import Outcome, Run
from tests.functional_tests.backport.releases import DEFAULT_FOLDER, VERSIONS, edited, original
from tools.backport.edits import EDITS

PADDED = {
    "padded": Run(),
    "padded, overlap": Run(overlap=True),
    "padded, 4 ranks": Run(ranks=4),
    "padded, 4 ranks, overlap": Run(ranks=4, overlap=True),
    "padded, BF16 gradients": Run(grads_in_fp32=False),
    "padded, BF16 gradients, 2 microbatches, overlap": Run(
        grads_in_fp32=False, microbatches=2, overlap=True
    ),
    "padded, forced syncs, overlap": Run(overlap=True, force_sync_after=(1, 2, 5)),
    "padded, 1 rank": Run(ranks=1),
    "mixed group": Run(single_group=True, matrices_first=True),
    "mixed group, overlap": Run(single_group=True, matrices_first=True, overlap=True),
    "mixed group, 4 ranks": Run(single_group=True, matrices_first=True, ranks=4),
    "MXFP8 of both owners": Run(quantized_output=True),
    "MXFP8 of both owners, overlap": Run(quantized_output=True, overlap=True),
    "experts": Run(experts=True),
    "experts, overlap": Run(experts=True, overlap=True),
    "BF16 and MXFP8 of Muon": Run(plain_down=True, readers=2),
    "BF16 and MXFP8 of Muon, overlap": Run(plain_down=True, readers=2, overlap=True),
}
LEGACY = {
    "legacy": Run(layout="legacy"),
    "legacy, 4 ranks": Run(layout="legacy", ranks=4, readers=2),
    "legacy, 1 rank": Run(layout="legacy", ranks=1),
}
LEGACY_OVERLAP = {
    "legacy, overlap": Run(layout="legacy", overlap=True),
    "legacy, 4 ranks, overlap": Run(layout="legacy", ranks=4, readers=2, overlap=True),
}
SHOWN_STEPS = (0, 1, 2, 4, 9)


def configurations(version: str) -> dict[str, Run]:
    """What can be run with this release, by name."""
    if version.startswith("0.16"):
        return LEGACY
    if version.startswith("0.17"):
        return {**LEGACY, **LEGACY_OVERLAP}
    return {**PADDED, **LEGACY, **LEGACY_OVERLAP}


def attempt(server: RankServer, tree: Path, run: Run) -> list[Outcome] | RunFailed:
    """The outcomes, or what went wrong."""
    try:
        return server.run(tree, run)[0]
    except RunFailed as failure:
        return failure


def difference(on: list[Outcome] | RunFailed, off: list[Outcome] | RunFailed) -> str:
    """What parts ON from OFF, in words; empty where they agree bit for bit."""
    if isinstance(on, RunFailed):
        return str(on)
    if isinstance(off, RunFailed):
        return f"OFF failed: {off}"
    found = []
    first, reference = on[0].losses, off[0].losses
    steps = [step for step, loss in enumerate(first) if loss != reference[step]]
    if steps:
        largest = max(
            (abs(a - b) for a, b in zip(first, reference, strict=True) if a == a), default=0.0
        )
        finite = all(loss == loss for loss in first)
        found.append(
            f"loss differs from step {steps[0]}, "
            + (f"by up to {largest:.1e}" if finite else "and is NaN")
        )
    seeds = [
        name
        for mine, theirs in zip(on, off, strict=True)
        for name in mine.masters.keys() & theirs.masters.keys()
        if mine.masters[name] != theirs.masters[name]
    ]
    if seeds:
        found.append(f"{len(seeds)} masters start elsewhere")
    if on[0].own_gathers:
        found.append("the optimizer gathers beside the gradient memory")
    leftovers = {name for outcome in on for name in outcome.unseeded}
    if leftovers:
        found.append(f"{len(leftovers)} weights keep their initial value")
    for words, pairs in (
        ("from rank to rank", [(on[0], outcome) for outcome in on[1:]]),
        ("from OFF's", list(zip(on, off, strict=True))),
    ):
        strange = {n for a, b in pairs for n in a.weights if a.weights[n] != b.weights[n]}
        if strange:
            found.append(f"{len(strange)} of {len(on[0].weights)} weights differ {words}")
    return "; ".join(found)


@dataclass(frozen=True)
class Row:
    """One configuration of one release; ``after`` is empty where ON equals OFF."""

    version: str
    name: str
    off: list[Outcome] | RunFailed
    off_before: list[Outcome] | RunFailed
    before: list[Outcome] | RunFailed
    after: str

    def lines(self) -> Iterator[str]:
        """The row as text."""
        yield f"{self.version}  {self.name}"
        yield f"    OFF         {_losses(self.off)}"
        changed = difference(self.off_before, self.off)
        if changed:
            yield f"    OFF before  {_losses(self.off_before)}"
            yield f"                {changed}"
        yield f"    ON before   {_losses(self.before)}"
        if not isinstance(self.before, RunFailed):
            yield f"                {difference(self.before, self.off) or '= OFF bit for bit'}"
        yield f"    ON after    {self.after or '= OFF bit for bit'}"


def _losses(outcomes: list[Outcome] | RunFailed) -> str:
    if isinstance(outcomes, RunFailed):
        return str(outcomes)
    losses = outcomes[0].losses
    return "  ".join(f"{losses[step]:.4f}" for step in SHOWN_STEPS if step < len(losses))


def prove(version: str, names: list[str], folder: Path, without: str | None) -> Iterator[Row]:
    """One row per configuration of this release; all where ``names`` is empty."""
    before = original(version, folder)
    with tempfile.TemporaryDirectory() as scratch, RankServer() as server:
        after = edited(before, Path(scratch) / version, without)
        for name, run in configurations(version).items():
            if names and name not in names:
                continue
            off = attempt(server, after, run.off())
            yield Row(
                version,
                name,
                off,
                attempt(server, before, run.off()),
                attempt(server, before, run),
                difference(attempt(server, after, run), off),
            )


def main(arguments: list[str] | None = None) -> int:
    """Prints the table; 1 where ON and OFF differ after the backport."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--versions", nargs="+", default=VERSIONS, metavar="VERSION")
    parser.add_argument(
        "--configurations",
        nargs="+",
        default=[],
        metavar="NAME",
        choices=[*PADDED, *LEGACY, *LEGACY_OVERLAP],
        help="names as printed; all by default",
    )
    parser.add_argument(
        "--releases",
        type=Path,
        default=DEFAULT_FOLDER,
        help="folder for wheels, fetched through pip where they are not there (%(default)s)",
    )
    parser.add_argument(
        "--without",
        choices=[edit.name for edit in EDITS],
        help="leave this edit out, to see what it is for",
    )
    options = parser.parse_args(arguments)
    print(f"losses at steps {', '.join(map(str, SHOWN_STEPS))}\n")
    failed = 0
    for version in options.versions:
        for row in prove(version, options.configurations, options.releases, options.without):
            failed += bool(row.after)
            print("\n".join(row.lines()), flush=True)
    print(f"\n{failed} configurations differ" if failed else "\nON = OFF everywhere")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
