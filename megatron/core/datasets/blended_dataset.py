"""Several datasets in one, in exact proportions from the first sample on."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from .gpt_dataset import GPTDataset, GPTDatasetConfig
from .index_cache import cached_arrays

_MAX_DATASETS = np.iinfo(np.int16).max


class BlendIndices(NamedTuple):
    """Which sample of which dataset comes when."""

    dataset_index: NDArray[np.int16]
    """Dataset of each sample: int16 ``[samples]``."""

    dataset_sample_index: NDArray[np.int64]
    """Number of each sample within its dataset: int64 ``[samples]``."""


def integer_weights(weights: Sequence[float]) -> list[int]:
    """Returns the smallest whole numbers in the same proportion; 0.1 counts as one tenth exactly."""
    fractions = [Fraction(str(weight)) for weight in weights]
    denominator = math.lcm(*(fraction.denominator for fraction in fractions))
    wholes = [int(fraction * denominator) for fraction in fractions]
    divisor = math.gcd(*wholes)
    return [whole // divisor for whole in wholes]


def build_blend_indices(weights: Sequence[int], size: int) -> BlendIndices:
    """Interleaves datasets so that every prefix is in proportion.

    After ``k`` samples, dataset ``i`` has given ``floor`` or ``ceil`` of ``k * weights[i] / sum``.
    Sample ``j`` of a dataset must therefore come within a window of places; serving the open window
    that closes first meets them all (the quota method of Balinski and Young, 1975).

    Args:
        weights: Whole numbers above 0, one for each dataset.
        size: Samples in all.
    """
    total = sum(weights)
    # After sum(weights) samples every dataset has given exactly its weight, and it starts anew.
    period = np.empty(min(size, total), np.int16)
    waiting = [(1, -(-total // weight), i) for i, weight in enumerate(weights)]
    heapq.heapify(waiting)
    opened: list[tuple[int, int]] = []
    given = [0] * len(weights)
    for place in range(1, len(period) + 1):
        while waiting and waiting[0][0] <= place:
            _, closes, i = heapq.heappop(waiting)
            heapq.heappush(opened, (closes, i))
        _, i = heapq.heappop(opened)
        period[place - 1] = i
        given[i] += 1
        weight = weights[i]
        opens = given[i] * total // weight + 1
        heapq.heappush(waiting, (opens, -(-(given[i] + 1) * total // weight), i))
    dataset_index = np.resize(period, size)
    sample_index = np.empty(size, np.int64)
    for i in range(len(weights)):
        mine = dataset_index == i
        sample_index[mine] = np.arange(np.count_nonzero(mine))
    return BlendIndices(dataset_index, sample_index)


def load_blend_indices(
    weights: Sequence[float], size: int | None, path_to_cache: str | None
) -> BlendIndices:
    """Loads or builds the indices of a blend.

    Args:
        weights: One for each dataset; only their proportions count, unless ``size`` is None.
        size: Samples in all; None for exactly ``weights[i]`` samples of dataset ``i``.
        path_to_cache: Cache folder.
    """
    if len(weights) > _MAX_DATASETS:
        raise ValueError(f"a blend is made of at most {_MAX_DATASETS} datasets, got {len(weights)}")
    if size is None:
        size = int(sum(weights))
    wholes = integer_weights(weights)
    arrays = cached_arrays(
        path_to_cache,
        "BlendedDataset",
        {"weights": wholes, "size": size},
        BlendIndices._fields,
        lambda: build_blend_indices(wholes, size)._asdict(),
    )
    return BlendIndices(**arrays)


class BlendedDataset(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples of several datasets, each in proportion to its weight at every prefix.

    Args:
        datasets: What is blended, of one split.
        weights: One for each dataset, above 0.
        size: Samples in all; None for exactly ``weights[i]`` samples of dataset ``i``.
        config: Options.

    Raises:
        ValueError: If a dataset has fewer samples than the blend takes from it.
    """

    def __init__(
        self,
        datasets: Sequence[GPTDataset],
        weights: Sequence[float],
        size: int | None,
        config: GPTDatasetConfig,
    ) -> None:
        if len(datasets) != len(weights) or not datasets:
            raise ValueError(f"{len(datasets)} datasets have {len(weights)} weights")
        if any(not (weight > 0 and math.isfinite(weight)) for weight in weights):
            raise ValueError(f"weights of a blend must be above 0, got {list(weights)}")
        self.datasets = list(datasets)
        self.split = self.datasets[0].index_split
        self.weights = list(weights)
        self.size = size
        self.config = config
        indices = load_blend_indices(weights, size, config.cache_folder)
        self.dataset_index, self.dataset_sample_index = indices
        taken = np.bincount(self.dataset_index, minlength=len(self.datasets)).tolist()
        for dataset, count in zip(self.datasets, taken, strict=True):
            if count > len(dataset):
                raise ValueError(
                    f"the {self.split.name} blend takes {count} samples from {dataset.dataset_path}, "
                    f"which has {len(dataset)}"
                )

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        """Returns the item of the dataset whose turn it is; see :class:`GPTDataset`."""
        return self.datasets[self.dataset_index[idx]][int(self.dataset_sample_index[idx])]
