"""What datasets are made of: sources, weights and shares."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from megatron.core.tokenizers import MegatronTokenizerBase

from .utils import Blend, Split, check_weights

Share = tuple[float, float]
"""Where a split begins and ends, as fractions of the sequences."""


@dataclass
class BlendedMegatronDatasetConfig:
    """Options of datasets.

    Raises:
        ValueError: If options are missing, wrong, or exclude each other.
    """

    random_seed: int
    """Fixes the order of documents and samples."""

    sequence_length: int
    """Tokens that a sample feeds to the model."""

    blend: Blend | None = None
    """Prefixes and weights of which all splits are made."""

    blend_per_split: Sequence[Blend | None] | None = None
    """Prefixes and weights of each split. Without this and ``blend``, data is made up."""

    split: str | None = None
    """Shares of train, valid and test, such as ``969,30,1``, of each prefix of ``blend``."""

    split_matrix: list[Share | None] | None = field(init=False, default=None)
    """Where each split begins and ends; None for a share of nothing."""

    path_to_cache: str | None = None
    """Folder of index files; by default the user's cache folder."""

    mock: bool = field(init=False, default=False)
    """Whether data is made up."""

    tokenizer: MegatronTokenizerBase | None = None
    """Says how large the vocabulary is."""

    def __post_init__(self) -> None:
        if self.sequence_length < 1:
            raise ValueError(f"sequence_length must be at least 1, got {self.sequence_length}")
        self.mock = self.blend is None and self.blend_per_split is None
        if self.blend_per_split is not None:
            if self.blend is not None or self.split is not None:
                raise ValueError("blend_per_split leaves no place for blend and split")
            if len(self.blend_per_split) != len(Split):
                raise ValueError(
                    f"blend_per_split has {len(self.blend_per_split)} blends for {len(Split)} splits"
                )
        elif self.split is None:
            if not self.mock:
                raise ValueError("a blend needs split, such as 969,30,1")
            self.split = "1,1,1"
        if self.split is not None:
            self.split_matrix = convert_split_vector_to_split_matrix(
                parse_and_normalize_split(self.split)
            )
        for blend in (self.blend, *(self.blend_per_split or ())):
            if blend is not None and blend[1] is not None:
                check_weights(blend[0], blend[1])


def parse_and_normalize_split(split: str) -> list[float]:
    """Reads up to three shares, such as ``969,30,1`` or ``9/1``, and scales them to a sum of 1.

    Raises:
        ValueError: If they are not numbers, negative, more than three, or all 0.
    """
    try:
        shares = [float(share) for share in re.split("[,/]", split)]
    except ValueError:
        shares = []
    usable = all(math.isfinite(share) and share >= 0 for share in shares)
    if not 1 <= len(shares) <= len(Split) or not usable or sum(shares) == 0:
        raise ValueError(
            f"split {split!r} is not one to three shares, of which one is above 0, such as 969,30,1"
        )
    total = sum(shares)
    return [share / total for share in shares] + [0.0] * (len(Split) - len(shares))


def convert_split_vector_to_split_matrix(shares: Sequence[float]) -> list[Share | None]:
    """Turns shares into places: ``[0.9, 0.1, 0]`` becomes ``[(0, 0.9), (0.9, 1), None]``."""
    bounds = pairwise(accumulate(shares, initial=0.0))
    return [(begin, end) if end > begin else None for begin, end in bounds]
