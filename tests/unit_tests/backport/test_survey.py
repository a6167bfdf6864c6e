"""The states of a report, on a release of three small files."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tools.backport.changes import Insert, Replace
from tools.backport.model import BUFFER, LAYER_WISE, OPTIMIZER, Code, Edit, Site
from tools.backport.survey import NotAMegatronCore, State, Survey, find_core
from tools.backport.tree import UnknownCode

RELEASE = {
    LAYER_WISE: "def tag_params_for_buffer_routing():\n    pass\n",
    OPTIMIZER: "class Optimizer:\n    def step(self):\n        go()\n        stop()\n",
    BUFFER: "def gather(data):\n    # Why.\n    send(data)\n",
}
OLDER = {**RELEASE, LAYER_WISE: "def shard():\n    pass\n"}


def _sends(code: Code) -> bool:
    return code.says(BUFFER, "gather", "send(data)")


STAGING = Edit(
    name="staging",
    does="Stage.",
    why="Nothing did.",
    marks=("stage",),
    sites=(
        Site(OPTIMIZER, "Optimizer.step", "note", Insert("go()", "note()")),
        Site(BUFFER, "gather", "stage", Insert("send(data)", "stage(data)", "before"), _sends),
    ),
)
PARITY = Edit(
    name="parity",
    does="Round.",
    why="Peers do.",
    needs_layouts=False,
    on_demand=True,
    sites=(Site(OPTIMIZER, "Optimizer.step", "round", Replace("stop()", "round()\nstop(1)")),),
)
EDITS = (STAGING, PARITY)


def digests(sources: Mapping[str, str]) -> dict[str, dict[str, dict[str, str]]]:
    known: dict[str, dict[str, dict[str, str]]] = {}
    for (path, name), digest in Survey(sources, EDITS, {}).fingerprints().items():
        known.setdefault(path, {}).setdefault(name, {})[digest] = "1.0"
    return known


KNOWN = digests(RELEASE)


def survey(sources: Mapping[str, str]) -> Survey:
    return Survey(sources, EDITS, KNOWN)


def states(sources: Mapping[str, str]) -> list[State]:
    return [finding.state for finding in survey(sources).findings]


def changed(path: str, old: str, new: str, sources: Mapping[str, str] = RELEASE) -> dict[str, str]:
    assert old in sources[path]
    return {**sources, path: sources[path].replace(old, new)}


def test_edits_are_missing_then_present_then_missing_again() -> None:
    assert states(RELEASE) == [State.MISSING, State.MISSING]
    after = survey(RELEASE).with_edits(EDITS)
    assert states(after) == [State.PRESENT, State.PRESENT]
    assert survey(after).with_edits(EDITS) == after
    assert survey(after).original == RELEASE
    assert survey(after).with_edits(()) == RELEASE


def test_places_name_file_and_line() -> None:
    found = survey(RELEASE).finding(STAGING)
    assert [(place.path, place.line) for place in found.places] == [(OPTIMIZER, 4), (BUFFER, 2)]
    after = survey(survey(RELEASE).with_edits(EDITS)).finding(PARITY)
    assert [(place.path, place.line) for place in after.places] == [(OPTIMIZER, 5)]


def test_one_edit_can_be_there_without_the_other() -> None:
    after = survey(RELEASE).with_edits([PARITY])
    assert states(after) == [State.MISSING, State.PRESENT]


def test_edits_of_layouts_do_not_apply_to_older_releases() -> None:
    assert states(OLDER) == [State.NOT_APPLICABLE, State.MISSING]
    after = survey(OLDER).with_edits(EDITS)
    assert [path for path in after if after[path] != OLDER[path]] == [OPTIMIZER]


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        (OPTIMIZER, "        stop()\n", "        stop()\n        more()\n"),
        (OPTIMIZER, "        go()\n", ""),
        (OPTIMIZER, "def step", "def leap"),
        (BUFFER, "send(data)", "send(data, 1)"),
        (BUFFER, "send(data)", "send(data"),
    ],
)
def test_code_changed_by_hand_is_unknown(path: str, old: str, new: str) -> None:
    damaged = changed(path, old, new)
    assert State.UNKNOWN in states(damaged)
    with pytest.raises(UnknownCode):
        survey(damaged).with_edits(EDITS)


@pytest.mark.parametrize(("old", "new"), [("note()", "note(1)"), ("        note()\n", "")])
def test_an_edit_changed_by_hand_is_unknown(old: str, new: str) -> None:
    after = survey(RELEASE).with_edits(EDITS)
    assert states(changed(OPTIMIZER, old, new, after))[0] is State.UNKNOWN


def test_other_code_and_comments_may_be_anything() -> None:
    other = changed(BUFFER, "# Why.", "# Because.\n")
    other[BUFFER] += "\n\ndef more():\n    return 1\n"
    assert states(other) == [State.MISSING, State.MISSING]
    after = survey(other).with_edits(EDITS)
    assert survey(after).original == other


def test_a_fix_of_its_own_is_hinted_at() -> None:
    fixed = changed(BUFFER, "    send(data)", "    stage_all(data)\n    send(data)")
    (place,) = survey(fixed).finding(STAGING).places
    assert "it may have a fix of its own" in place.note and "1.0" in place.note


def test_a_site_that_code_makes_needless_still_has_to_be_known_code() -> None:
    known = digests(changed(BUFFER, "send(data)", "deliver(data)"))
    needless = changed(BUFFER, "send(data)", "deliver(data)")
    (found, _) = Survey(needless, EDITS, known).findings
    assert found.state is State.MISSING and len(found.places) == 1
    assert states(needless)[0] is State.UNKNOWN


def test_a_missing_file_is_named() -> None:
    found = survey({path: RELEASE[path] for path in (BUFFER, OPTIMIZER)}).findings[0]
    assert found.state is State.UNKNOWN
    assert [place.path for place in found.places] == [LAYER_WISE]


@pytest.mark.parametrize("inside", ["megatron/core", "core", "."])
def test_the_core_is_found_in_a_checkout_a_package_or_by_itself(
    tmp_path: Path, inside: str
) -> None:
    for path, text in RELEASE.items():
        file = tmp_path / inside / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert find_core(tmp_path) == tmp_path / inside


def test_a_path_without_megatron_is_refused_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(NotAMegatronCore, match="is no Megatron-LM checkout"):
        find_core(tmp_path)
    with pytest.raises(NotAMegatronCore, match="unpack the wheel first"):
        find_core(tmp_path / "megatron_core-1.0-py3-none-any.whl")
