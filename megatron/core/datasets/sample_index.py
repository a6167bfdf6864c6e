"""Which tokens of which documents make which sample: arithmetic on lengths, without any files.

The documents of all epochs are shuffled and strung together. Sample ``i`` takes the
``sequence_length + 1`` tokens from position ``i * sequence_length`` on, so that neighbours share one
token, which is the last label of the one and the first input of the other. The samples are then
shuffled too. For the same seed and lengths both orders are those of Megatron-LM.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# A last epoch of which fewer samples than this are used is shuffled by itself, so that the epochs
# before it stay whole.
_WHOLE_EPOCH = 0.80


class SampleIndices(NamedTuple):
    """Orders of documents and samples."""

    document_index: NDArray[np.int32]
    """Sequences in the order they are strung together: int32 ``[epochs * documents]``."""

    sample_index: NDArray[Any]
    """Where samples begin, and the last ends, as place in ``document_index`` and token within that
    sequence: int32, or int64 where needed, ``[samples + 1, 2]``."""

    shuffle_index: NDArray[Any]
    """The order samples are drawn in: uint32, or int64 where needed, ``[samples]``."""


def count_samples(tokens: int, sequence_length: int) -> int:
    """Returns how many samples ``tokens`` tokens in a row make."""
    return max(tokens - 1, 0) // sequence_length


def count_epochs(num_samples: int | None, tokens_per_epoch: int, sequence_length: int) -> int:
    """Returns how many epochs give ``num_samples`` samples; one for None."""
    if num_samples is None:
        return 1
    return max(1, -(-(num_samples * sequence_length + 1) // tokens_per_epoch))


def build_sample_indices(
    sequence_lengths: NDArray[np.int32],
    documents: NDArray[np.integer[Any]],
    sequence_length: int,
    num_samples: int | None,
    seed: int,
) -> SampleIndices:
    """Builds the orders.

    Args:
        sequence_lengths: Tokens of each sequence of a dataset.
        documents: The sequences to use, with at least one token in all.
        sequence_length: Tokens that a sample feeds to the model.
        num_samples: At least so many samples, in as many epochs as that takes; None for one epoch.
        seed: Fixes the orders.
    """
    tokens = int(sequence_lengths[documents].sum(dtype=np.int64))
    epochs = count_epochs(num_samples, tokens, sequence_length)
    samples = count_samples(epochs * tokens, sequence_length)
    whole = samples
    if epochs > 1 and num_samples is not None:
        before_last = count_samples((epochs - 1) * tokens, sequence_length)
        per_epoch = count_samples(tokens, sequence_length)
        if num_samples - before_last < int(_WHOLE_EPOCH * per_epoch):
            whole = before_last

    random = np.random.RandomState(seed % 2**32)
    documents = documents.astype(np.int32)
    last_apart = whole < samples
    parts = [np.tile(documents, epochs - last_apart)] + [documents.copy()] * last_apart
    for part in parts:
        random.shuffle(part)
    document_index = np.concatenate(parts)
    sample_index = _find_samples(sequence_lengths[document_index], samples, sequence_length)
    dtype = np.uint32 if samples < np.iinfo(np.uint32).max - 1 else np.int64
    order = np.arange(samples, dtype=dtype)
    random.shuffle(order[:whole])
    random.shuffle(order[whole:])
    return SampleIndices(document_index, sample_index, order)


def _find_samples(
    lengths: NDArray[np.int32], samples: int, sequence_length: int
) -> NDArray[np.integer[Any]]:
    """Finds the sequence and the place in it of every ``sequence_length``-th token."""
    ends = np.cumsum(lengths, dtype=np.int64)
    positions = np.arange(samples + 1, dtype=np.int64) * sequence_length
    places = np.searchsorted(ends, positions, side="right")
    offsets = positions - (ends[places] - lengths[places])
    fits = max(len(lengths), int(lengths.max())) <= np.iinfo(np.int32).max
    return np.stack((places, offsets), axis=1).astype(np.int32 if fits else np.int64)
