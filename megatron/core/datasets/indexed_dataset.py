"""Token files in Megatron's format: ``PREFIX.bin`` holds the tokens, ``PREFIX.idx`` says where."""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, overload

import numpy as np
from numpy.typing import NDArray

from .files import atomic_write, naming, remove_if_there, sync, temporary_path
from .index_file import DType, Scalar, check_places, map_file, read_index, write_index

__all__ = ["DType", "IndexedDataset", "IndexedDatasetBuilder", "get_bin_path", "get_idx_path"]

_MAX_LENGTH = np.iinfo(np.int32).max


def get_idx_path(path_prefix: str) -> str:
    """Returns the path of the index file."""
    return path_prefix + ".idx"


def get_bin_path(path_prefix: str) -> str:
    """Returns the path of the token file."""
    return path_prefix + ".bin"


class IndexedDataset:
    """The sequences of ``PREFIX.bin`` and ``PREFIX.idx``, read where they lie in mapped memory.

    Args:
        path_prefix: Path of the two files without ``.bin`` and ``.idx``.
        multimodal: Must be False.
        mmap: Must be True.

    Raises:
        FileNotFoundError: If one of the files is missing.
        ValueError: If one is damaged, of another format, or not made for the other.
    """

    def __init__(self, path_prefix: str, multimodal: bool = False, mmap: bool = True) -> None:
        if multimodal or not mmap:
            raise ValueError("only text is read, and only from mapped memory")
        self.path_prefix = path_prefix
        idx_path, bin_path = get_idx_path(path_prefix), get_bin_path(path_prefix)
        for path in (idx_path, bin_path):
            if not os.path.isfile(path):
                raise FileNotFoundError(_missing(path, path_prefix))
        self._index = read_index(idx_path)
        self._bytes = map_file(bin_path)
        self._contiguous = check_places(idx_path, bin_path, self._index, len(self._bytes))
        self.dtype: Scalar = self._index.dtype
        self._itemsize = np.dtype(self.dtype).itemsize
        self._stored_dtype = np.dtype(self.dtype).newbyteorder("<")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path_prefix,)

    def __len__(self) -> int:
        """The number of sequences."""
        return len(self._index.sequence_lengths)

    def __iter__(self) -> Iterator[NDArray[Any]]:
        """The tokens of each sequence, as read-only views."""
        return (self.get(idx) for idx in range(len(self)))

    @overload
    def __getitem__(self, idx: int | np.integer[Any]) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, idx: slice) -> list[NDArray[Any]]: ...
    def __getitem__(self, idx: int | np.integer[Any] | slice) -> NDArray[Any] | list[NDArray[Any]]:
        """Returns the tokens of a sequence, or of each sequence of a slice, as read-only views.

        Raises:
            ValueError: If a slice has a step other than 1.
            TypeError: If ``idx`` is neither a number nor a slice.
        """
        if isinstance(idx, slice):
            start, stop, step = idx.indices(len(self))
            if step != 1:
                raise ValueError(f"slices of an IndexedDataset must have step 1, got {step}")
            return [self.get(i) for i in range(start, stop)]
        if not isinstance(idx, (int, np.integer)):
            raise TypeError(
                f"an IndexedDataset takes a number or a slice, got {type(idx).__name__}"
            )
        return self.get(idx)

    def get(
        self, idx: int | np.integer[Any], offset: int = 0, length: int | None = None
    ) -> NDArray[Any]:
        """Returns ``length`` tokens of sequence ``idx`` from ``offset`` on, as a read-only view.

        Args:
            idx: The sequence; negative numbers count from the last.
            offset: First token, counted within the sequence.
            length: Number of tokens; up to the end of the sequence by default.

        Raises:
            IndexError: If there is no such sequence, or not so many tokens in it.
        """
        if not -len(self) <= idx < len(self):
            raise IndexError(f"{self.path_prefix} has no sequence {idx}; it has {len(self)}")
        available = int(self._index.sequence_lengths[idx])
        count = available - offset if length is None else length
        if offset < 0 or count < 0 or offset + count > available:
            raise IndexError(
                f"{self.path_prefix}: sequence {idx} has {available} tokens; "
                f"offset {offset} and length {length} are not within it"
            )
        start = int(self._index.sequence_pointers[idx]) + offset * self._itemsize
        return self._bytes[start : start + count * self._itemsize].view(self._stored_dtype)

    def iter_token_chunks(self, tokens: int = 1 << 24) -> Iterator[NDArray[Any]]:
        """Yields all tokens in order of sequences, in arrays of about ``tokens`` elements."""
        if self._contiguous:
            flat = self._bytes.view(self._stored_dtype)
            for start in range(0, len(flat), tokens):
                yield flat[start : start + tokens]
        else:
            for idx in range(len(self)):
                yield self.get(idx)

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """Tokens of each sequence: int32 ``[sequences]``."""
        return self._index.sequence_lengths

    @property
    def document_indices(self) -> NDArray[np.int64]:
        """Boundaries of documents, in sequences, from 0: int64 ``[documents + 1]``."""
        return self._index.document_indices

    @staticmethod
    def exists(path_prefix: str) -> bool:
        """Tells whether both files are there."""
        return all(os.path.isfile(get(path_prefix)) for get in (get_idx_path, get_bin_path))


def _missing(path: str, prefix: str) -> str:
    bare, extension = os.path.splitext(prefix)
    if extension in (".bin", ".idx") and IndexedDataset.exists(bare):
        return f"there is no file {path}: give the prefix of the two files, {bare}, without {extension}"
    return f"there is no file {path}; a dataset is a pair PREFIX.bin and PREFIX.idx"


class IndexedDatasetBuilder:
    """Writes ``.bin`` and ``.idx`` files, which appear under their names only when complete.

    Used as a context manager it removes what it wrote unless :meth:`finalize` was reached.

    Args:
        bin_path: Path of the token file.
        dtype: How tokens are stored.
        multimodal: Must be False.

    Raises:
        ValueError: If the format has no code for ``dtype``.
    """

    def __init__(self, bin_path: str, dtype: Scalar = np.int32, multimodal: bool = False) -> None:
        self._file: BinaryIO | None = None
        if multimodal:
            raise ValueError("only text can be written, not multimodal data")
        self.dtype = DType.dtype_from_code(DType.code_from_dtype(dtype))
        self._stored_dtype = np.dtype(self.dtype).newbyteorder("<")
        self.bin_path = bin_path
        self._temporary = temporary_path(bin_path)
        self._lengths = array("i")
        self._boundaries = array("q", [0])
        self._file = open(self._temporary, "xb")  # noqa: SIM115 - closed by finalize or discard

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self.discard()

    def add_item(self, tensor: Any, mode: int = 0) -> None:
        """Appends one sequence to the current document.

        Args:
            tensor: Tokens, a tensor or array of any integer or float dtype.
            mode: Must be 0.

        Raises:
            ValueError: If a token cannot be stored in the dtype of the file.
        """
        if mode:
            raise ValueError(f"only text can be written, got mode {mode}")
        self._append(tensor, None)

    def add_document(
        self, tensor: Any, lengths: Sequence[int], modes: Sequence[int] | None = None
    ) -> None:
        """Appends a document of sequences, given as their tokens in a row.

        Args:
            tensor: Tokens of all sequences.
            lengths: Tokens of each sequence.
            modes: Must be None.

        Raises:
            ValueError: If a token cannot be stored in the dtype of the file, or ``lengths`` do not
                add up to the number of tokens.
        """
        if modes is not None:
            raise ValueError("only text can be written, got modes")
        self._append(tensor, lengths)
        self.end_document()

    def end_document(self) -> None:
        """Ends a document whose sequences were added by :meth:`add_item`."""
        self._open_file()
        self._boundaries.append(len(self._lengths))

    def add_index(self, path_prefix: str) -> None:
        """Appends all documents of another dataset.

        Raises:
            ValueError: If that dataset is damaged, or stores tokens in another dtype.
        """
        self._open_file()
        other = IndexedDataset(path_prefix)
        if other.dtype is not self.dtype:
            raise ValueError(
                f"{path_prefix} stores tokens as {np.dtype(other.dtype).name}; it cannot be appended "
                f"to {self.bin_path}, which stores {np.dtype(self.dtype).name}"
            )
        boundaries = other.document_indices[1:] + len(self._lengths)
        for chunk in other.iter_token_chunks():
            self._write(chunk)
        self._lengths.frombytes(other.sequence_lengths.astype(np.int32).tobytes())
        self._boundaries.frombytes(boundaries.astype(np.int64).tobytes())

    def finalize(self, idx_path: str) -> None:
        """Writes the index and gives both files their names.

        Raises:
            ValueError: If the last document was not ended.
        """
        file = self._open_file()
        if self._boundaries[-1] != len(self._lengths):
            raise ValueError(
                f"{self.bin_path}: the last {len(self._lengths) - self._boundaries[-1]} sequences "
                "belong to no document; call end_document() before finalize()"
            )
        with naming(self.bin_path):
            sync(file)
        with atomic_write(idx_path) as index:
            lengths = np.frombuffer(self._lengths, np.int32)
            write_index(index, self.dtype, lengths, np.frombuffer(self._boundaries, np.int64))
            sync(index)
            # An index from before must not be found beside the new tokens.
            remove_if_there(idx_path)
            file.close()
            os.replace(self._temporary, self.bin_path)
        self._file = None

    def discard(self) -> None:
        """Removes what was written, unless it was finalized."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # what could not be written is not wanted any more
                self._file.close()
            self._file = None
            remove_if_there(self._temporary)

    def _open_file(self) -> BinaryIO:
        if self._file is None:
            raise ValueError(
                f"{self.bin_path} was finalized or discarded; nothing can be added to it"
            )
        return self._file

    def _append(self, tensor: Any, lengths: Sequence[int] | None) -> None:
        self._open_file()
        tokens = np.asarray(tensor).reshape(-1)
        added = np.array([tokens.size] if lengths is None else lengths, np.int64)
        if added.sum() != tokens.size or np.any(added < 0) or np.any(added > _MAX_LENGTH):
            raise ValueError(
                f"{self.bin_path}: sequences of {added.tolist()} tokens cannot be made of "
                f"{tokens.size} tokens (at most {_MAX_LENGTH} each)"
            )
        self._write(self._stored(tokens))
        self._lengths.frombytes(added.astype(np.int32).tobytes())

    def _write(self, tokens: NDArray[Any]) -> None:
        with naming(self.bin_path):
            self._open_file().write(tokens.tobytes())

    def _stored(self, tokens: NDArray[Any]) -> NDArray[Any]:
        with np.errstate(invalid="ignore"):
            stored = tokens.astype(self._stored_dtype)
        if np.issubdtype(self.dtype, np.integer) and tokens.dtype != stored.dtype:
            changed = stored != tokens
            if np.any(changed):
                raise ValueError(
                    f"{self.bin_path}: token {tokens[np.argmax(changed)]} cannot be stored as "
                    f"{np.dtype(self.dtype).name}"
                )
        return stored
