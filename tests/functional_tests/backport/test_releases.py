"""The tool on the real files of five releases: what it says, what it changes, what it refuses."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.functional_tests.backport.releases import VERSIONS
from tools.backport.cli import INCOMPLETE, REFUSED, SUCCESS, main
from tools.backport.edits import EDITS
from tools.backport.model import BUFFER, LAYER_WISE, OPTIMIZER
from tools.backport.survey import PATHS, State, Survey, find_core
from tools.backport.tree import UnknownCode

LEGACY_ONLY = ("0.16.1", "0.17.1")


@pytest.fixture
def copy_of(release_at: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A folder with the three files of a release that the tool edits."""

    def copied(version: str) -> Path:
        core = find_core(release_at(version))
        for path in PATHS:
            file = tmp_path / "megatron" / "core" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(core / path, file)
        return tmp_path

    return copied


def contents(folder: Path) -> dict[str, bytes]:
    return {path: (find_core(folder) / path).read_bytes() for path in PATHS}


@pytest.mark.parametrize("version", VERSIONS)
def test_edits_are_made_once_and_undone_to_the_same_bytes(
    version: str, release_at: Callable[[str], Path]
) -> None:
    core = find_core(release_at(version))
    before = Survey.of(core)
    applies = State.NOT_APPLICABLE if version in LEGACY_ONLY else State.MISSING
    assert [finding.state for finding in before.findings] == [
        *(applies, applies, applies, State.MISSING, State.MISSING)
    ]
    after_texts = before.with_edits(EDITS)
    for path, text in after_texts.items():
        compile(text, path, "exec")
    after = Survey(after_texts)
    assert [finding.state for finding in after.findings if finding.state != applies] == [
        State.PRESENT
    ] * sum(finding.state is State.MISSING for finding in before.findings)
    assert after.with_edits(EDITS) == after_texts
    assert after.original == before.sources
    assert {p: t.encode() for p, t in after.original.items()} == {
        path: (core / path).read_bytes() for path in PATHS
    }


@pytest.mark.parametrize("version", ["0.17.1", "0.18.2", "0.19.2"])
def test_inserted_code_is_in_the_style_of_its_host(
    version: str, release_at: Callable[[str], Path], tmp_path: Path
) -> None:
    """No new complaint by linter or formatter, and no name that the release does not have."""
    before = Survey.of(find_core(release_at(version)))
    told = []
    for texts in (before.sources, before.with_edits(EDITS)):
        lines: list[str] = []
        for path in PATHS:
            file = tmp_path / Path(path).name
            file.write_text(texts[path], encoding="utf-8")
            ruff = [sys.executable, "-m", "ruff"]
            rules = ["--isolated", "--line-length=100", "--select=E501,E7,E9,F,W,I"]
            lint = [*ruff, "check", *rules, "--output-format=concise", str(file)]
            style = [*ruff, "format", "--isolated", "--line-length=100", "--diff", str(file)]
            style += ["--config=format.quote-style='preserve'"]
            done = subprocess.run(lint, capture_output=True, text=True, check=False)
            # Without line numbers, which the edits move.
            lines += [
                line.split(": ", 1)[-1] for line in done.stdout.splitlines() if ".py:" in line
            ]
            done = subprocess.run(style, capture_output=True, text=True, check=False)
            lines += [line for line in done.stdout.splitlines() if line[:1] in "+-"]
        told.append(lines)
    assert told[0] == told[1]


def test_the_commands_on_a_checkout(
    copy_of: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of("0.19.2")
    original = contents(folder)

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    git("init", "--quiet")
    git("config", "user.name", "Someone")
    git("config", "user.email", "someone@example.com")
    git("add", ".")
    git("commit", "--quiet", "--message", "release")

    assert main(["check", str(folder)]) == INCOMPLETE
    told = capsys.readouterr().out
    assert "missing         staging in the bucket" in told
    assert f"{BUFFER}:403: staging right before the collective" in told

    assert main(["apply", "--dry-run", str(folder)]) == SUCCESS
    assert contents(folder) == original
    patch = capsys.readouterr().out
    assert main(["apply", "--commit", str(folder)]) == SUCCESS
    applied = contents(folder)
    assert git("status", "--porcelain") == ""
    assert git("log", "--format=%s").splitlines()[0].startswith("Fix MXFP8 primary weights")
    assert main(["check", str(folder)]) == SUCCESS
    assert main(["apply", str(folder)]) == SUCCESS
    assert contents(folder) == applied
    assert "nothing to do" in capsys.readouterr().out

    assert main(["revert", "--commit", str(folder)]) == SUCCESS
    assert contents(folder) == original
    assert git("diff", "HEAD~2") == ""

    # The diff of --dry-run is the edit.
    (folder / "edit.patch").write_text(patch)
    git("apply", "edit.patch")
    assert contents(folder) == applied


DAMAGE = [
    (
        BUFFER,
        "            assert self.param_gather_handle is None\n\n        async_op",
        "        async_op",
    ),
    (BUFFER, "for idx, bucket in enumerate(self.buckets):", "for idx, bucket in []:"),
    (BUFFER, "bucket.param_data.zero_()\n            return", "return"),
    (BUFFER, "if force_single_bucket_group:", "if not force_single_bucket_group:"),
    (LAYER_WISE, "self.use_buffer_param_sync = full", "self.use_buffers = full"),
    (LAYER_WISE, "    def step_with_ready_grads", "    def step_at_once"),
    (OPTIMIZER, "main_param = param.detach().clone().float()", "main_param = param.float()"),
    (OPTIMIZER, "class Float16Optimizer", "class Float16 Optimizer"),
]


@pytest.mark.parametrize(("path", "old", "new"), DAMAGE)
def test_code_changed_by_hand_is_refused(
    path: str, old: str, new: str, release_at: Callable[[str], Path]
) -> None:
    sources = dict(Survey.of(find_core(release_at("0.19.2"))).sources)
    assert old in sources[path]
    sources[path] = sources[path].replace(old, new, 1)
    survey = Survey(sources)
    unknown = [finding for finding in survey.findings if finding.state is State.UNKNOWN]
    assert unknown and any(place.path == path for place in unknown[0].places)
    with pytest.raises(UnknownCode):
        survey.with_edits([finding.edit for finding in unknown])


DAMAGE_OF_EDITS = [
    (BUFFER, "copy_(main_param.reshape(-1))", "copy_(main_param.view(-1))"),
    (BUFFER, "        self._stage_layerwise_mxfp8_params()\n", ""),
    (LAYER_WISE, "if self.layerwise_param_sync_via_bucket_group:", "if True:"),
    (OPTIMIZER, "from ..fp8_utils import is_mxfp8tensor\n", ""),
]


@pytest.mark.parametrize(("path", "old", "new"), DAMAGE_OF_EDITS)
def test_edits_changed_by_hand_are_unknown(
    path: str, old: str, new: str, release_at: Callable[[str], Path]
) -> None:
    texts = Survey.of(find_core(release_at("0.19.2"))).with_edits(EDITS)
    assert old in texts[path]
    texts[path] = texts[path].replace(old, new, 1)
    assert State.UNKNOWN in [finding.state for finding in Survey(texts).findings]


def test_a_file_damaged_by_hand_stays_untouched(
    copy_of: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of("0.19.2")
    file = find_core(folder) / BUFFER
    file.write_bytes(file.read_bytes().replace(b"self.param_gather_handle = cm", b"pass", 1))
    damaged = contents(folder)
    header = "    def start_param_sync(self, force_sync: bool = False):"
    line = file.read_text().splitlines().index(header) + 1
    for command in ("apply", "revert"):
        assert main([command, str(folder)]) == REFUSED
        told = capsys.readouterr().err
        assert "not the code that this tool knows" in told
        assert f"{BUFFER}:{line}: the code of _ParamAndGradBucketGroup.start_param_sync" in told
    assert contents(folder) == damaged
