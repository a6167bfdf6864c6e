"""Tokenizers: there and back, and what they refuse."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.core.tokenizers import ByteTokenizer, NullTokenizer, build_tokenizer


def write_tokenizer(folder: Path, **changes: Any) -> Path:
    """A tokenizer.json of a few words; unknown ones are 0."""
    content = {
        "version": "1.0",
        "truncation": {
            "max_length": 3,
            "stride": 0,
            "strategy": "LongestFirst",
            "direction": "Right",
        },
        "padding": None,
        "added_tokens": [
            {
                "id": 5,
                "content": "<|endoftext|>",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {"?": 0, "one": 1, "two": 2, "three": 3, "<end>": 4},
            "unk_token": "?",
        },
    } | changes
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(content))
    return path


def test_bytes_there_and_back() -> None:
    tokenizer = build_tokenizer()
    text = "Grüße, \U0001f40d\n\0"
    assert tokenizer.tokenize(text) == list(text.encode())
    assert tokenizer.detokenize([*tokenizer.tokenize(text), tokenizer.eod]) == text
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    assert tokenizer.detokenize([0xC3]) == "\ufffd"
    with pytest.raises(ValueError, match="token 257 is outside"):
        tokenizer.detokenize([257])
    with pytest.raises(ValueError, match="surrogates not allowed"):
        tokenizer.tokenize("\ud800")


def test_numbers_there_and_back() -> None:
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=10)
    assert tokenizer.tokenize(" 3 9\n0") == [3, 9, 0]
    assert tokenizer.detokenize([3, 9, 0]) == "3 9 0"
    assert (tokenizer.vocab_size, tokenizer.eod) == (10, 9)
    assert NullTokenizer(10, eod_id=0).eod == 0
    for text, message in (("10", "token 10 is outside"), ("-1", "token -1"), ("x", "'5 17 3'")):
        with pytest.raises(ValueError, match=message):
            tokenizer.tokenize(text)
    for wrong in ((0, None), (5, 5)):
        with pytest.raises(ValueError):
            NullTokenizer(*wrong)


def test_hugging_face_there_and_back(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path = write_tokenizer(tmp_path)
    for place in (path, tmp_path):
        tokenizer = build_tokenizer("HuggingFaceTokenizer", str(place))
        # Longer than the truncation that the file asks for.
        assert tokenizer.tokenize("one two three four one") == [1, 2, 3, 0, 1]
        assert tokenizer.detokenize([1, 2, 5]) == "one two <|endoftext|>"
        # The end of document is no word of the model's, but needs a row of the embedding.
        assert (tokenizer.vocab_size, tokenizer.eod) == (6, 5)
    # Nor do ids 1 to 7 exist here.
    model = {"type": "WordLevel", "vocab": {"?": 0, "one": 8}, "unk_token": "?"}
    write_tokenizer(tmp_path, added_tokens=[], model=model)
    assert build_tokenizer("HuggingFaceTokenizer", str(path)).vocab_size == 9


def test_a_configuration_beside_the_file_says_what_ends_documents(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path = write_tokenizer(tmp_path)
    for end in ("<end>", {"content": "<end>", "special": True}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
        assert build_tokenizer("HuggingFaceTokenizer", str(path)).eod == 4
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is no JSON"):
        build_tokenizer("HuggingFaceTokenizer", str(path))
    (tmp_path / "tokenizer_config.json").unlink()
    model = {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"}
    write_tokenizer(tmp_path, added_tokens=[], model=model)
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(path))
    with pytest.raises(ValueError, match="no token known to end a document"):
        _ = tokenizer.eod


def test_what_tells_tokenizers_apart(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path = str(write_tokenizer(tmp_path))
    before = build_tokenizer("HuggingFaceTokenizer", path).unique_identifiers
    assert build_tokenizer("HuggingFaceTokenizer", path).unique_identifiers == before
    write_tokenizer(tmp_path, normalizer={"type": "Lowercase"})
    assert build_tokenizer("HuggingFaceTokenizer", path).unique_identifiers != before
    assert NullTokenizer(9).unique_identifiers != NullTokenizer(10).unique_identifiers
    assert json.dumps(ByteTokenizer().unique_identifiers)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("SentencePieceTokenizer", None, None),
            "ByteTokenizer, HuggingFaceTokenizer, NullTokenizer",
        ),
        (("NullTokenizer", None, None), "needs --vocab-size"),
        (("HuggingFaceTokenizer", None, None), "needs --tokenizer-model"),
        (("ByteTokenizer", "t.json", None), "takes no --tokenizer-model, got t.json"),
        (("ByteTokenizer", None, 256), "--vocab-size 256 is not that of ByteTokenizer, 257"),
    ],
)
def test_wrong_options_are_refused(options: tuple[Any, Any, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_tokenizer(*options)


def test_what_is_missing_or_broken_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file gpt2; .* downloads nothing"):
        build_tokenizer("HuggingFaceTokenizer", "gpt2")
    path = write_tokenizer(tmp_path)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tokenizers", None)
        with pytest.raises(ImportError, match=r"megatron-layerwise\[tokenizers\]"):
            build_tokenizer("HuggingFaceTokenizer", str(path))
    pytest.importorskip("tokenizers")
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json is no tokenizer"):
        build_tokenizer("HuggingFaceTokenizer", str(path))
