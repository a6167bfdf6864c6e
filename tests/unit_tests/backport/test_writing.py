"""Files are written all or none; commits hold the changed files and nothing else."""

import os
import subprocess
from pathlib import Path

import pytest

from tools.backport.writing import CannotWrite, Checkout, write_all


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "config", "user.name", "Someone")
    git(tmp_path, "config", "user.email", "someone@example.com")
    for name in ("a.py", "b.py", "c.py"):
        (tmp_path / name).write_text(f"{name}\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "start")
    return tmp_path


def test_all_files_are_written_with_their_modes(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_text("old")
    files[0].chmod(0o750)
    write_all({file: "new\r\n" for file in files})
    assert [file.read_bytes() for file in files] == [b"new\r\n"] * 2
    assert files[0].stat().st_mode & 0o777 == 0o750
    assert sorted(tmp_path.iterdir()) == files


def test_nothing_is_written_where_one_file_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / name for name in ("a", "b", "c")]
    for file in files:
        file.write_text("old")
    replace = os.replace

    def fails_on_c(new: Path, file: Path) -> None:
        if file.name == "c":
            raise OSError(28, "no space left on device", str(file))
        replace(new, file)

    monkeypatch.setattr(os, "replace", fails_on_c)
    with pytest.raises(CannotWrite, match=r"cannot write .*c: no space left"):
        write_all({file: "new" for file in files})
    assert [file.read_text() for file in files] == ["old"] * 3
    assert sorted(tmp_path.iterdir()) == files


def test_a_commit_holds_the_named_files_alone(checkout: Path) -> None:
    (checkout / "a.py").write_text("edited\n")
    (checkout / "b.py").write_text("someone's work\n")
    git(checkout, "add", "b.py")
    Checkout(checkout).commit([checkout / "a.py"], "An edit\n\nWhy.\n")
    assert git(checkout, "show", "--format=%B", "--name-only").split() == [
        *("An", "edit", "Why."),
        "a.py",
    ]
    assert git(checkout, "status", "--porcelain").split() == ["M", "b.py"]


def test_files_that_differ_from_the_last_commit_are_refused(checkout: Path) -> None:
    git_checkout = Checkout(checkout)
    git_checkout.check_committed([checkout / "a.py"])
    (checkout / "a.py").write_text("work in progress\n")
    with pytest.raises(CannotWrite, match=r"a\.py differs from the last commit"):
        git_checkout.check_committed([checkout / "a.py"])
    (checkout / "new.py").write_text("")
    with pytest.raises(CannotWrite, match=r"git does not track .*new\.py"):
        git_checkout.check_committed([checkout / "new.py"])


def test_a_folder_outside_git_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotWrite, match="is in no git checkout"):
        Checkout(tmp_path)


def test_what_git_says_is_passed_on(checkout: Path) -> None:
    with pytest.raises(CannotWrite, match="git commit"):
        Checkout(checkout).commit([checkout / "a.py"], "nothing has changed")
