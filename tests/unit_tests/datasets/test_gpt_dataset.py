"""GPT samples, their splits, and what is refused before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split
from megatron.core.tokenizers import NullTokenizer

from .token_files import LENGTH, build, numbered_documents, write_documents


def test_an_item_is_tokens_and_the_tokens_that_follow(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "data", numbered_documents([100]))
    (dataset, _, _) = build(tmp_path, prefix, (None, 0, 0))
    assert len(dataset) == 12
    starts = []
    for item in dataset:
        starts.append(int(item["tokens"][0]))
        assert torch.equal(item["tokens"], starts[-1] + torch.arange(LENGTH))
        assert torch.equal(item["labels"], item["tokens"] + 1)
        assert torch.equal(item["loss_mask"], torch.ones(LENGTH))
        assert torch.equal(item["position_ids"], torch.arange(LENGTH))
        dtypes = {name: value.dtype for name, value in item.items()}
        assert dtypes == {
            "tokens": torch.int64,
            "labels": torch.int64,
            "loss_mask": torch.float32,
            "position_ids": torch.int64,
        }
    # The last label of a sample is the first token of the next.
    assert sorted(starts) == list(range(0, 96, LENGTH))


def test_samples_span_documents(tmp_path: Path) -> None:
    """Documents shorter than a sample: every sample is a cut of the documents in their order."""
    documents = numbered_documents([3, 1, 0, 5, 4, 2, 9, 30, 1])
    (dataset, _, _) = build(tmp_path, write_documents(tmp_path / "data", documents), (20, 0, 0))
    stream = np.concatenate([np.array(documents[d], int) for d in dataset.document_index])
    for i, place in enumerate(dataset.shuffle_index):
        assert (
            dataset.text(i).tolist()
            == stream[place * LENGTH : place * LENGTH + LENGTH + 1].tolist()
        )


def test_there_are_as_many_samples_as_wanted(tmp_path: Path) -> None:
    for tokens in (5, LENGTH, 2 * LENGTH):
        prefix = write_documents(tmp_path / "data", numbered_documents([tokens]))
        for size in (1, 2, 33):
            assert len(build(tmp_path, prefix, (size, 0, 0))[0]) >= size


def test_unsigned_tokens_come_out_unsigned(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "data", [[65535] * 20], np.uint16)
    (dataset, _, _) = build(tmp_path, prefix, vocab_size=65536)
    assert torch.equal(dataset[0]["tokens"], torch.full((LENGTH,), 65535))


# --- Splits


def test_splits_have_documents_of_their_own(tmp_path: Path) -> None:
    documents = numbered_documents([20] * 100)
    prefix = write_documents(tmp_path / "data", documents)
    datasets = build(tmp_path, prefix, (500, 50, 50), "90,7,3")
    seen = [{int(t) // 20 for item in dataset for t in item["tokens"]} for dataset in datasets]
    assert seen == [set(range(90)), set(range(90, 97)), set(range(97, 100))]


@pytest.mark.parametrize(
    ("documents", "split", "bounds"),
    [
        (1000, "969,30,1", [(0, 969), (969, 999), (999, 1000)]),
        (79, "969,30,1", [(0, 77), (77, 79), (79, 79)]),
        (10, "1", [(0, 10), None, None]),
        (10, "0,1,1", [None, (0, 5), (5, 10)]),
        (10, "8/1/1", [(0, 8), (8, 9), (9, 10)]),
        (3, "1,1,1", [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_split_bounds_are_megatrons(documents: int, split: str, bounds: list[Any]) -> None:
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    found = [share and tuple(round(bound * documents) for bound in share) for share in matrix]
    assert found == bounds


@pytest.mark.parametrize("split", ["", "a,b", "0,0,0", "-1,2", "1,1,1,1", "nan,1", "inf,1", "1 1"])
def test_a_wrong_split_is_refused(split: str) -> None:
    with pytest.raises(ValueError, match="not one to three shares"):
        parse_and_normalize_split(split)


def test_an_empty_split_that_is_wanted_is_refused(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "data", numbered_documents([300] * 3))
    with pytest.raises(ValueError, match=r"the test split of .*data is empty: of its 3 documents"):
        build(tmp_path, prefix, (5, 5, 5), "2,1,0.1")
    train, valid, test = build(tmp_path, prefix, (5, 5, 0), "2,1,0.1")
    assert train is not None and valid is not None and test is None
    assert build(tmp_path, prefix, (5, 5, 5), "2,1,0")[2] is None


def test_no_tokens_are_no_data(tmp_path: Path) -> None:
    empty: list[list[list[int]]] = [[], [[], []]]
    for name, documents in zip(("none", "empty"), empty, strict=True):
        prefix = write_documents(tmp_path / name, documents)
        with pytest.raises(ValueError, match=f"the train split of .*{name} is empty"):
            build(tmp_path, prefix)
    prefix = write_documents(tmp_path / "short", [[1] * LENGTH])
    with pytest.raises(ValueError, match=r"8 tokens, and 2000000 samples of 9 .* 2000001 epochs"):
        build(tmp_path, prefix, (2_000_000, 0, 0))
    with pytest.raises(ValueError, match="it has 8 tokens, and one sample takes 9"):
        build(tmp_path, prefix, (None, 0, 0))


# --- Vocabulary


@pytest.mark.parametrize(
    ("token", "dtype"), [(100, np.int32), (100, np.uint16), (-1, np.int32), (100, np.int8)]
)
def test_a_token_outside_of_the_vocabulary_is_refused(
    tmp_path: Path, token: int, dtype: Any
) -> None:
    prefix = write_documents(tmp_path / "data", [[1] * 50, [], [99, 2, token, 5]], dtype)
    for _ in range(2):  # the second time from the cache
        with pytest.raises(
            ValueError, match=rf"data.bin: token {token} of sequence 2 .* ids 0 to 99"
        ):
            build(tmp_path, prefix, vocab_size=100)
    if token > 0:
        build(tmp_path, prefix, vocab_size=101)


def test_tokens_must_be_integers(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "data", [[1] * 50], np.float32)
    with pytest.raises(ValueError, match="holds float32 values"):
        build(tmp_path, prefix)


def test_tokens_are_read_through_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = write_documents(tmp_path / "data", numbered_documents([50]))
    build(tmp_path, prefix)
    reads: list[int] = []
    read = IndexedDataset.iter_token_chunks

    def counted(self: IndexedDataset) -> Any:
        reads.append(1)
        return read(self)

    monkeypatch.setattr(IndexedDataset, "iter_token_chunks", counted)
    build(tmp_path, prefix, seed=2)
    assert reads == []
    write_documents(tmp_path / "data", numbered_documents([50], first=9_990))
    with pytest.raises(ValueError, match="token 10000"):
        build(tmp_path, prefix)


# --- Options


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    tokenizer = NullTokenizer(10)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"tokenizer": None}, "needs a tokenizer"),
        ({"sequence_length": 0}, "sequence_length must be at least 1, got 0"),
        ({"eod_mask_loss": True}, "eod_mask_loss must be off"),
        ({"reset_position_ids": True}, "reset_position_ids must be off"),
        ({"reset_attention_mask": True}, "reset_attention_mask must be off"),
        ({"create_attention_mask": True}, "create_attention_mask must be off"),
        ({"blend": (["a"], None)}, "needs split"),
        ({"blend": (["a"], [0.0]), "split": "1"}, "weight of a"),
        ({"blend": (["a", "b"], [1.0]), "split": "1"}, "2 prefixes have 1 weights"),
        ({"blend_per_split": [None] * 3, "split": "1"}, "no place for"),
        ({"blend_per_split": [None] * 2}, "2 blends for 3 splits"),
    ]
    for options, message in wrong:
        complete: dict[str, Any] = {
            "random_seed": 1,
            "sequence_length": 4,
            "tokenizer": tokenizer,
        } | options
        with pytest.raises(ValueError, match=message):
            GPTDatasetConfig(**complete)


def test_no_blend_is_for_mock_datasets_alone() -> None:
    config = GPTDatasetConfig(random_seed=1, sequence_length=4, tokenizer=NullTokenizer(10))
    with pytest.raises(ValueError, match="use MockGPTDataset"):
        BlendedMegatronDatasetBuilder(GPTDataset, (1, 0, 0), lambda: True, config).build()
    assert (
        BlendedMegatronDatasetBuilder(GPTDataset, (1, 1, 1), lambda: False, config).build()
        == [None] * 3
    )
    with pytest.raises(ValueError, match="2 entries for 3 splits"):
        BlendedMegatronDatasetBuilder(GPTDataset, (1, 0), lambda: True, config)
    assert [split.value for split in Split] == [0, 1, 2]
