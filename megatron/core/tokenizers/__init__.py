"""From text to token ids and back."""

from .base_tokenizer import MegatronTokenizerBase
from .byte_tokenizer import ByteTokenizer
from .huggingface_tokenizer import HuggingFaceTokenizer
from .null_tokenizer import NullTokenizer
from .utils.build_tokenizer import build_tokenizer

__all__ = [
    "ByteTokenizer",
    "HuggingFaceTokenizer",
    "MegatronTokenizerBase",
    "NullTokenizer",
    "build_tokenizer",
]
