"""The tokenizer that needs no files: bytes of UTF-8."""

from __future__ import annotations

from collections.abc import Sequence

from .base_tokenizer import MegatronTokenizerBase


class ByteTokenizer(MegatronTokenizerBase):
    """One token for each byte of the text in UTF-8, and token 256 for the end of a document."""

    def tokenize(self, text: str) -> list[int]:
        """Returns the bytes of ``text`` in UTF-8.

        Raises:
            ValueError: If it has half of a surrogate pair, which is no character.
        """
        return list(text.encode("utf-8"))

    def detokenize(self, ids: Sequence[int]) -> str:
        """Returns the text of bytes; ends of documents have none, and broken characters are ``�``.

        Raises:
            ValueError: If an id is outside of the vocabulary.
        """
        self._check_ids(ids)
        return bytes(token for token in ids if token != self.eod).decode("utf-8", "replace")

    @property
    def vocab_size(self) -> int:
        """257."""
        return 257

    @property
    def eod(self) -> int:
        """256."""
        return 256

    @property
    def unique_identifiers(self) -> dict[str, str | int]:
        """The name of the class."""
        return {"class": type(self).__name__}
