"""Where pip cannot fetch a release, the reason is pip's own."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.functional_tests.backport.releases import CannotFetch, original


def test_pip_s_reason_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(command: list[str], **_: Any) -> None:
        assert command[-1] == "megatron-core==1.2.3" and "--no-deps" in command
        raise subprocess.CalledProcessError(1, command, stderr="WARNING: x\nERROR: no network\n")

    monkeypatch.setattr(subprocess, "run", fails)
    with pytest.raises(CannotFetch, match=r"megatron-core 1\.2\.3 .*ERROR: no network$"):
        original("1.2.3", tmp_path)


def test_an_unpacked_release_is_not_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "1.2.3" / "megatron").mkdir(parents=True)
    monkeypatch.setattr(subprocess, "run", None)
    assert original("1.2.3", tmp_path) == tmp_path / "1.2.3"
