"""Where samples come from: text of the user's, made-up tokens, the default text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.datasets import default_text
from megatron.core.datasets.gpt_dataset import MockGPTDataset
from megatron.core.tokenizers import ByteTokenizer, NullTokenizer
from megatron.training.datasets.data_samplers import build_pretraining_data_loader
from megatron.training.datasets.gpt_datasets import build_train_valid_test_datasets
from tools.preprocess_data import main as preprocess_data

from .token_files import LENGTH


def test_mock_data_needs_no_files(tmp_path: Path) -> None:
    tokenizer = NullTokenizer(64)
    datasets = build_train_valid_test_datasets(
        tokenizer,
        (50, 20, 10),
        seed=3,
        seq_length=LENGTH,
        mock_data=True,
        data_cache_path=str(tmp_path / "cache"),
    )
    for dataset, size in zip(datasets, (50, 20, 10), strict=True):
        assert isinstance(dataset, MockGPTDataset) and len(dataset) >= size
        item = dataset[0]
        assert int(item["tokens"].min()) >= 0 and int(item["tokens"].max()) < 64
    assert not (tmp_path / "cache").exists()
    with pytest.raises(ValueError, match="exclude each other"):
        build_train_valid_test_datasets(
            tokenizer, (1, 0, 0), seed=1, seq_length=4, mock_data=True, data_path=["a"]
        )


def test_the_default_text_is_english_and_its_splits_differ(tmp_path: Path) -> None:
    def build_text(split: str = "969,30,1") -> list[Any]:
        return build_train_valid_test_datasets(
            ByteTokenizer(),
            (None, None, None),
            seed=1,
            seq_length=64,
            split=split,
            data_cache_path=str(tmp_path),
        )

    train, valid, test = build_text()
    texts = []
    for dataset, least in ((train, 250_000), (valid, 10_000), (test, 10_000)):
        documents = [ByteTokenizer().detokenize(sequence.tolist()) for sequence in dataset.dataset]
        texts.append("".join(documents))
        assert len(texts[-1]) > least
        assert all(sequence[-1] == ByteTokenizer().eod for sequence in dataset.dataset)
    assert 'The "assert" statement' in texts[0]
    said = [{" ".join(part.split()) for part in text.split("\n\n")} for text in texts]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert not {paragraph for paragraph in said[one] & said[other] if len(paragraph) >= 64}

    (folder,) = tmp_path.glob("default-text-*/")
    written = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert build_text("1,1,0")[2] is None
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == written
    (folder / "valid.bin").unlink()
    (folder / "valid.bin").write_bytes(b"")
    assert build_text()[1].text(0).tolist() == valid.text(0).tolist()


def test_default_text_that_another_process_has_just_finished_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    chapters = ["\n\n".join(f"paragraph {i}" for i in range(100))]
    default_text._build(str(folder), chapters, ByteTokenizer())
    first = {path.name: path.stat().st_ino for path in folder.iterdir()}
    default_text._build(str(folder), chapters, ByteTokenizer())
    assert {path.name: path.stat().st_ino for path in folder.iterdir()} == first
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_the_default_text_needs_a_tokenizer_of_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be tokenized by NullTokenizer.*--data-path"):
        build_train_valid_test_datasets(
            NullTokenizer(10), (1, 0, 0), seed=1, seq_length=4, data_cache_path=str(tmp_path)
        )


def test_a_python_without_its_documentation_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ImportError, match="give --data-path or --mock-data"):
        build_train_valid_test_datasets(
            ByteTokenizer(), (1, 0, 0), seed=1, seq_length=4, data_cache_path=str(tmp_path)
        )


def test_from_text_to_the_batches_of_ranks(tmp_path: Path) -> None:
    """The same global batches on one rank and on four, after any number of consumed samples."""
    source = tmp_path / "a.txt"
    source.write_text("\n\n".join(f"paragraph {i}, {i * i}" for i in range(500)))
    arguments = ["--input", str(source), "--text-format", "paragraph", "--append-eod"]
    assert preprocess_data([*arguments, "--output-prefix", str(tmp_path / "a")]) == 0
    (dataset, _, _) = build_train_valid_test_datasets(
        ByteTokenizer(),
        (160, 0, 0),
        seed=5,
        seq_length=32,
        data_path=[str(tmp_path / "a_text_document")],
        data_cache_path=str(tmp_path / "cache"),
    )

    def global_batches(ranks: int, micro: int, consumed: int) -> torch.Tensor:
        loaders = [
            build_pretraining_data_loader(dataset, consumed, micro, rank, ranks)
            for rank in range(ranks)
        ]
        steps = zip(*loaders, strict=True)  # type: ignore[arg-type]
        rows = torch.cat([part["tokens"] for step in steps for part in step])
        return rows[: len(rows) // 16 * 16].reshape(-1, 16, 32)

    alone = global_batches(1, 2, 0)
    assert len(alone) >= 10
    assert torch.equal(global_batches(4, 4, 0), alone)
    assert torch.equal(global_batches(2, 1, 48), alone[3:])
