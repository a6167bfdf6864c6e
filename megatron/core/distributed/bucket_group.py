"""Communication: a bucket group decides when its buckets are reduced and gathered, and how.

Parameters: ``start_param_sync`` stages and gathers, ``finish_param_sync`` waits and installs.
Gradients: ``start_grad_sync`` reduces, ``finish_grad_sync`` waits. With overlap the starts return at
once, and reductions start in one order on every rank, because collectives are matched by order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.collectives import (
    AVG,
    SUM,
    Work,
    WorkList,
    all_reduce,
    group_rank,
    group_size,
    reduce_scatter_tensor,
    reduce_scatter_with_fp32_accumulation,
)
from megatron.core.distributed.buffer import _ParamAndGradBucket, shard_buffer
from megatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig,
)
from megatron.core.distributed.param_sync import make_param_sync


class _ParamAndGradBucketGroup:
    """Buckets whose communication starts and ends together. All have one owner (law L3).

    Args:
        buckets: At least one.
        ddp_config: Options.
        collective_group: The data-parallel ranks; with several optimizer instances, those of one.
        collective_group_size: Their number.

    Raises:
        ValueError: If the buckets have different owners, or are too many for an FP32-accumulating
            reduce-scatter, which takes one.
    """

    def __init__(
        self,
        buckets: list[_ParamAndGradBucket],
        ddp_config: DistributedDataParallelConfig,
        collective_group: dist.ProcessGroup | None,
        collective_group_size: int,
    ) -> None:
        self.buckets = buckets
        self.ddp_config = ddp_config
        self.collective_group = collective_group
        self.collective_group_size = collective_group_size
        self.inter_distributed_optimizer_instance_group: dist.ProcessGroup | None = None
        self._check()

        self.param_to_bucket = {p: bucket for bucket in buckets for p in bucket.params_list}
        self.params = set(self.param_to_bucket)
        self._param_syncs = [make_param_sync(bucket) for bucket in buckets]
        self._grad_shards = [
            shard_buffer(bucket.grad_data, bucket.num_shards)[bucket.shard_rank]
            if ddp_config.use_distributed_optimizer
            else bucket.grad_data
            for bucket in buckets
        ]

        self.next_param_gather_bucket_group: _ParamAndGradBucketGroup | None = None
        self.param_gather_handle: Work | None = None
        self.param_gather_dispatched = False

        # Neighbours in the order in which reductions start.
        self.previous_grad_reduce_bucket_group: _ParamAndGradBucketGroup | None = None
        self.next_grad_reduce_bucket_group: _ParamAndGradBucketGroup | None = None
        self.grad_reduce_handle: Work | None = None
        self.grad_reduce_finished = False
        self.is_last_microbatch = True
        # How often each parameter reports per step is learnt in the first batch.
        self.is_first_batch = True
        self.golden_per_param_grad_ready_counts: dict[torch.nn.Parameter, int] = {}
        self.per_param_grad_ready_counts: dict[torch.nn.Parameter, int] = {}

    def _check(self) -> None:
        if not self.buckets:
            raise ValueError("a bucket group needs at least one bucket")
        owners = {bucket.is_managed_by_layer_wise_optimizer for bucket in self.buckets}
        if len(owners) > 1:
            raise ValueError(
                "a bucket group holds parameters of both the layer-wise and the distributed "
                "optimizer; each would gather the other's before they are updated. Form groups with "
                "partition_buckets, which separates owners"
            )
        if self.ddp_config.reduce_scatter_with_fp32_accumulation and len(self.buckets) > 1:
            raise ValueError(
                "an FP32-accumulating reduce-scatter takes one bucket a group, got "
                f"{len(self.buckets)}"
            )

    def gather_whole_params(self, owners: Mapping[torch.nn.Parameter, int]) -> None:
        """From now on parameters travel whole, each from the rank that ``owners`` says."""
        for bucket in self.buckets:
            owned: list[list[torch.nn.Parameter]] = [[] for _ in range(self.collective_group_size)]
            for param in bucket.params_list:
                owned[owners[param]].append(param)
            bucket.set_layerwise_params_list(owned)
        self._param_syncs = [make_param_sync(bucket) for bucket in self.buckets]

    @property
    def is_managed_by_layer_wise_optimizer(self) -> bool:
        """Whether the layer-wise optimizer owns this group's parameters."""
        return self.buckets[0].is_managed_by_layer_wise_optimizer

    def params_in_order(self) -> list[torch.nn.Parameter]:
        """Its parameters, bucket by bucket in backprop order."""
        return [param for bucket in self.buckets for param in bucket.params_list]

    def name_of(self, param: torch.nn.Parameter) -> str:
        """The parameter's name for messages."""
        return self.param_to_bucket[param].name_of(param)

    # Parameters

    def start_param_sync(self, force_sync: bool = False) -> None:
        """Stages this rank's values and gathers all of them.

        With ``overlap_param_gather`` it returns at once, and ``finish_param_sync`` installs. Without
        it, or with ``force_sync``, it returns when the model reads the gathered values; a gather
        that is under way then is finished, not repeated.

        Raises:
            RuntimeError: If a gather is under way already, or parameters have no way to travel.
        """
        if self.param_gather_handle is not None:
            if not force_sync:
                raise RuntimeError(
                    "a parameter gather of this bucket group is under way; finish it first"
                )
            self._wait_and_install()
            return
        syncs = [sync for sync in self._param_syncs if sync is not None]
        if len(syncs) < len(self.buckets):
            raise RuntimeError(
                "parameters are gathered only if optimizers share them out "
                "(use_distributed_optimizer=True); here every rank updates all of them"
            )
        asynchronous = self.ddp_config.overlap_param_gather and not force_sync
        with torch.no_grad():
            for sync in syncs:
                sync.stage()
            works = [sync.gather(self.collective_group, asynchronous) for sync in syncs]
        self.param_gather_dispatched = True
        if asynchronous:
            self.param_gather_handle = WorkList(works)
        else:
            self._install()

    def finish_param_sync(self, skip_next_bucket_dispatch: bool = False) -> None:
        """Makes sure that the model reads this step's values; starts the gather if nobody has.

        Then starts the gather of the group that the forward pass needs next, unless
        ``skip_next_bucket_dispatch``.

        Raises:
            RuntimeError: Without ``overlap_param_gather``.
        """
        if not self.ddp_config.overlap_param_gather:
            raise RuntimeError("finish_param_sync is for overlap_param_gather=True")
        if not self.param_gather_dispatched:
            self.start_param_sync()
        if self.param_gather_handle is None:
            return
        following = self.next_param_gather_bucket_group
        self.param_gather_handle.wait()
        self.param_gather_handle = None
        # The next gather runs while this group is installed and computed with.
        chained = following is not None and not skip_next_bucket_dispatch
        if chained and not following.param_gather_dispatched:  # type: ignore[union-attr]
            following.start_param_sync()  # type: ignore[union-attr]
        self._install()

    def _wait_and_install(self) -> None:
        if self.param_gather_handle is not None:
            self.param_gather_handle.wait()
            self.param_gather_handle = None
            self._install()

    def _install(self) -> None:
        with torch.no_grad():
            for sync in self._param_syncs:
                if sync is not None:
                    sync.install()

    # Gradients

    def reset(self) -> None:
        """Prepares for the gradients of a new step; a gather that is under way is finished first."""
        self._wait_and_install()
        batch_is_over = self.per_param_grad_ready_counts or self.grad_reduce_finished
        if self.is_first_batch and batch_is_over:
            self.golden_per_param_grad_ready_counts = self.per_param_grad_ready_counts
            self.is_first_batch = False
        self.per_param_grad_ready_counts = {}
        self.is_last_microbatch = True
        self.grad_reduce_finished = False

    def register_grad_ready(
        self, param: torch.nn.Parameter, force_all_reduce: bool | None = False
    ) -> None:
        """Notes that ``param``'s gradient of this step is complete; starts what may start.

        Only the last microbatch counts. The first batch only counts, and reduces at its end.

        Raises:
            AssertionError: Without ``overlap_grad_reduce``.
            RuntimeError: If the group is being reduced already.
        """
        assert self.ddp_config.overlap_grad_reduce, (
            "register_grad_ready() is for overlap_grad_reduce=True"
        )
        if not self.is_last_microbatch:
            return
        if self.grad_reduce_handle is not None or self.grad_reduce_finished:
            raise RuntimeError(
                f"the gradient of {self.name_of(param)} came after its bucket group was reduced, "
                "because the parameter was used less often in the first batch than now; run with "
                "overlap_grad_reduce=False"
            )
        counts = self.per_param_grad_ready_counts
        counts[param] = counts.get(param, 0) + 1
        if not self.is_first_batch and self._grads_are_ready():
            self._start_in_order(force_all_reduce)

    def _grads_are_ready(self) -> bool:
        counts = self.per_param_grad_ready_counts
        golden = self.golden_per_param_grad_ready_counts
        return all(counts.get(param, 0) >= expected for param, expected in golden.items())

    def _grad_sync_started(self) -> bool:
        return self.grad_reduce_handle is not None or self.grad_reduce_finished

    def _start_in_order(self, force_all_reduce: bool | None) -> bool:
        """Starts this group, its ready predecessors first and its ready successors after."""
        if self._grad_sync_started():
            return True
        if self.is_first_batch or not self._grads_are_ready():
            return False
        previous = self.previous_grad_reduce_bucket_group
        if previous is not None and not previous._start_in_order(force_all_reduce):
            return False
        if not self._grad_sync_started():
            self.start_grad_sync(force_all_reduce)
        if self.next_grad_reduce_bucket_group is not None:
            self.next_grad_reduce_bucket_group._start_in_order(force_all_reduce)
        return True

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Scales and reduces the gradients; with ``overlap_grad_reduce`` it returns at once.

        Raises:
            RuntimeError: If a reduction is under way, or ``check_for_nan_in_grad`` finds one.
        """
        if self.grad_reduce_handle is not None:
            if self.is_first_batch:
                return
            raise RuntimeError("a gradient reduction of this bucket group is under way already")
        self._wait_and_install()
        previous = self.previous_grad_reduce_bucket_group
        if (
            self.ddp_config.reduce_scatter_with_fp32_accumulation
            and previous is not None
            and previous.grad_reduce_handle is not None
        ):
            # Frees the pieces that it received, before this group receives as many.
            previous.finish_grad_sync(force_all_reduce)
        if self.ddp_config.check_for_nan_in_grad:
            self._check_for_nan_in_grad()
        with torch.no_grad():
            for bucket in self.buckets:
                if bucket.gradient_scaling_factor != 1.0:
                    bucket.grad_data *= bucket.gradient_scaling_factor
        asynchronous = self.ddp_config.overlap_grad_reduce
        works = self._reduce(asynchronous, bool(force_all_reduce))
        self.grad_reduce_handle = WorkList(works) if asynchronous else None

    def _reduce(self, asynchronous: bool, force_all_reduce: bool) -> list[Work | None]:
        config = self.ddp_config
        op: Any = AVG if config.average_in_collective else SUM
        group = self.collective_group
        if self.collective_group_size == 1:
            return []
        if force_all_reduce or not config.use_distributed_optimizer:
            return [
                all_reduce(bucket.grad_data, group, op, asynchronous) for bucket in self.buckets
            ]
        scatter = (
            reduce_scatter_with_fp32_accumulation
            if config.reduce_scatter_with_fp32_accumulation
            else reduce_scatter_tensor
        )
        return [
            scatter(shard, bucket.grad_data, group, op, asynchronous)
            for shard, bucket in zip(self._grad_shards, self.buckets, strict=True)
        ]

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Returns when the gradients are reduced; may be called again within a step.

        Raises:
            AssertionError: With overlap, if gradients are missing that the first batch had.
        """
        self.param_gather_dispatched = False
        if not self.ddp_config.overlap_grad_reduce:
            self.start_grad_sync(force_all_reduce)
            self._reduce_over_instances()
            return
        if self.grad_reduce_finished:
            return
        if self.grad_reduce_handle is None:
            assert self.is_first_batch or self._grads_are_ready(), self._missing_grads()
            self.start_grad_sync(force_all_reduce)
        assert self.grad_reduce_handle is not None
        self.grad_reduce_handle.wait()
        self.grad_reduce_handle = None
        self._reduce_over_instances()
        self.grad_reduce_finished = True

    def _missing_grads(self) -> str:
        counts, golden = self.per_param_grad_ready_counts, self.golden_per_param_grad_ready_counts
        missing = [self.name_of(p) for p, count in golden.items() if counts.get(p, 0) < count]
        return (
            f"{len(missing)} of {len(self.params)} parameters of a bucket group have no gradient yet "
            f"in this step, though they had one in the first batch: {', '.join(missing[:4])}; if "
            "the model does not use every parameter in every step, run with "
            "overlap_grad_reduce=False"
        )

    def _reduce_over_instances(self) -> None:
        instances = self.inter_distributed_optimizer_instance_group
        if instances is None or group_size(instances) == 1:
            return
        op: Any = AVG if self.ddp_config.average_in_collective else SUM
        for shard in self._grad_shards:
            all_reduce(shard, instances, op)

    def _check_for_nan_in_grad(self) -> None:
        for bucket in self.buckets:
            if torch.isfinite(bucket.grad_data.sum(dtype=torch.float64)):
                continue
            for param in bucket.params_list:
                bad = ~torch.isfinite(param.main_grad)  # type: ignore[attr-defined]
                if bad.any():
                    raise RuntimeError(
                        f"rank {group_rank(None)}: the local gradient of {bucket.name_of(param)} holds "
                        f"{int(bad.sum())} NaN or Inf values of {param.numel()}, before reduction"
                    )
