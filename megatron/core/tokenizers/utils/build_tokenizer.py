"""The choice of a tokenizer by name."""

from __future__ import annotations

from ..base_tokenizer import MegatronTokenizerBase
from ..byte_tokenizer import ByteTokenizer
from ..huggingface_tokenizer import HuggingFaceTokenizer
from ..null_tokenizer import NullTokenizer

TOKENIZER_TYPES = ("ByteTokenizer", "HuggingFaceTokenizer", "NullTokenizer")


def build_tokenizer(
    tokenizer_type: str | None = None,
    tokenizer_model: str | None = None,
    vocab_size: int | None = None,
) -> MegatronTokenizerBase:
    """Builds a tokenizer.

    Args:
        tokenizer_type: One of :data:`TOKENIZER_TYPES`; None for ``ByteTokenizer``.
        tokenizer_model: A ``tokenizer.json``, which ``HuggingFaceTokenizer`` needs and others refuse.
        vocab_size: What ``NullTokenizer`` needs; others know theirs and take no other.

    Raises:
        ValueError: If the type is unknown, something it needs is missing, or something is given that
            it has no use for.
        FileNotFoundError: If there is no file ``tokenizer_model``.
        ImportError: If a library is not installed, naming the extra that brings it.
    """
    name = tokenizer_type or "ByteTokenizer"
    if name not in TOKENIZER_TYPES:
        raise ValueError(
            f"--tokenizer-type {name} is unknown; choose one of {', '.join(TOKENIZER_TYPES)}"
        )
    if name == "HuggingFaceTokenizer":
        if tokenizer_model is None:
            raise ValueError(f"{name} needs --tokenizer-model, a tokenizer.json")
        tokenizer: MegatronTokenizerBase = HuggingFaceTokenizer(tokenizer_model)
    elif tokenizer_model is not None:
        raise ValueError(f"{name} takes no --tokenizer-model, got {tokenizer_model}")
    elif name == "NullTokenizer":
        if vocab_size is None:
            raise ValueError(f"{name} needs --vocab-size, the largest token id plus one")
        return NullTokenizer(vocab_size)
    else:
        tokenizer = ByteTokenizer()
    if vocab_size is not None and vocab_size != tokenizer.vocab_size:
        raise ValueError(
            f"--vocab-size {vocab_size} is not that of {name}, {tokenizer.vocab_size}; for token ids "
            "from another tokenizer use --tokenizer-type NullTokenizer"
        )
    return tokenizer
