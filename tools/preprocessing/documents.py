"""Inputs, read in batches of documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

# Enough for a batch to cost more to tokenize than to hand over.
_BATCH_BYTES = 1 << 18


@dataclass(frozen=True)
class Batch:
    """Documents as they are in the input, undecoded."""

    path: str
    is_json: bool
    documents: list[tuple[int, bytes]]
    """Number of the first line, from 1, and content."""
    bytes_read: int


def read_batches(path: str, kind: str) -> Iterator[Batch]:
    """Reads a file.

    Args:
        path: The file.
        kind: ``json``, ``file`` or ``paragraph``.

    Raises:
        OSError: If it cannot be read.
    """
    documents: list[tuple[int, bytes]] = []
    bytes_read = 0
    readers = {"json": _read_lines, "file": _read_whole, "paragraph": _read_paragraphs}
    for line, content in readers[kind](path):
        documents.append((line, content))
        bytes_read += len(content)
        if bytes_read >= _BATCH_BYTES:
            yield Batch(path, kind == "json", documents, bytes_read)
            documents, bytes_read = [], 0
    if documents:
        yield Batch(path, kind == "json", documents, bytes_read)


def _read_lines(path: str) -> Iterator[tuple[int, bytes]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def _read_whole(path: str) -> Iterator[tuple[int, bytes]]:
    with open(path, "rb") as file:
        yield 1, file.read()


def _read_paragraphs(path: str) -> Iterator[tuple[int, bytes]]:
    lines: list[bytes] = []
    first = 1
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                first = first if lines else number
                lines.append(line)
            elif lines:
                yield first, b"".join(lines)
                lines = []
    if lines:
        yield first, b"".join(lines)
