"""Small token files for tests, and datasets of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.datasets.indexed_dataset import (
    IndexedDatasetBuilder,
    get_bin_path,
    get_idx_path,
)
from megatron.core.tokenizers import NullTokenizer
from megatron.training.datasets.gpt_datasets import build_train_valid_test_datasets


def write_documents(
    prefix: Path | str, documents: Sequence[Sequence[int]], dtype: Any = np.int32
) -> str:
    """Writes one sequence for each document; returns the prefix."""
    builder = IndexedDatasetBuilder(get_bin_path(str(prefix)), dtype)
    for document in documents:
        builder.add_document(document, [len(document)])
    builder.finalize(get_idx_path(str(prefix)))
    return str(prefix)


def numbered_documents(lengths: Sequence[int], first: int = 0) -> list[list[int]]:
    """Documents in which every token of the dataset is another number, counting up."""
    documents = []
    for length in lengths:
        documents.append(list(range(first, first + length)))
        first += length
    return documents


LENGTH = 8
"""Tokens of a sample."""


def build(
    folder: Path | str,
    prefix: str,
    sizes: Sequence[int | None] = (10, 0, 0),
    split: str = "1,0,0",
    vocab_size: int = 10_000,
    seed: int = 1,
) -> list[Any]:
    """Builds the datasets of one prefix, with a cache folder in ``folder``."""
    return build_train_valid_test_datasets(
        NullTokenizer(vocab_size),
        sizes,
        seed=seed,
        seq_length=LENGTH,
        data_path=[prefix],
        split=split,
        data_cache_path=os.path.join(folder, "cache"),
    )
