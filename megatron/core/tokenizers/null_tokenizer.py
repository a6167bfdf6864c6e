"""The tokenizer of data that comes as token ids."""

from __future__ import annotations

from collections.abc import Sequence

from .base_tokenizer import MegatronTokenizerBase


class NullTokenizer(MegatronTokenizerBase):
    """Takes numbers in a row, such as ``"5 17 3"``, for token ids.

    Args:
        vocab_size: The largest token id plus one.
        eod_id: The token that ends a document; the last by default.

    Raises:
        ValueError: If ``vocab_size`` is not at least 1, or ``eod_id`` not within it.
    """

    def __init__(self, vocab_size: int, eod_id: int | None = None) -> None:
        if vocab_size < 1:
            raise ValueError(f"vocab_size must be at least 1, got {vocab_size}")
        self._vocab_size = vocab_size
        self._eod = vocab_size - 1 if eod_id is None else eod_id
        self._check_ids([self._eod])

    def tokenize(self, text: str) -> list[int]:
        """Returns the numbers in ``text``, which white space divides.

        Raises:
            ValueError: If something is no number, or outside of the vocabulary.
        """
        try:
            ids = [int(word) for word in text.split()]
        except ValueError:
            raise ValueError("NullTokenizer takes token ids in a row, such as '5 17 3'") from None
        self._check_ids(ids)
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """Returns the numbers in a row.

        Raises:
            ValueError: If an id is outside of the vocabulary.
        """
        self._check_ids(ids)
        return " ".join(str(token) for token in ids)

    @property
    def vocab_size(self) -> int:
        """The largest token id plus one."""
        return self._vocab_size

    @property
    def eod(self) -> int:
        """The token that ends a document."""
        return self._eod

    @property
    def unique_identifiers(self) -> dict[str, str | int]:
        """The class, its vocabulary and end of document."""
        return {
            "class": type(self).__name__,
            "vocab_size": self._vocab_size,
            "eod": self._eod,
        }
