"""Which samples each data-parallel rank reads, and in which order.

A global batch is the next ``global_batch_size`` samples of the dataset, whatever the number of ranks:
rank ``r`` takes, for its microbatch ``m``, the samples from
``consumed + (m * data_parallel_size + r) * micro_batch_size`` on. So jobs on 1, 2 or 4 ranks learn from
the same batches, and a job that goes on from any number of consumed samples reads what a job that was
never stopped would have read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset


class MegatronPretrainingSampler:
    """Yields the sample numbers of each microbatch of one rank, in order.

    Args:
        total_samples: Samples of the dataset.
        consumed_samples: Samples that the ranks together have consumed before.
        micro_batch_size: Samples that a rank takes at once.
        data_parallel_rank: This rank.
        data_parallel_size: Number of ranks.
        drop_last: Leave out the samples at the end that do not make a microbatch for every rank.
            Otherwise they are dealt out in rank order, so that a rank may get a shorter last
            microbatch than others, or none.

    Raises:
        ValueError: If a number is out of range, or the dataset too small for one microbatch.
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        drop_last: bool = True,
    ) -> None:
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size must be at least 1, got {micro_batch_size}")
        if not 0 <= data_parallel_rank < data_parallel_size:
            raise ValueError(
                f"data_parallel_rank must be 0 to {data_parallel_size - 1}, got {data_parallel_rank}"
            )
        if not 0 <= consumed_samples <= total_samples:
            raise ValueError(
                f"{consumed_samples} samples are consumed, of a dataset of {total_samples}"
            )
        needed = micro_batch_size * data_parallel_size if drop_last else 1
        if total_samples < needed:
            raise ValueError(
                f"the dataset has {total_samples} samples; a microbatch of {micro_batch_size} on each "
                f"of {data_parallel_size} ranks takes {needed}"
            )
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size
        self.drop_last = drop_last

    def __len__(self) -> int:
        """The number of microbatches of this rank."""
        return len(self._starts())

    def __iter__(self) -> Iterator[list[int]]:
        for start in self._starts():
            yield list(range(start, min(start + self.micro_batch_size, self.total_samples)))

    def _starts(self) -> range:
        """First samples of this rank's microbatches."""
        step = self.micro_batch_size * self.data_parallel_size
        first = self.consumed_samples + self.data_parallel_rank * self.micro_batch_size
        end = self.total_samples
        if self.drop_last:
            end -= (self.total_samples - self.consumed_samples) % step
        return range(first, end, step)


def build_pretraining_data_loader(
    dataset: Dataset[Any] | None,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int = 0,
    data_parallel_size: int = 1,
    drop_last: bool = True,
) -> DataLoader[Any] | None:
    """Builds the loader of this rank's microbatches.

    Iterating over it leaves the global random generators alone. Batches are in pinned memory where
    there is CUDA.

    Args:
        dataset: Items are dictionaries of tensors; None gives None.
        consumed_samples: Samples that the ranks together have consumed before.
        micro_batch_size: Samples of a batch.
        data_parallel_rank: This rank, among all ranks that read batches of their own.
        data_parallel_size: Number of those ranks.
        drop_last: See :class:`MegatronPretrainingSampler`.

    Returns:
        A loader of dictionaries of tensors ``[micro_batch_size, ...]``.

    Raises:
        ValueError: If a number is out of range, or the dataset too small for one microbatch.
    """
    if dataset is None:
        return None
    sampler = MegatronPretrainingSampler(
        len(dataset),  # type: ignore[arg-type]
        consumed_samples,
        micro_batch_size,
        data_parallel_rank,
        data_parallel_size,
        drop_last,
    )
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),
    )
