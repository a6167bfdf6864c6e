"""The arithmetic of global batches."""

from __future__ import annotations

import pytest

from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator


def test_the_global_batch_is_micro_times_ranks_times_microbatches() -> None:
    calculator = ConstantNumMicroBatchesCalculator(48, 2, 4)
    assert calculator.get() == 6
    assert calculator.get_current_global_batch_size() == 48
    assert calculator.get_micro_batch_size() == 2


@pytest.mark.parametrize(("global_batch", "micro_batch", "ranks"), [(10, 2, 4), (4, 8, 1)])
def test_a_global_batch_that_does_not_divide_is_refused(
    global_batch: int, micro_batch: int, ranks: int
) -> None:
    with pytest.raises(
        ValueError, match=f"{global_batch} is not divisible .* = {micro_batch * ranks}"
    ):
        ConstantNumMicroBatchesCalculator(global_batch, micro_batch, ranks)


def test_sizes_must_be_positive() -> None:
    with pytest.raises(ValueError, match="micro batch size must be at least 1, got 0"):
        ConstantNumMicroBatchesCalculator(8, 0, 1)
