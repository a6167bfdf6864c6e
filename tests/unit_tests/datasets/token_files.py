"""Small token files for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.datasets.indexed_dataset import (
    IndexedDatasetBuilder,
    get_bin_path,
    get_idx_path,
)


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
