"""Real Megatron-core trains: before the backport ON parts from OFF, after it they are equal.

A part of ``python -m tests.functional_tests.backport.prove``, which runs everything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.functional_tests.backport.prove import (
    LEGACY,
    LEGACY_OVERLAP,
    PADDED,
    attempt,
    difference,
)
from tests.functional_tests.backport.rank_server import RankServer, RunFailed
from tests.functional_tests.backport.recipe import Outcome, Run
from tests.functional_tests.backport.releases import edited
from tools.backport.edits import EDITS

STEPS = 4
ALL = {
    name: replace(run, steps=STEPS) for name, run in {**PADDED, **LEGACY, **LEGACY_OVERLAP}.items()
}


class Trainer:
    """Trains with releases, before and after the backport, each run once."""

    def __init__(self, release_at: Callable[[str], Path], folder: Path) -> None:
        self._release_at, self._folder = release_at, folder
        self._server = RankServer()
        self._outcomes: dict[tuple[str, str, Run], list[Outcome] | RunFailed] = {}

    def __call__(self, version: str, run: Run, without: str = "") -> list[Outcome] | RunFailed:
        """Outcomes by rank.

        Args:
            version: Of the release.
            run: What to train.
            without: Name of an edit to leave out, or ``everything``.
        """
        key = (version, without, run)
        if key not in self._outcomes:
            self._outcomes[key] = attempt(self._server, self._tree(version, without), run)
        return self._outcomes[key]

    def both(self, version: str, run: Run) -> tuple[list[Outcome], list[Outcome]]:
        """Outcomes of ON and of OFF after the backport, trained in the same processes."""
        on, off = self._server.run(self._tree(version, ""), run, run.off())
        self._outcomes[version, "", run], self._outcomes[version, "", run.off()] = on, off
        return on, off

    def _tree(self, version: str, without: str) -> Path:
        tree = self._release_at(version)
        copy = self._folder / f"{version} {without}"
        if without == "everything":
            return tree
        return copy if copy.exists() else edited(tree, copy, without)

    def close(self) -> None:
        self._server.close()


@pytest.fixture(scope="module")
def train(
    release_at: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trainer]:
    trainer = Trainer(release_at, tmp_path_factory.mktemp("edited"))
    yield trainer
    trainer.close()


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("0.19.2", "padded"),
        ("0.19.2", "padded, overlap"),
        ("0.19.2", "padded, 4 ranks, overlap"),
        ("0.19.2", "padded, BF16 gradients, 2 microbatches, overlap"),
        ("0.19.2", "padded, forced syncs, overlap"),
        ("0.19.2", "mixed group"),
        ("0.19.2", "mixed group, overlap"),
        ("0.19.2", "MXFP8 of both owners"),
        ("0.19.2", "legacy"),
        ("0.19.2", "legacy, overlap"),
        ("0.19.0", "padded"),
        ("0.18.2", "padded"),
        ("0.18.2", "padded, overlap"),
        ("0.18.2", "mixed group"),
        ("0.18.2", "legacy, overlap"),
        ("0.17.1", "legacy, overlap"),
        ("0.16.1", "legacy"),
    ],
)
def test_on_equals_off_after_the_backport(version: str, name: str, train: Trainer) -> None:
    assert difference(*train.both(version, ALL[name])) == ""


def test_overlap_changes_nothing_but_time(train: Trainer) -> None:
    off, on = train("0.19.2", ALL["padded"]), train("0.19.2", ALL["padded, overlap"])
    assert not isinstance(off, RunFailed) and not isinstance(on, RunFailed)
    assert off[0].losses == on[0].losses and off[0].weights == on[0].weights


@pytest.mark.parametrize(
    ("version", "name", "words"),
    [
        ("0.19.2", "padded", "loss differs"),
        ("0.19.2", "padded, overlap", "loss differs"),
        ("0.19.2", "legacy, overlap", "weights differ from rank to rank"),
        ("0.18.2", "padded", "_copy_main_params_to_param_buffer"),
    ],
)
def test_on_parts_from_off_before_it(version: str, name: str, words: str, train: Trainer) -> None:
    run = ALL[name]
    on = train(version, run, without="everything")
    assert words in difference(on, train(version, run.off()))


def test_off_was_right_before_it(train: Trainer) -> None:
    off = ALL["padded"].off()
    assert difference(train("0.19.2", off, without="everything"), train("0.19.2", off)) == ""


def test_a_mixed_group_was_wrong_without_quantised_weights_too(train: Trainer) -> None:
    off = ALL["mixed group"].off()
    told = difference(train("0.19.2", off, without="everything"), train("0.19.2", off))
    assert "loss differs" in told and "weights differ from rank to rank" in told


WITHOUT = {
    "layer-wise optimizer": ("legacy", "the optimizer gathers beside the gradient memory"),
    "staging in the bucket": ("padded, overlap", "loss differs"),
    "bucket partitioning": ("padded", "weights differ from rank to rank"),
    "master seeding": ("padded", "masters start elsewhere"),
    "legacy parity": ("legacy, overlap", "weights differ from rank to rank"),
}


@pytest.mark.parametrize("edit", [edit.name for edit in EDITS])
def test_every_edit_is_needed(edit: str, train: Trainer) -> None:
    name, words = WITHOUT[edit]
    run = ALL[name]
    assert words in difference(train("0.19.2", run, without=edit), train("0.19.2", run.off()))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("no_master", "owns it but has no fp32 main param"),
        ("small_master", "its fp32 main param has 1 elements"),
        ("split", "is split across shards"),
    ],
)
def test_what_cannot_be_staged_is_named(damage: str, words: str, train: Trainer) -> None:
    told = str(train("0.19.2", Run(steps=2, damage=damage)))
    assert re.match(r"RuntimeError: Param blocks\.\d\.\w+\.weight cannot be staged", told)
    assert words in told
