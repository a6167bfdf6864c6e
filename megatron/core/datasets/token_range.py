"""The check, before training, that every token of a dataset is in the vocabulary."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from .index_cache import Arrays, cached_arrays
from .indexed_dataset import IndexedDataset, get_bin_path, get_idx_path


def check_token_ids(dataset: IndexedDataset, vocab_size: int, path_to_cache: str | None) -> None:
    """Checks that all tokens are at least 0 and below ``vocab_size``.

    A dataset is read through once; the result is kept in the cache for as long as its files do not
    change. Where the dtype holds no other values, nothing is read.

    Raises:
        ValueError: If a token is not, naming it and its place, or tokens are not integers.
    """
    bin_path = get_bin_path(dataset.path_prefix)
    dtype: np.dtype[Any] = np.dtype(dataset.dtype)
    if not np.issubdtype(dtype, np.integer):
        raise ValueError(f"{bin_path} holds {dtype.name} values; token ids must be integers")
    limits = np.iinfo(dtype)
    if limits.min == 0 and limits.max < vocab_size:
        return
    files = {
        os.path.realpath(path): _identity(path)
        for path in (bin_path, get_idx_path(dataset.path_prefix))
    }
    found = cached_arrays(
        path_to_cache, "token_range", {"files": files}, ("range",), lambda: _token_range(dataset)
    )
    low, high = (int(value) for value in found["range"])
    if low < 0 or high >= vocab_size:
        raise ValueError(f"{bin_path}: {_first_outside(dataset, vocab_size)}")


def _identity(path: str) -> list[int]:
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def _token_range(dataset: IndexedDataset) -> Arrays:
    low, high = 0, -1
    for chunk in dataset.iter_token_chunks():
        if chunk.size:
            low, high = min(low, int(chunk.min())), max(high, int(chunk.max()))
    return {"range": np.array([low, high], np.int64)}


def _first_outside(dataset: IndexedDataset, vocab_size: int) -> str:
    passed = 0
    for chunk in dataset.iter_token_chunks():
        outside: Any = (chunk < 0) | (chunk >= vocab_size)
        if np.any(outside):
            at = int(np.argmax(outside))
            ends = np.cumsum(dataset.sequence_lengths, dtype=np.int64)
            sequence = int(np.searchsorted(ends, passed + at, side="right"))
            return (
                f"token {chunk[at]} of sequence {sequence} is outside of the vocabulary, which has "
                f"ids 0 to {vocab_size - 1}; was it written with another tokenizer? Give that one "
                "(--tokenizer-type, --tokenizer-model, --vocab-size)"
            )
        passed += chunk.size
    return f"it held a token id outside of 0 to {vocab_size - 1} a moment ago, and changes"
