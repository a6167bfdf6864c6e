"""Arrays that are built once, kept on disk under a hash of all they depend on, and mapped."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .files import atomic_write, make_cache_folder, one_builder
from .index_file import MAPPED_FROM_BYTES

Arrays = dict[str, NDArray[Any]]

# Part of every hash; to be raised when the same description starts to mean other arrays.
_VERSION = 1


def digest(array: NDArray[Any]) -> str:
    """Returns a hash of dtype, shape and values."""
    array = np.ascontiguousarray(array)
    sha = hashlib.blake2b(f"{array.dtype.str}{array.shape}".encode(), digest_size=16)
    sha.update(array.view(np.uint8).data)
    return sha.hexdigest()


def cached_arrays(
    folder: str | None,
    kind: str,
    description: Mapping[str, Any],
    names: tuple[str, ...],
    build: Callable[[], Arrays],
) -> Arrays:
    """Loads arrays from ``folder``, after building them if they are not there.

    Any number of processes may ask for the same arrays at the same time: where files can be locked,
    one builds and the others wait. A file that is damaged is built again.

    Args:
        folder: Made if need be; None to build in memory and keep nothing.
        kind: What the arrays are, as part of their files' names.
        description: Everything the arrays depend on; values that JSON knows.
        names: Names of the arrays.
        build: Returns arrays by name; must return the same on every rank.

    Raises:
        OSError: If the arrays must be built and ``folder`` cannot be written to.
    """
    if folder is None:
        return build()
    text = json.dumps({"version": _VERSION, "kind": kind, **description}, indent=2, sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()[:32]
    base = os.path.join(folder, f"{key}-{kind}")
    found = _load(base, names)
    if found is not None:
        return found
    make_cache_folder(folder)
    with one_builder(base):
        found = _load(base, names)
        if found is None:
            arrays = build()
            for name in names:
                with atomic_write(_array_path(base, name)) as file:
                    np.save(file, arrays[name], allow_pickle=False)
            with atomic_write(base + "-description.txt") as file:
                file.write(text.encode())
            found = _load(base, names) or arrays
    return found


def _array_path(base: str, name: str) -> str:
    return f"{base}-{name}.npy"


def _load(base: str, names: tuple[str, ...]) -> Arrays | None:
    arrays = {}
    for name in names:
        path = _array_path(base, name)
        try:
            large = os.path.getsize(path) >= MAPPED_FROM_BYTES
            array = np.load(path, mmap_mode="r" if large else None, allow_pickle=False)
        except (FileNotFoundError, NotADirectoryError, ValueError, EOFError):
            return None
        arrays[name] = np.asarray(array)
    return arrays
