"""Fetches released wheels through pip, unpacks them, and makes copies with the edits."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tools.backport.edits import EDITS
from tools.backport.survey import Survey, find_core

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
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries=1"]
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
    """The release with every edit.

    Files that no edit touches are links to the release's own, compiled code included.

    Args:
        tree: The unpacked release.
        copy: Where to put the edited one; must not exist.
        without: Name of an edit to leave out.
    """
    core = find_core(tree)
    wanted = [edit for edit in EDITS if edit.name != without]
    texts = Survey.of(core).with_edits(wanted)
    edited_names = {Path(path).stem for path in texts}
    folders = {Path(path).parent for path in texts} | {Path()}
    for folder in sorted(folders | {folder / "__pycache__" for folder in folders}):
        if not (core / folder).is_dir():
            continue
        target = copy / "megatron" / "core" / folder
        target.mkdir(parents=True)
        for entry in (core / folder).iterdir():
            has_own = folder / entry.name in folders or entry.name == "__pycache__"
            if not has_own and entry.name.partition(".")[0] not in edited_names:
                (target / entry.name).symlink_to(entry)
    for path, text in texts.items():
        (copy / "megatron" / "core" / path).write_bytes(text.encode())
    return copy
