"""Writes files all or none, and commits them."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path


class CannotWrite(RuntimeError):
    """Nothing was changed; the message says why."""


def write_all(texts: Mapping[Path, str]) -> None:
    """Replaces the text of every file, or of none.

    New contents are written beside the files first, so that what can fail does so before the
    first file is touched; files keep their modes.

    Raises:
        CannotWrite: If a file cannot be replaced. Those that had been are put back.
    """
    written: list[tuple[Path, Path]] = []
    done: list[tuple[Path, bytes]] = []
    try:
        for file, text in texts.items():
            written.append((_beside(file, text.encode("utf-8")), file))
        for new, file in written:
            done.append((file, file.read_bytes()))
            os.replace(new, file)
    except OSError as error:
        for file, before in reversed(done):
            if file.read_bytes() != before:
                os.replace(_beside(file, before), file)
        raise CannotWrite(f"cannot write {error.filename}: {error.strerror}") from None
    finally:
        for new, _ in written:
            new.unlink(missing_ok=True)


def _beside(file: Path, content: bytes) -> Path:
    mode = file.stat().st_mode
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    with os.fdopen(handle, "wb") as stream:
        stream.write(content)
    os.chmod(name, mode)
    return Path(name)


class Checkout:
    """The git checkout that a folder is in."""

    def __init__(self, folder: Path) -> None:
        """Finds the checkout.

        Raises:
            CannotWrite: If ``folder`` is in none.
        """
        self.top = folder
        self.top = Path(
            self._git(
                "rev-parse", "--show-toplevel", says=f"--commit: {folder} is in no git checkout"
            ).strip()
        )

    def check_committed(self, files: list[Path]) -> None:
        """Sees that these files are as they were committed.

        Raises:
            CannotWrite: If one is not, or is not tracked.
        """
        for file in files:
            self._git(
                *("ls-files", "--error-unmatch", "--", str(file)),
                says=f"--commit: git does not track {file}",
            )
        changed = self._git("status", "--porcelain", "--", *map(str, files)).splitlines()
        if changed:
            names = ", ".join(line[3:] for line in changed)
            raise CannotWrite(
                f"--commit: {names} differs from the last commit; commit or undo that first"
            )

    def commit(self, files: list[Path], message: str) -> str:
        """Commits these files alone, whatever else is staged; returns the short commit id.

        Raises:
            CannotWrite: If git refuses.
        """
        names = [str(file) for file in files]
        self._git("commit", "--quiet", "--message", message, "--", *names)
        return self._git("rev-parse", "--short", "HEAD").strip()

    def _git(self, *arguments: str, says: str = "") -> str:
        command = ["git", "-C", str(self.top), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise CannotWrite(f"--commit needs git: {error.strerror}") from None
        if done.returncode:
            told = done.stderr.strip().splitlines() or done.stdout.strip().splitlines()
            raise CannotWrite(says or f"git {arguments[0]}: {told[-1] if told else 'failed'}")
        return done.stdout
