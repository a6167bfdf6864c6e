"""Blends: exact proportions at every prefix."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.blended_dataset import (
    BlendedDataset,
    build_blend_indices,
    integer_weights,
    load_blend_indices,
)
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split, get_blend_from_list
from megatron.core.tokenizers import NullTokenizer

from .token_files import numbered_documents, write_documents


def check_proportions(weights: list[int], size: int) -> None:
    indices = build_blend_indices(weights, size)
    total = sum(weights)
    for i, weight in enumerate(weights):
        mine = indices.dataset_index == i
        given = np.cumsum(mine)
        # In whole numbers: |given - k * weight / total| < 1.
        off = given * total - np.arange(1, size + 1) * weight
        assert np.all(np.abs(off) < total), f"dataset {i} of {weights}"
        assert indices.dataset_sample_index[mine].tolist() == list(range(given[-1]))


@pytest.mark.parametrize(
    "weights", [[1], [1, 1], [3, 7], [1, 999], [1] * 40, [500, 300, 1, 1, 1, 1, 196]]
)
def test_every_prefix_is_in_proportion(weights: list[int]) -> None:
    check_proportions(weights, 2500)


@pytest.mark.parametrize("seed", range(20))
def test_every_prefix_is_in_proportion_for_any_weights(seed: int) -> None:
    random = np.random.default_rng(seed)
    weights = (random.pareto(0.7, int(random.integers(2, 12))) * 10 + 1).astype(int).tolist()
    check_proportions(weights, 700)


def test_largest_deficit_first_would_not_do() -> None:
    """The weights for which serving the dataset that is furthest behind misses by more than one."""
    weights = [1] * 9 + [2] * 9 + [40]
    check_proportions(weights, 3 * sum(weights))


def test_weights_are_the_decimals_that_were_written() -> None:
    assert integer_weights([0.3, 0.7]) == [3, 7]
    assert integer_weights([30.0, 70.0]) == [3, 7]
    assert integer_weights([np.float64(0.1), 0.2]) == [1, 2]
    assert integer_weights([1e-3, 1]) == [1, 1000]
    assert [Fraction(w, 4) for w in integer_weights([0.25, 0.75])] == [
        Fraction(1, 4),
        Fraction(3, 4),
    ]


def test_what_data_path_means() -> None:
    assert get_blend_from_list(None) is None
    assert get_blend_from_list(["a"]) == (["a"], None)
    assert get_blend_from_list(["a", "b"]) == (["a", "b"], None)
    assert get_blend_from_list(["30", "a", " 0.7", "b "]) == (["a", "b"], [30.0, 0.7])
    assert get_blend_from_list(["5"]) == (["5"], None)
    assert get_blend_from_list(["a", "5", "b"]) == (["a", "5", "b"], None)
    for wrong in (["1", "a", "b"], ["1", "a", "b", "c"], ["1", "a", "2"]):
        with pytest.raises(ValueError, match="neither prefixes nor weights"):
            get_blend_from_list(wrong)
    for weight in ("0", "-1", "nan", "inf"):
        with pytest.raises(ValueError, match="weight of b must be a number above 0"):
            get_blend_from_list(["1", "a", weight, "b"])


LENGTH = 4


def config(tmp_path: Path, blend: object, split: str = "1,0,0") -> GPTDatasetConfig:
    return GPTDatasetConfig(
        random_seed=1,
        sequence_length=LENGTH,
        blend=blend,  # type: ignore[arg-type]
        split=split,
        path_to_cache=str(tmp_path / "cache"),
        tokenizer=NullTokenizer(1000),
    )


def build(tmp_path: Path, blend: object, size: int | None) -> BlendedDataset:
    options = config(tmp_path, blend)
    (dataset, _, _) = BlendedMegatronDatasetBuilder(
        GPTDataset, [size, 0, 0], lambda: True, options
    ).build()
    assert isinstance(dataset, BlendedDataset)
    return dataset


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    return [
        write_documents(tmp_path / "a", numbered_documents([20, 21])),  # 41 tokens, 10 samples
        write_documents(
            tmp_path / "b", numbered_documents([7, 6], first=500)
        ),  # 13 tokens, 3 samples
    ]


def origins(dataset: BlendedDataset) -> list[int]:
    return [int(dataset[i]["tokens"][0] >= 500) for i in range(len(dataset))]


def test_weights_decide_and_sources_are_repeated_as_needed(
    tmp_path: Path, prefixes: list[str]
) -> None:
    dataset = build(tmp_path, (prefixes, [0.25, 0.75]), 101)
    assert len(dataset) == 101
    given = np.cumsum(origins(dataset))
    assert np.all(np.abs(given - 0.75 * np.arange(1, 102)) < 1)


def test_without_weights_sizes_decide(tmp_path: Path, prefixes: list[str]) -> None:
    assert sum(origins(build(tmp_path, (prefixes, None), 54))) == 13
    one_epoch = build(tmp_path, (prefixes, None), None)
    assert origins(one_epoch).count(0) == 10 and origins(one_epoch).count(1) == 3


def test_a_blend_of_one_is_that_one(tmp_path: Path, prefixes: list[str]) -> None:
    options = config(tmp_path, (prefixes[:1], [0.3]))
    built = BlendedMegatronDatasetBuilder(GPTDataset, [5, 0, 0], lambda: True, options).build()
    assert type(built[0]) is GPTDataset


def test_weights_need_a_size(tmp_path: Path, prefixes: list[str]) -> None:
    with pytest.raises(ValueError, match="number of samples must be given"):
        build(tmp_path, (prefixes, [1.0, 1.0]), None)


def test_a_source_must_have_what_is_taken(tmp_path: Path, prefixes: list[str]) -> None:
    options = config(tmp_path, (prefixes[:1], None))
    part = GPTDataset(
        GPTDataset.build_low_level_dataset(prefixes[0], options),
        prefixes[0],
        np.arange(2),
        None,
        Split.train,
        options,
    )
    with pytest.raises(ValueError, match=r"takes 11 samples from .*a, which has 10"):
        BlendedDataset([part, part], [11, 1], None, options)


def test_the_period_is_worked_out_once(tmp_path: Path) -> None:
    """Thousands of periods: the first is the pattern of all."""
    indices = load_blend_indices([0.3, 0.7], 100_003, None)
    assert np.array_equal(indices.dataset_index, np.resize(indices.dataset_index[:10], 100_003))
