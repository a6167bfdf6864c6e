"""What every tokenizer does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class MegatronTokenizerBase(ABC):
    """Turns text into token ids and back."""

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Returns the token ids of a text.

        Raises:
            ValueError: If the tokenizer has no ids for it.
        """

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids.

        Raises:
            ValueError: If an id is outside of the vocabulary.
        """

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """The largest token id plus one."""

    @property
    @abstractmethod
    def eod(self) -> int:
        """The token that ends a document.

        Raises:
            ValueError: If the tokenizer has none.
        """

    @property
    @abstractmethod
    def unique_identifiers(self) -> dict[str, str | int]:
        """What tells this tokenizer from others, for keys of caches."""

    def _check_ids(self, ids: Sequence[int]) -> None:
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"token {token} is outside of the vocabulary, which has ids 0 to "
                    f"{self.vocab_size - 1}"
                )
