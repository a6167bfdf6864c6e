"""Fetches released wheels through pip, unpacks them, and makes copies with the edits."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tools.backport.edits import EDITS
from tools.backport.model import Edit
from tools.backport.survey import PATHS, Survey, find_core

VERSIONS = ("0.16.1", "0.17.1", "0.18.2", "0.19.0", "0.19.2")
DEFAULT_FOLDER = Path.home() / ".cache" / "megatron-layerwise" / "releases"
# The wheels are built for this interpreter; the Python in them runs on others too.
_WHEEL_TAGS = (
    "--python-version=3.12",
    "--platform=manylinux_2_28_x86_64",
    "--platform=manylinux_2_24_x86_64",
)
_FETCH_LIMIT_S = 120


class CannotFetch(RuntimeError):
    """A release is neither in the folder nor to be had through pip."""


def original(version: str, folder: Path) -> Path:
    """The unpacked wheel of this release.

    Args:
        version: Of ``megatron-core``.
        folder: Where wheels are kept; the wheel is looked for there first.

    Raises:
        CannotFetch: If pip cannot fetch it either.
    """
    tree = folder / version
    if (tree / "megatron").is_dir():
        return tree
    pattern = f"megatron_core-{version}-*.whl"
    if not list(folder.glob(pattern)):
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", *_WHEEL_TAGS, "--dest", str(folder)]
        command += [f"megatron-core=={version}"]
        try:
            subprocess.run(
                command, check=True, capture_output=True, text=True, timeout=_FETCH_LIMIT_S
            )
        except (OSError, subprocess.SubprocessError) as error:
            reason = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
            raise CannotFetch(
                f"megatron-core {version} is not in {folder}, and pip cannot fetch it: "
                f"{reason[-1] if reason else error}"
            ) from None
    partial = folder / f"{version}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    with zipfile.ZipFile(next(folder.glob(pattern))) as wheel:
        wheel.extractall(partial)
    partial.rename(tree)
    return tree


def edited(tree: Path, copy: Path, without: str | None = None) -> Path:
    """A copy of an unpacked release with every edit.

    Args:
        tree: The release.
        copy: Where to put it; must not exist.
        without: Name of an edit to leave out.
    """
    shutil.copytree(tree, copy, ignore=shutil.ignore_patterns("training", "*.dist-info", "*.so"))
    core = find_core(copy)
    survey = Survey.of(core)
    wanted: list[Edit] = [edit for edit in EDITS if edit.name != without]
    for path, text in survey.with_edits(wanted).items():
        (core / path).write_bytes(text.encode())
    assert set(PATHS) == set(survey.sources)
    return copy
