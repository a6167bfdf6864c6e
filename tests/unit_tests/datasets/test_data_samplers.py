"""Which rank reads which samples."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import Dataset

from megatron.training.datasets.data_samplers import (
    MegatronPretrainingSampler,
    build_pretraining_data_loader,
)


class Numbers(Dataset[dict[str, torch.Tensor]]):
    """Item ``i`` is ``i``."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        return {"tokens": torch.tensor([idx, idx])}


def global_batches(
    ranks: int, micro: int, batch: int, consumed: int, total: int = 96
) -> list[list[int]]:
    """The samples of each global batch, in order of microbatch, rank and row."""
    samplers = [
        iter(MegatronPretrainingSampler(total, consumed, micro, rank, ranks))
        for rank in range(ranks)
    ]
    rows = [row for group in zip(*samplers, strict=True) for part in group for row in part]
    return [rows[i : i + batch] for i in range(0, len(rows), batch)]


@pytest.mark.parametrize("consumed", [0, 24, 7])
def test_global_batches_do_not_depend_on_the_number_of_ranks(consumed: int) -> None:
    alone = global_batches(1, 1, 24, consumed)
    assert alone[0] == list(range(consumed, consumed + 24))
    whole = (96 - consumed) // 24
    for ranks, micro in [(1, 4), (2, 1), (2, 6), (3, 4), (4, 2), (8, 3)]:
        assert global_batches(ranks, micro, 24, consumed)[:whole] == alone[:whole]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_going_on_is_as_if_never_stopped(ranks: int) -> None:
    for rank in range(ranks):
        never = list(MegatronPretrainingSampler(103, 5, 3, rank, ranks))
        for done in range(len(never) + 1):
            consumed = 5 + done * 3 * ranks
            again = MegatronPretrainingSampler(103, consumed, 3, rank, ranks)
            assert list(again) == never[done:]
            assert len(again) == len(never) - done


def test_ranks_share_all_samples_out() -> None:
    parts = [list(MegatronPretrainingSampler(23, 2, 3, rank, 2)) for rank in range(2)]
    assert [len(part) for part in parts] == [3, 3]
    read = sorted(row for part in parts for batch in part for row in batch)
    assert read == list(range(2, 20))
    parts = [
        list(MegatronPretrainingSampler(24, 2, 3, rank, 2, drop_last=False)) for rank in range(2)
    ]
    assert parts[0][-1] == [20, 21, 22] and parts[1][-1] == [23]
    parts = [
        list(MegatronPretrainingSampler(23, 2, 3, rank, 2, drop_last=False)) for rank in range(2)
    ]
    assert [len(part) for part in parts] == [4, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 11, 1, 0, 1), "11 samples are consumed, of a dataset of 10"),
        ((10, -1, 1, 0, 1), "-1 samples are consumed"),
        ((10, 0, 0, 0, 1), "micro_batch_size must be at least 1, got 0"),
        ((10, 0, 1, 2, 2), "data_parallel_rank must be 0 to 1, got 2"),
        (
            (7, 0, 4, 0, 2),
            "the dataset has 7 samples; a microbatch of 4 on each of 2 ranks takes 8",
        ),
        ((0, 0, 1, 0, 1), "the dataset has 0 samples"),
    ],
)
def test_wrong_numbers_are_refused(arguments: tuple[int, int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MegatronPretrainingSampler(*arguments)


def test_the_loader_stacks_items() -> None:
    loader = build_pretraining_data_loader(
        Numbers(20), 4, 2, data_parallel_rank=1, data_parallel_size=2
    )
    assert loader is not None
    batches = [batch["tokens"] for batch in loader]
    assert torch.equal(batches[0], torch.tensor([[6, 6], [7, 7]]))
    assert len(batches) == len(loader) == 4
    assert build_pretraining_data_loader(None, 0, 1) is None


def test_the_loader_leaves_global_random_numbers_alone() -> None:
    state = torch.random.get_rng_state()
    loader = build_pretraining_data_loader(Numbers(4), 0, 2)
    assert loader is not None
    assert len(list(loader)) == 2
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_finished_job_finds_nothing_left() -> None:
    loader = build_pretraining_data_loader(Numbers(8), 8, 2)
    assert loader is not None
    assert list(loader) == []
