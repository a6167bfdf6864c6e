"""From documents to tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.index_file import Scalar
from megatron.core.tokenizers import build_tokenizer

from .documents import Batch


@dataclass(frozen=True)
class Part:
    """The documents of one key."""

    tokens: NDArray[Any]
    """All documents in a row: ``[tokens]``."""
    lengths: NDArray[np.int64]
    """Tokens of each document: ``[documents]``."""
    empty: int
    """Documents left out because they have no token."""


@dataclass(frozen=True)
class Encoded:
    """A batch, tokenized."""

    parts: list[Part]
    """One for each key."""
    bytes_read: int


# A process builds its tokenizer once, not for every batch.
_build_once = lru_cache(maxsize=1)(build_tokenizer)


@dataclass(frozen=True)
class Encoder:
    """Tokenizes batches; small enough to be sent to a worker with each."""

    tokenizer: tuple[str, str | None, int | None]
    """Arguments of ``build_tokenizer``."""
    keys: tuple[str, ...]
    """Keys of JSON objects; plain text has one."""
    eod: int | None
    """Appended to every document, if not None."""
    dtype: Scalar

    def encode(self, batch: Batch) -> Encoded:
        """Tokenizes a batch.

        Raises:
            DocumentError: If a document is malformed, naming file and line.
        """
        tokenize = _build_once(*self.tokenizer).tokenize
        documents: list[list[NDArray[Any]]] = [[] for _ in self.keys]
        empty = [0] * len(self.keys)
        for line, content in batch.documents:
            try:
                for i, text in enumerate(self._texts(batch, line, content)):
                    ids = tokenize(text)
                    if ids:
                        ids += [] if self.eod is None else [self.eod]
                        documents[i].append(np.array(ids, self.dtype))
                    else:
                        empty[i] += 1
            except DocumentError:
                raise
            except UnicodeEncodeError:
                raise _error(batch, line, "half of a surrogate pair, which is no text") from None
            except ValueError as error:
                raise _error(batch, line, str(error)) from None
        parts = [
            Part(
                np.concatenate([np.empty(0, self.dtype), *arrays]),
                np.array([len(array) for array in arrays], np.int64),
                empty[i],
            )
            for i, arrays in enumerate(documents)
        ]
        return Encoded(parts, batch.bytes_read)

    def _texts(self, batch: Batch, line: int, content: bytes) -> list[str]:
        try:
            # Only the very start of a file may have a byte order mark.
            text = content.decode("utf-8-sig" if line == 1 else "utf-8")
        except UnicodeDecodeError as error:
            line_of_error = line + content.count(b"\n", 0, error.start)
            byte = content[error.start]
            raise _error(batch, line_of_error, f"byte 0x{byte:02x} is not UTF-8") from None
        if not batch.is_json:
            return [text]
        try:
            record = json.loads(text.rstrip())
        except json.JSONDecodeError as error:
            raise ValueError(f"malformed JSON: {error.msg} at column {error.colno}") from None
        except RecursionError:
            raise ValueError("malformed JSON: nested too deeply") from None
        if not isinstance(record, dict):
            raise ValueError(f"a JSON object is needed, got {_kind(record)}")
        return [_value(record, key) for key in self.keys]


def _value(record: dict[str, Any], key: str) -> str:
    if key not in record:
        there = ", ".join(sorted(record)[:8]) or "none"
        raise ValueError(f"there is no key {key!r} (--json-keys); keys are: {there}")
    if not isinstance(record[key], str):
        raise ValueError(f"the value of {key!r} must be a string, got {_kind(record[key])}")
    return record[key]


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "an array",
    }
    return names.get(type(value), "an object")


class DocumentError(ValueError):
    """What is wrong with a document; says where it is."""


def _error(batch: Batch, line: int, message: str) -> DocumentError:
    return DocumentError(f"{batch.path}, line {line}: {message}")
