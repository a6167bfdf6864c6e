"""The format of index files, and what makes one wrong.

The index, little-endian: ``MMIDIDX\\0\\0``; uint64 version 1; uint8 code of the tokens' dtype; uint64
number of sequences; uint64 number of document boundaries; int32 length of each sequence in tokens;
int64 offset of each sequence in bytes; int64 boundaries between documents, counted in sequences, from
0 to the number of sequences.
"""

from __future__ import annotations

import os
import struct
from enum import Enum
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
# Each mapping keeps a file open, and a blend may be made of very many small files.
MAPPED_FROM_BYTES = 1 << 20
# Arrays over all sequences are checked in pieces, so that checking needs little memory.
_CHECKED_AT_ONCE = 1 << 22

Scalar = type[np.number[Any]]


class DType(Enum):
    """The dtypes that tokens may be stored in; values are the codes in an index."""

    uint8 = 1
    int8 = 2
    int16 = 3
    int32 = 4
    int64 = 5
    float64 = 6
    float32 = 7
    uint16 = 8

    @classmethod
    def code_from_dtype(cls, value: Scalar | np.dtype[Any]) -> int:
        """Returns the code of a NumPy dtype.

        Raises:
            ValueError: If the format has no code for it.
        """
        name = np.dtype(value).name
        if name not in cls.__members__:
            raise ValueError(
                f"tokens cannot be stored as {name}; use one of {', '.join(cls._names())}"
            )
        return cls[name].value

    @classmethod
    def dtype_from_code(cls, value: int) -> Scalar:
        """Returns the NumPy scalar type of a code.

        Raises:
            ValueError: If the format does not know the code.
        """
        return getattr(np, cls(value).name)

    @classmethod
    def size(cls, key: int | Scalar) -> int:
        """Returns the bytes per token of a code or dtype."""
        return np.dtype(cls.dtype_from_code(key) if isinstance(key, int) else key).itemsize

    @staticmethod
    def optimal_dtype(cardinality: int | None) -> Scalar:
        """Returns the dtype in which Megatron stores tokens of a vocabulary of this size."""
        return np.uint16 if cardinality is not None and cardinality < 65500 else np.int32

    @classmethod
    def _names(cls) -> list[str]:
        return list(cls.__members__)


class Index(NamedTuple):
    """What an index file says; arrays lie in mapped memory."""

    dtype: Scalar
    sequence_lengths: NDArray[np.int32]
    sequence_pointers: NDArray[np.int64]
    document_indices: NDArray[np.int64]


def map_file(path: str) -> NDArray[np.uint8]:
    """Returns the bytes of a file, read-only: mapped, or read where it is small."""
    if os.path.getsize(path) < MAPPED_FROM_BYTES:
        data = np.fromfile(path, np.uint8)
        data.flags.writeable = False
        return data
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))


def read_index(path: str) -> Index:
    """Reads an index file.

    Raises:
        ValueError: If it is damaged or of another format; what it says of the token file is not
            checked.
    """
    data = map_file(path)
    start = bytes(data[: len(_MAGIC)])
    if not _MAGIC.startswith(start):
        raise ValueError(
            f"{path} is not an index of Megatron's format: it starts with {start!r}, not with "
            f"{_MAGIC!r}"
        )
    if len(data) < _HEADER.size:
        raise ValueError(
            f"{path} is truncated: it has {len(data)} bytes, and its header alone {_HEADER.size}"
        )
    _, version, code, sequences, boundaries = _HEADER.unpack(bytes(data[: _HEADER.size]))
    if version != _VERSION:
        raise ValueError(f"{path} has version {version} of the index format; {_VERSION} is known")
    try:
        dtype = DType.dtype_from_code(code)
    except ValueError:
        raise ValueError(
            f"{path} gives the dtype code {code}; codes 1 to {len(DType)} are known"
        ) from None
    expected = _HEADER.size + 12 * sequences + 8 * boundaries
    if len(data) == expected + sequences and sequences > 0:
        raise ValueError(
            f"{path} is the index of a multimodal dataset (it has a mode for each sequence); only "
            "text can be read"
        )
    if len(data) != expected:
        kind = "truncated" if len(data) < expected else "too long"
        raise ValueError(
            f"{path} is {kind}: {sequences} sequences and {boundaries} document boundaries take "
            f"{expected} bytes, and it has {len(data)}"
        )
    lengths_end = _HEADER.size + 4 * sequences
    pointers_end = lengths_end + 8 * sequences
    index = Index(
        dtype,
        data[_HEADER.size : lengths_end].view("<i4"),
        data[lengths_end:pointers_end].view("<i8"),
        data[pointers_end:].view("<i8"),
    )
    _check_documents(path, index)
    return index


def _check_documents(path: str, index: Index) -> None:
    boundaries, sequences = index.document_indices, len(index.sequence_lengths)
    if len(boundaries) == 0 or boundaries[0] != 0 or boundaries[-1] != sequences:
        found = f"{boundaries[0]} to {boundaries[-1]}" if len(boundaries) else "none"
        raise ValueError(
            f"{path} is damaged: document boundaries must run from 0 to the number of sequences, "
            f"{sequences}, and run from {found}"
        )
    for start in range(0, len(boundaries), _CHECKED_AT_ONCE):
        part = boundaries[start : start + _CHECKED_AT_ONCE + 1]
        if np.any(part[1:] < part[:-1]):
            raise ValueError(f"{path} is damaged: document boundaries do not ascend")


def check_places(idx_path: str, bin_path: str, index: Index, bin_size: int) -> bool:
    """Checks that every sequence lies in the token file.

    Args:
        idx_path: The index file, for messages.
        bin_path: The token file, for messages.
        index: What the index file says.
        bin_size: Bytes of the token file.

    Returns:
        Whether the sequences follow each other without gaps, from the start of the file to its end.

    Raises:
        ValueError: If one does not, or the token file is longer than sequences without gaps take.
    """
    itemsize = np.dtype(index.dtype).itemsize
    contiguous, end = True, 0
    for first in range(0, len(index.sequence_lengths), _CHECKED_AT_ONCE):
        lengths = index.sequence_lengths[first : first + _CHECKED_AT_ONCE].astype(np.int64)
        starts = index.sequence_pointers[first : first + _CHECKED_AT_ONCE]
        sizes = lengths * itemsize
        negative = (lengths < 0) | (starts < 0)
        if np.any(negative):
            at = int(np.argmax(negative))
            raise ValueError(
                f"{idx_path} is damaged: sequence {first + at} has length {lengths[at]} and byte "
                f"offset {starts[at]}"
            )
        outside = starts > bin_size - sizes
        if np.any(outside):
            at = int(np.argmax(outside))
            raise ValueError(
                f"{bin_path} is shorter than {idx_path} says: it has {bin_size} bytes, and sequence "
                f"{first + at} takes bytes {starts[at]} to {int(starts[at]) + int(sizes[at])}; it is "
                "truncated, or the two files are no pair"
            )
        ends = starts + sizes
        contiguous &= bool(starts[0] == end and np.array_equal(starts[1:], ends[:-1]))
        end = int(ends[-1])
    if contiguous and end != bin_size:
        raise ValueError(
            f"{bin_path} is longer than {idx_path} says: it has {bin_size} bytes, and the sequences, "
            f"stored as {np.dtype(index.dtype).name}, take {end}; the two files are no pair"
        )
    return contiguous


def write_index(
    file: BinaryIO, dtype: Scalar, lengths: NDArray[np.int32], boundaries: NDArray[np.int64]
) -> None:
    """Writes an index of sequences that follow each other without gaps.

    Args:
        file: Opened for binary writing.
        dtype: How tokens are stored.
        lengths: Tokens of each sequence: ``[sequences]``.
        boundaries: Boundaries of documents, in sequences, from 0: ``[documents + 1]``.
    """
    ends = np.cumsum(lengths.astype(np.int64) * np.dtype(dtype).itemsize)
    pointers = np.concatenate((np.zeros(1, np.int64), ends))[:-1]
    code = DType.code_from_dtype(dtype)
    file.write(_HEADER.pack(_MAGIC, _VERSION, code, len(lengths), len(boundaries)))
    for values, stored in ((lengths, "<i4"), (pointers, "<i8"), (boundaries, "<i8")):
        file.write(values.astype(stored).tobytes())
