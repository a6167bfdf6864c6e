"""Files that processes share: written whole or not at all, and built by one process at a time."""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from collections.abc import Iterator
from typing import BinaryIO

CACHE_NAME = "megatron-layerwise"


def temporary_path(path: str) -> str:
    """Returns an unused name beside ``path``, on the same file system."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")


@contextlib.contextmanager
def atomic_write(path: str) -> Iterator[BinaryIO]:
    """Opens a binary file that appears as ``path`` when the body ends, and only if it succeeds."""
    temporary = temporary_path(path)
    try:
        with naming(path), open(temporary, "xb") as file:
            yield file
            sync(file)
        os.replace(temporary, path)
    except BaseException:
        remove_if_there(temporary)
        raise


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Within it, errors of the file system that name no file are errors of ``path``."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, path) from None
        raise


def sync(file: BinaryIO) -> None:
    """Puts what was written on the disk, so that a rename cannot outlive the data."""
    file.flush()
    os.fsync(file.fileno())


def remove_if_there(path: str) -> None:
    """Removes a file that may be gone already."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


@contextlib.contextmanager
def one_builder(path: str) -> Iterator[None]:
    """Holds off the other processes that want to build ``path`` too; ends with its holder.

    This saves work and no more: where the file system has no locks, all build, and what they write
    must be the same and must appear at once.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            file = stack.enter_context(open(path + ".lock", "ab"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make_cache_folder(folder: str) -> str:
    """Makes a folder for caches, with its parents.

    Raises:
        OSError: If it cannot be made or written to, saying how to choose another.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        reason = "" if os.access(folder, os.W_OK | os.X_OK) else "it is not writable"
    except FileExistsError:
        reason = "it is not a folder"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        raise OSError(
            f"cannot use the cache folder {folder}: {reason}; choose another with --data-cache-path"
        )
    return folder


def default_cache_folder() -> str | None:
    """Returns this user's cache folder, made if need be; None where no place can be written to.

    It lies in ``$XDG_CACHE_HOME``, by default ``~/.cache``, or else among the temporary files.
    """
    home = os.path.expanduser("~")
    candidates = [os.environ.get("XDG_CACHE_HOME", "")]
    candidates.append(os.path.join(home, ".cache"))
    user = os.getuid() if hasattr(os, "getuid") else 0
    shared = os.path.join(tempfile.gettempdir(), f"{CACHE_NAME}-{user}")
    for folder in candidates:
        if os.path.isabs(folder):
            with contextlib.suppress(OSError):
                return make_cache_folder(os.path.join(folder, CACHE_NAME))
    with contextlib.suppress(OSError):
        os.makedirs(shared, mode=0o700, exist_ok=True)
        # Anybody may have made a folder of this name there.
        if not hasattr(os, "getuid") or os.stat(shared).st_uid == user:
            return make_cache_folder(shared)
    return None
