"""Names of the splits, and how the command line says which data makes a dataset."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum

Blend = tuple[list[str], list[float] | None]
"""Prefixes, and a weight for each, or None for weights by size."""


class Split(Enum):
    """The parts that data is split into; values are their places in lists."""

    train = 0
    valid = 1
    test = 2


def get_blend_from_list(blend: Sequence[str] | None) -> Blend | None:
    """Reads the values of ``--data-path``.

    Args:
        blend: Prefixes, or weights and prefixes in turn, such as ``["30", "a", "70", "b"]``.

    Returns:
        Prefixes and weights; None for None.

    Raises:
        ValueError: If some prefixes have weights and others have none, or a weight is not above 0.
    """
    if not blend:
        return None
    words = [word.strip() for word in blend]
    weights = [_number(word) for word in words[::2]]
    numbers = [weight for weight in weights if weight is not None]
    if not numbers or len(words) == 1:
        return words, None
    if len(words) % 2 == 0 and len(numbers) == len(weights):
        prefixes = words[1::2]
        return prefixes, check_weights(prefixes, numbers)
    raise ValueError(
        f"--data-path {' '.join(words)} is neither prefixes nor weights and prefixes in turn"
    )


def check_weights(prefixes: Sequence[str], weights: Sequence[float]) -> list[float]:
    """Returns the weights.

    Raises:
        ValueError: If there is not one weight, finite and above 0, for each prefix.
    """
    if len(weights) != len(prefixes):
        raise ValueError(f"{len(prefixes)} prefixes have {len(weights)} weights")
    for prefix, weight in zip(prefixes, weights, strict=True):
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"the weight of {prefix} must be a number above 0, got {weight:g}")
    return list(weights)


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
