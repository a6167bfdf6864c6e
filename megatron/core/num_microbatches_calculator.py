"""How many microbatches make up a global batch."""

from __future__ import annotations


class ConstantNumMicroBatchesCalculator:
    """The number of microbatches each data-parallel rank runs per iteration, the same throughout.

    ``global_batch_size = micro_batch_size * data_parallel_size * number of microbatches``, where
    ranks that read their own batches count as data parallel, so GTP peers do and TP peers do not.
    All sizes are in samples.
    """

    def __init__(
        self, global_batch_size: int, micro_batch_size: int, data_parallel_size: int
    ) -> None:
        """Checks the arithmetic.

        Raises:
            ValueError: If a size is not positive, or the global batch does not divide.
        """
        for name, value in (
            ("global batch size", global_batch_size),
            ("micro batch size", micro_batch_size),
            ("data parallel size", data_parallel_size),
        ):
            if value < 1:
                raise ValueError(f"the {name} must be at least 1, got {value}")
        self.micro_batch_times_data_parallel_size = micro_batch_size * data_parallel_size
        if global_batch_size % self.micro_batch_times_data_parallel_size != 0:
            raise ValueError(
                f"a global batch size of {global_batch_size} is not divisible by the micro batch "
                f"size ({micro_batch_size}) times the data parallel size ({data_parallel_size}) = "
                f"{self.micro_batch_times_data_parallel_size}"
            )
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.num_micro_batches = global_batch_size // self.micro_batch_times_data_parallel_size

    def get(self) -> int:
        """Returns the number of microbatches per rank and iteration."""
        return self.num_micro_batches

    def get_current_global_batch_size(self) -> int:
        """Returns the number of samples per iteration over all ranks."""
        return self.global_batch_size

    def get_micro_batch_size(self) -> int:
        """Returns the number of samples per microbatch on one rank."""
        return self.micro_batch_size
