"""The datasets of a job, from its options."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.datasets.blended_megatron_dataset_builder import (
    BlendedMegatronDatasetBuilder,
    TopLevelDataset,
)
from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split
from megatron.core.datasets.default_text import default_text_blend_per_split
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.tokenizers import MegatronTokenizerBase


def build_train_valid_test_datasets(
    tokenizer: MegatronTokenizerBase,
    sizes: Sequence[int | None],
    *,
    seed: int,
    seq_length: int,
    data_path: Sequence[str] | None = None,
    mock_data: bool = False,
    split: str = "969,30,1",
    data_cache_path: str | None = None,
) -> list[TopLevelDataset | None]:
    """Builds the train, valid and test datasets.

    Args:
        tokenizer: Gives the vocabulary; tokenizes the default text.
        sizes: Samples wanted of train, valid and test; 0 for a split that is not wanted.
        seed: Fixes the order of samples.
        seq_length: Tokens that a sample feeds to the model.
        data_path: Prefixes, or weights and prefixes in turn. Without it and ``mock_data``, Python's
            own documentation, which has splits of its own: of ``split`` only shares of 0 count.
        mock_data: Make tokens up.
        split: Shares of train, valid and test.
        data_cache_path: Folder of index files and of the tokenized default text; by default the
            user's cache folder.

    Returns:
        A dataset with at least as many samples as wanted for each split; None for one that is not
        wanted or whose share is 0.

    Raises:
        FileNotFoundError: If a file is missing.
        ImportError: If this Python comes without the default text.
        ValueError: If data is damaged, holds tokens outside of the vocabulary, or has nothing for a
            split that is wanted; if an option is wrong.
        OSError: If the cache folder cannot be written to.
    """
    blend = get_blend_from_list(data_path)
    if blend is not None and mock_data:
        raise ValueError("data_path and mock_data exclude each other")
    blend_per_split = None
    if blend is None and not mock_data:
        shares = parse_and_normalize_split(split)
        text = default_text_blend_per_split(tokenizer, data_cache_path)
        blend_per_split = [
            part if share > 0 else None for part, share in zip(text, shares, strict=True)
        ]
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=None if blend_per_split is not None else split,
        path_to_cache=data_cache_path,
        tokenizer=tokenizer,
    )
    cls = MockGPTDataset if mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(cls, sizes, lambda: True, config).build()
