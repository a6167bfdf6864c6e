"""Samples of a GPT: tokens and, one place further on, the tokens to be predicted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.core.tokenizers import MegatronTokenizerBase

from .blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from .files import default_cache_folder
from .index_cache import Arrays, cached_arrays, digest
from .indexed_dataset import IndexedDataset
from .sample_index import SampleIndices, build_sample_indices, count_epochs, count_samples
from .token_range import check_token_ids
from .utils import Split

# More are a mistake, and their index would not fit in memory.
_MAX_EPOCHS = 1_000_000


@dataclass
class GPTDatasetConfig(BlendedMegatronDatasetConfig):
    """Options of GPT datasets. Samples run across documents and attention is causal, so the options
    that treat document ends otherwise must be left off."""

    reset_position_ids: bool | None = None
    reset_attention_mask: bool | None = None
    eod_mask_loss: bool | None = None
    create_attention_mask: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokenizer is None:
            raise ValueError("GPTDatasetConfig needs a tokenizer")
        for name in (
            "reset_position_ids",
            "reset_attention_mask",
            "eod_mask_loss",
            "create_attention_mask",
        ):
            if getattr(self, name):
                raise ValueError(
                    f"{name} must be off: samples run across documents, and attention is causal "
                    "without a mask"
                )

    @property
    def cache_folder(self) -> str | None:
        """Where indices are kept: ``path_to_cache``, or else the user's cache folder, if any."""
        return self.path_to_cache or default_cache_folder()

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return _tokenizer(self).vocab_size


def _tokenizer(config: GPTDatasetConfig) -> MegatronTokenizerBase:
    if config.tokenizer is None:
        raise ValueError("GPTDatasetConfig needs a tokenizer")
    return config.tokenizer


class LowLevelDataset(Protocol):
    """Sequences of tokens."""

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """Tokens of each sequence."""

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Returns tokens of a sequence."""


class GPTDataset(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples of ``sequence_length`` tokens, across documents, in an order fixed by the seed.

    An item holds ``tokens`` and ``labels`` (int64), ``loss_mask`` (float32) and ``position_ids``
    (int64), each ``[sequence_length]``.

    Args:
        indexed_dataset: Where the tokens are.
        dataset_path: Its prefix, for messages.
        indexed_indices: The sequences to use.
        num_samples: Samples wanted; the dataset has at least so many, from as many epochs as that
            takes. None for one epoch.
        index_split: The split that ``indexed_indices`` are.
        config: Options.

    Raises:
        ValueError: If there are no tokens to use, or far too few.
        OSError: If the index cannot be kept in the cache folder.
    """

    def __init__(
        self,
        indexed_dataset: LowLevelDataset,
        dataset_path: str | None,
        indexed_indices: NDArray[np.integer[Any]],
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        self.dataset = indexed_dataset
        self.dataset_path = dataset_path
        self.indices = indexed_indices
        self.num_samples = num_samples
        self.index_split = index_split
        self.config = config
        self._check_size()
        self.document_index, self.sample_index, self.shuffle_index = self._load_indices()

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: LowLevelDataset) -> int:
        """Returns the number of sequences, which is what splits divide."""
        return len(low_level_dataset.sequence_lengths)

    @staticmethod
    def build_low_level_dataset(
        dataset_path: str | None, config: GPTDatasetConfig
    ) -> LowLevelDataset:
        """Opens the token files and checks them.

        Raises:
            FileNotFoundError: If a file is missing.
            ValueError: If a file is damaged, or a token is outside of the vocabulary.
        """
        if dataset_path is None:
            raise ValueError(
                "GPTDatasetConfig has neither blend nor blend_per_split; for made-up data use "
                "MockGPTDataset"
            )
        dataset = IndexedDataset(dataset_path)
        check_token_ids(dataset, config.vocab_size, config.cache_folder)
        return dataset

    def __len__(self) -> int:
        """The number of samples: at least ``num_samples``, and up to the end of the last epoch."""
        return len(self.shuffle_index)

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        text = torch.from_numpy(self.text(idx))
        length = self.config.sequence_length
        return {
            "tokens": text[:-1],
            "labels": text[1:].clone(),
            "loss_mask": torch.ones(length),
            "position_ids": torch.arange(length),
        }

    def text(self, idx: int) -> NDArray[np.int64]:
        """Returns the ``sequence_length + 1`` tokens of sample ``idx``."""
        place = self.shuffle_index[idx]
        (first, offset), (last, end) = self.sample_index[place : place + 2].tolist()
        get = self.dataset.get
        if first == last:
            parts = [get(self.document_index[first], offset, end + 1 - offset)]
        else:
            parts = [get(self.document_index[first], offset)]
            parts += [get(self.document_index[i]) for i in range(first + 1, last)]
            parts += [get(self.document_index[last], 0, end + 1)]
        return np.concatenate(parts, dtype=np.int64)

    def _check_size(self) -> None:
        where = f"the {self.index_split.name} split of {self.dataset_path or 'the mock data'}"
        if len(self.indices) == 0:
            raise ValueError(f"{where} is empty: it has no documents")
        tokens = int(self.dataset.sequence_lengths[self.indices].sum(dtype=np.int64))
        length = self.config.sequence_length
        if tokens == 0:
            raise ValueError(f"{where} is empty: none of its documents has a token")
        epochs = count_epochs(self.num_samples, tokens, length)
        if epochs > _MAX_EPOCHS:
            raise ValueError(
                f"{where} has {tokens} tokens, and {self.num_samples} samples of {length + 1} would "
                f"take {epochs} epochs of them; give more data"
            )
        if count_samples(epochs * tokens, length) == 0:
            raise ValueError(
                f"{where} is empty: it has {tokens} tokens, and one sample takes {length + 1}"
            )

    def _load_indices(self) -> SampleIndices:
        build = partial(
            build_sample_indices,
            self.dataset.sequence_lengths,
            self.indices,
            self.config.sequence_length,
            self.num_samples,
            self.config.random_seed,
        )
        description = {
            "sequence_lengths": digest(self.dataset.sequence_lengths[self.indices]),
            "indices": digest(np.asarray(self.indices, np.int64)),
            "sequence_length": self.config.sequence_length,
            "num_samples": self.num_samples,
            "random_seed": self.config.random_seed,
        }
        kind = f"{type(self).__name__}-{self.index_split.name}"
        arrays: Arrays = cached_arrays(
            self._index_folder(),
            kind,
            description,
            SampleIndices._fields,
            lambda: build()._asdict(),
        )
        return SampleIndices(**arrays)

    def _index_folder(self) -> str | None:
        return self.config.cache_folder


class MockGPTLowLevelDataset:
    """Made-up sequences that count up from 1, modulo the vocabulary, and end with end-of-document.

    Args:
        tokenizer: Gives the size of the vocabulary and the end-of-document token.
    """

    seed: int = 0
    size: int = 1_000
    max_sequence_length: int = 4096

    def __init__(self, tokenizer: MegatronTokenizerBase) -> None:
        self._end = tokenizer.eod
        self._ascending = np.arange(1, self.max_sequence_length) % tokenizer.vocab_size
        self.sequence_lengths: NDArray[np.int32] = np.random.default_rng(self.seed).integers(
            1, self.max_sequence_length, self.size, dtype=np.int32
        )

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, idx: int) -> NDArray[np.int64]:
        return self.get(idx)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> NDArray[np.int64]:
        """Returns ``length`` tokens of sequence ``idx`` from ``offset`` on."""
        full = self._ascending[: self.sequence_lengths[idx]].copy()
        full[-1] = self._end
        return full[offset : None if length is None else offset + length]


class MockGPTDataset(GPTDataset):
    """A :class:`GPTDataset` of made-up tokens; nothing is read or kept on disk."""

    @staticmethod
    def build_low_level_dataset(
        dataset_path: str | None, config: GPTDatasetConfig
    ) -> MockGPTLowLevelDataset:
        """Makes the sequences up.

        Raises:
            ValueError: If there is a path to read from.
        """
        if dataset_path is not None:
            raise ValueError(f"MockGPTDataset reads no files, and was given {dataset_path}")
        return MockGPTLowLevelDataset(_tokenizer(config))

    def _index_folder(self) -> None:
        return None
