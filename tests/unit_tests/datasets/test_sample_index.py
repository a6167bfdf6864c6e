"""Which tokens make which sample."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.core.datasets.sample_index import SampleIndices, build_sample_indices, count_epochs

LENGTHS = np.array([5, 3, 8, 2, 7, 6], np.int32)


def samples_of(
    indices: SampleIndices, lengths: np.ndarray, length: int
) -> list[list[tuple[int, int]]]:
    """The samples in drawn order, as (sequence, token), by walking token by token."""
    stream = [(int(d), t) for d in indices.document_index for t in range(lengths[d])]
    return [stream[i * length : i * length + length + 1] for i in indices.shuffle_index]


# What Megatron-LM (megatron-core 0.19.2) builds of these lengths with sequence length 4, seed 1234:
# one epoch; a second epoch kept apart; two epochs shuffled as one.
MEGATRON = {
    7: (
        [2, 1, 5, 0, 4, 3],
        [[0, 0], [0, 4], [1, 0], [2, 1], [2, 5], [3, 3], [4, 2], [4, 6]],
        [5, 0, 3, 4, 2, 6, 1],
    ),
    9: (
        [2, 1, 5, 0, 4, 3, 0, 4, 3, 2, 5, 1],
        [
            *([0, 0], [0, 4], [1, 0], [2, 1], [2, 5], [3, 3], [4, 2], [4, 6]),
            *([6, 1], [7, 0], [7, 4], [8, 1], [9, 3], [9, 7], [10, 3], [11, 1]),
        ],
        [1, 0, 3, 2, 5, 4, 6, 10, 12, 9, 8, 13, 11, 14, 7],
    ),
    12: (
        [1, 2, 5, 2, 3, 4, 1, 0, 4, 5, 0, 3],
        [
            *([0, 0], [1, 1], [1, 5], [2, 1], [2, 5], [3, 3], [3, 7], [5, 1]),
            *([5, 5], [6, 2], [7, 3], [8, 2], [8, 6], [9, 3], [10, 1], [11, 0]),
        ],
        [7, 11, 2, 3, 1, 9, 5, 4, 0, 8, 6, 10, 13, 12, 14],
    ),
}


@pytest.mark.parametrize("num_samples", MEGATRON)
def test_the_order_is_megatrons(num_samples: int) -> None:
    indices = build_sample_indices(LENGTHS, np.arange(6), 4, num_samples, 1234)
    documents, samples, order = MEGATRON[num_samples]
    assert indices.document_index.tolist() == documents
    assert indices.sample_index.tolist() == samples
    assert indices.shuffle_index.tolist() == order


@pytest.mark.parametrize("seed", range(20))
def test_samples_cut_the_stream_of_documents(seed: int) -> None:
    """The index against a walk over every token, with empty documents among them."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 12, 30).astype(np.int32)
    documents = np.arange(5, 30)
    length = int(random.integers(1, 30))
    num_samples = int(random.integers(1, 60))
    indices = build_sample_indices(lengths, documents, length, num_samples, seed)
    stream = [(int(d), t) for d in indices.document_index for t in range(lengths[d])]
    for i in range(len(indices.shuffle_index) + 1):
        place, offset = indices.sample_index[i].tolist()
        assert stream[i * length] == (indices.document_index[place], offset)
    assert len(indices.shuffle_index) >= num_samples
    assert len(stream) - 1 < (len(indices.shuffle_index) + 1) * length
    assert sorted(indices.shuffle_index) == list(range(len(indices.shuffle_index)))
    epochs = count_epochs(num_samples, int(lengths[documents].sum()), length)
    assert sorted(indices.document_index) == sorted(documents.tolist() * epochs)


def test_one_epoch_has_every_token_once() -> None:
    indices = build_sample_indices(LENGTHS, np.arange(6), 5, None, 3)
    fed = [token for sample in samples_of(indices, LENGTHS, 5) for token in sample[:-1]]
    assert sorted(fed) == sorted(
        {(d, t) for d in range(6) for t in range(LENGTHS[d])} - {_last(indices)}
    )


def _last(indices: SampleIndices) -> tuple[int, int]:
    """The very last token of the stream is a label only (31 tokens make 6 samples of 5)."""
    document = int(indices.document_index[-1])
    return document, int(LENGTHS[document]) - 1


def test_seeds_give_orders() -> None:
    def build(seed: int) -> list[list[tuple[int, int]]]:
        return samples_of(build_sample_indices(LENGTHS, np.arange(6), 4, 20, seed), LENGTHS, 4)

    assert build(1) == build(1)
    assert build(1) != build(2)
    assert build(2**32 + 1) == build(1)


def test_a_last_epoch_kept_apart_does_not_disturb_the_others() -> None:
    """Nine samples need a little of a second epoch: the first is whole before it starts."""
    indices = build_sample_indices(LENGTHS, np.arange(6), 4, 9, 1234)
    assert sorted(indices.document_index[:6]) == list(range(6))
    assert sorted(indices.shuffle_index[:7]) == list(range(7))
