"""Tokenizers that Hugging Face's library ``tokenizers`` reads from a ``tokenizer.json``."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any

from .base_tokenizer import MegatronTokenizerBase

# What models call the token that ends a document, where no configuration beside the file says.
_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")


class HuggingFaceTokenizer(MegatronTokenizerBase):
    """A ``tokenizer.json``.

    Texts get the special tokens that the file prescribes (such as a beginning of sequence), and are
    never truncated or padded, whatever it prescribes.

    The end of a document is the ``eos_token`` of a ``tokenizer_config.json`` or
    ``special_tokens_map.json`` beside the file, or else the token with one of the usual names.

    Args:
        tokenizer_path: The file, or the folder it is in.

    Raises:
        FileNotFoundError: If there is no such file.
        ImportError: If the library is not installed.
        ValueError: If the library cannot read the file.
    """

    def __init__(self, tokenizer_path: str) -> None:
        path = tokenizer_path
        if os.path.isdir(path):
            path = os.path.join(path, "tokenizer.json")
        if not os.path.isfile(path):
            raise FileNotFoundError(
                f"there is no file {path}; HuggingFaceTokenizer reads a tokenizer.json, or the one in "
                "a folder, and downloads nothing (--tokenizer-model)"
            )
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ImportError(
                "HuggingFaceTokenizer needs the library tokenizers: "
                "pip install 'megatron-layerwise[tokenizers]'"
            ) from None
        with open(path, "rb") as file:
            content = file.read()
        try:
            self._tokenizer: Any = Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises nothing more special
            raise ValueError(f"{path} is no tokenizer that tokenizers can read: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._path = path
        self._digest = hashlib.sha256(content).hexdigest()
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self._vocab_size = 1 + max(ids, default=-1)
        self._eod = self._find_end()

    def tokenize(self, text: str) -> list[int]:
        """Returns the token ids of a text, with the special tokens that the file prescribes.

        Raises:
            ValueError: If it has half of a surrogate pair, which is no character.
        """
        text.encode("utf-8")
        return self._tokenizer.encode(text).ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids, special tokens included.

        Raises:
            ValueError: If an id is outside of the vocabulary.
        """
        self._check_ids(ids)
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    @property
    def vocab_size(self) -> int:
        """The largest token id plus one, added tokens included."""
        return self._vocab_size

    @property
    def eod(self) -> int:
        """The token that ends a document.

        Raises:
            ValueError: If nothing says which it is.
        """
        if self._eod is None:
            raise ValueError(
                f"{self._path} has no token known to end a document ({', '.join(_END_NAMES)}); put "
                '{"eos_token": "..."} in a file tokenizer_config.json beside it'
            )
        return self._eod

    @property
    def unique_identifiers(self) -> dict[str, str | int]:
        """The class, a hash of the file, and the end of document."""
        end = -1 if self._eod is None else self._eod
        return {"class": type(self).__name__, "sha256": self._digest, "eod": end}

    def _find_end(self) -> int | None:
        names = [*self._configured_ends(), *_END_NAMES]
        ids = (self._tokenizer.token_to_id(name) for name in names)
        return next((token for token in ids if token is not None), None)

    def _configured_ends(self) -> list[str]:
        names = []
        for config in _CONFIGS:
            path = os.path.join(os.path.dirname(self._path), config)
            try:
                with open(path, encoding="utf-8") as file:
                    end = json.load(file).get("eos_token")
            except FileNotFoundError:
                continue
            except (ValueError, AttributeError) as error:
                raise ValueError(f"{path} is no JSON object: {error}") from None
            name = end.get("content") if isinstance(end, dict) else end
            if isinstance(name, str):
                names.append(name)
        return names
