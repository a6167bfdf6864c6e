"""What the command line says where it cannot work."""

import sys
from pathlib import Path

import pytest

from tools.backport import tree
from tools.backport.cli import REFUSED, main
from tools.backport.edits import EDITS
from tools.backport.known import KNOWN_FUNCTIONS
from tools.backport.model import BUFFER, LAYER_WISE, OPTIMIZER


@pytest.fixture
def unknown_release(tmp_path: Path) -> Path:
    for path in (LAYER_WISE, BUFFER, OPTIMIZER):
        file = tmp_path / "megatron" / "core" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"NAME = {path!r}\n")
    return tmp_path


def contents(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("command", ["check", "apply", "revert"])
def test_a_path_without_megatron_is_refused(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(tmp_path)]) == REFUSED
    assert "is no Megatron-LM checkout" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["apply", "revert"])
def test_unknown_code_is_refused_untouched(
    command: str, unknown_release: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(unknown_release)
    assert main([command, str(unknown_release)]) == REFUSED
    told = capsys.readouterr().err
    assert "not the code that this tool knows" in told
    assert f"{OPTIMIZER}: Float16OptimizerWithFloat16Params.__init__ is not there" in told
    assert contents(unknown_release) == before


def test_without_libcst_the_extra_is_named(
    unknown_release: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tree._parse.cache_clear()
    monkeypatch.setitem(sys.modules, "libcst", None)
    assert main(["check", str(unknown_release)]) == REFUSED
    told = capsys.readouterr().err
    assert "optional extra `backport`" in told and "pip install '.[backport]'" in told


def test_every_edit_knows_some_code_of_every_function_it_touches() -> None:
    for edit in EDITS:
        for path, name in edit.functions:
            is_function = name and name.rpartition(".")[2][:1] in "_abcdefghijklmnopqrstuvwxyz"
            if is_function and name != "_ParamAndGradBucketGroup":
                assert KNOWN_FUNCTIONS[path][name], f"{edit.name}: {path} {name}"


def test_no_two_sites_share_a_place() -> None:
    places = [(site.path, site.scope, site.change) for edit in EDITS for site in edit.sites]
    anchors = [
        (path, scope, getattr(change, "anchor", None) or getattr(change, "old", change))
        for path, scope, change in places
    ]
    assert len(set(anchors)) == len(anchors)
