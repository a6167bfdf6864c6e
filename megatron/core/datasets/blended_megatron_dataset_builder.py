"""From prefixes, weights and shares to the datasets of the three splits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .blended_dataset import BlendedDataset, load_blend_indices
from .blended_megatron_dataset_config import Share
from .gpt_dataset import GPTDataset, GPTDatasetConfig, LowLevelDataset
from .utils import Split

TopLevelDataset = GPTDataset | BlendedDataset


class BlendedMegatronDatasetBuilder:
    """Builds the train, valid and test datasets.

    Any number of processes may build at the same time, with or without a common cache folder; they
    need not wait for each other.

    Args:
        cls: :class:`~megatron.core.datasets.gpt_dataset.GPTDataset` or a subclass.
        sizes: Samples wanted of each split. None for one epoch, 0 for a split that is not wanted.
        is_built_on_rank: Whether this process wants the datasets at all.
        config: Sources and options.

    Raises:
        ValueError: If ``sizes`` has not one entry for each split.
    """

    def __init__(
        self,
        cls: type[GPTDataset],
        sizes: Sequence[int | None],
        is_built_on_rank: Callable[[], bool],
        config: GPTDatasetConfig,
    ) -> None:
        if len(sizes) != len(Split):
            raise ValueError(f"sizes has {len(sizes)} entries for {len(Split)} splits")
        self.cls = cls
        self.sizes = list(sizes)
        self.is_built_on_rank = is_built_on_rank
        self.config = config
        self._opened: dict[str | None, LowLevelDataset] = {}

    def build(self) -> list[TopLevelDataset | None]:
        """Builds the datasets.

        A source without weights counts by its size. Several epochs of a source are used where that
        is needed for as many samples as are wanted.

        Returns:
            A dataset for each split; None for one that is not wanted, whose share is 0, or that has
            no blend, and for all where ``is_built_on_rank`` says no.

        Raises:
            FileNotFoundError: If a file is missing.
            ValueError: If a file is damaged, holds tokens outside of the vocabulary, or has nothing
                for a split that is wanted.
            OSError: If the cache folder cannot be written to.
        """
        if not self.is_built_on_rank():
            return [None] * len(Split)
        return [self._build_split(split) for split in Split]

    def _build_split(self, split: Split) -> TopLevelDataset | None:
        config, size = self.config, self.sizes[split.value]
        share: Share | None = (0.0, 1.0)
        prefixes: list[str] | list[None] = [None]
        weights = None
        if config.split_matrix is not None:
            share = config.split_matrix[split.value]
        if not config.mock:
            blend = config.blend_per_split[split.value] if config.blend_per_split else config.blend
            prefixes, weights = blend or ([], None)
        if size == 0 or share is None or not prefixes:
            return None
        if len(prefixes) == 1:
            return self._build_part(split, prefixes[0], share, size)
        return self._build_blend(split, prefixes, weights, share, size)

    def _build_blend(
        self,
        split: Split,
        prefixes: Sequence[str | None],
        weights: Sequence[float] | None,
        share: Share,
        size: int | None,
    ) -> BlendedDataset:
        counts: list[int | None] = [None] * len(prefixes)
        if size is not None:
            if weights is None:
                weights = [self._count_tokens(split, prefix, share) for prefix in prefixes]
            dataset_index = load_blend_indices(weights, size, self.config.cache_folder)[0]
            counts = np.bincount(dataset_index, minlength=len(prefixes)).tolist()
        elif weights is not None:
            raise ValueError(
                f"the {split.name} split is a blend with weights, so its number of samples must be "
                "given"
            )
        parts = [
            self._build_part(split, prefix, share, count)
            for prefix, count in zip(prefixes, counts, strict=True)
        ]
        return BlendedDataset(parts, weights or [len(part) for part in parts], size, self.config)

    def _build_part(
        self, split: Split, prefix: str | None, share: Share, size: int | None
    ) -> GPTDataset:
        indices = self._indices(split, prefix, share)
        return self.cls(self._open(prefix), prefix, indices, size, split, self.config)

    def _count_tokens(self, split: Split, prefix: str | None, share: Share) -> int:
        indices = self._indices(split, prefix, share)
        tokens = int(self._open(prefix).sequence_lengths[indices].sum(dtype=np.int64))
        if tokens == 0:
            raise ValueError(f"the {split.name} split of {prefix} is empty: it has no tokens")
        return tokens

    def _open(self, prefix: str | None) -> LowLevelDataset:
        if prefix not in self._opened:
            self._opened[prefix] = self.cls.build_low_level_dataset(prefix, self.config)
        return self._opened[prefix]

    def _indices(self, split: Split, prefix: str | None, share: Share) -> np.ndarray:
        total = self.cls.numel_low_level_dataset(self._open(prefix))
        begin, end = (round(bound * total) for bound in share)
        if begin == end and total > 0:
            raise ValueError(
                f"the {split.name} split of {prefix or 'the mock data'} is empty: of its {total} "
                f"documents, the shares {self.config.split} leave none for it; give more documents, "
                "another --split (a share of 0 leaves a split out), or --eval-iters 0"
            )
        return np.arange(begin, min(end, total), dtype=np.int32)
