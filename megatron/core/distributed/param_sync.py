"""How a bucket's parameters travel from their owners to every rank.

Three ways, chosen once a bucket:

- in place: parameters are views into the bucket, whose equal shards are gathered where they are;
- staged: FP32 masters are cast to BF16 into equal shards of a transport, gathered there, and
  quantised from there into parameters that keep their own storage;
- whole: owners hold whole parameters outside the bucket; pieces of different sizes, one a rank, are
  gathered in a transport and copied or quantised from there.

Each has three steps: ``stage`` puts this rank's own values where the collective reads them, ``gather``
communicates, ``install`` puts what has arrived where the model reads it. No step looks at another
bucket, so buckets may be under way at the same time.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from megatron.core.collectives import Work, all_gather_into_tensor, all_gather_uneven
from megatron.core.distributed.buffer import ParamShard, _ParamAndGradBucket, shard_buffer
from megatron.core.fp8_utils import copy_tensors_to_quantized_params, forget_quantized_weights
from megatron.core.quantization.casts import cast_many


class ParamSync(Protocol):
    """The steps by which one bucket's parameters travel."""

    def stage(self) -> None:
        """Puts the values that this rank owns where ``gather`` reads them."""

    def gather(self, group: dist.ProcessGroup | None, async_op: bool) -> Work | None:
        """Starts the collective."""

    def install(self) -> None:
        """Gives the model what has arrived."""


def make_param_sync(bucket: _ParamAndGradBucket) -> ParamSync | None:
    """The way in which ``bucket``'s parameters travel; ``None`` if they are not gathered."""
    if bucket.layerwise_params_list is not None:
        return WholeParamGather(bucket)
    if bucket.param_data is None:
        return None
    return StagedGather(bucket) if bucket.has_quantized_params else InPlaceGather(bucket)


class InPlaceGather:
    """For parameters that are views into the bucket: the optimizer writes this rank's shard itself."""

    def __init__(self, bucket: _ParamAndGradBucket) -> None:
        if bucket.param_data is None:
            raise ValueError("a gather of equal shards needs a bucket with parameter memory")
        self._output = bucket.param_data
        self._shard = shard_buffer(bucket.param_data, bucket.num_shards)[bucket.shard_rank]
        self._alone = bucket.num_shards == 1
        self._params = list(bucket.params_list)

    def stage(self) -> None:
        """Nothing: the shard is the parameters' own memory."""

    def gather(self, group: dist.ProcessGroup | None, async_op: bool) -> Work | None:
        """All-gathers the shards in place."""
        if self._alone:
            return None
        return all_gather_into_tensor(self._output, self._shard, group, async_op)

    def install(self) -> None:
        """Only that copies made of old values are old: the gather wrote the parameters."""
        forget_quantized_weights(self._params)


class StagedGather(InPlaceGather):
    """For quantised parameters in a layout of equal shards.

    Owners too install from the BF16 values that the others receive, so every rank holds the same
    quantised bytes (law L2).
    """

    def __init__(self, bucket: _ParamAndGradBucket) -> None:
        super().__init__(bucket)
        self._bucket = bucket
        self._arrivals = [
            self._output[slice(*bucket.param_to_index[param])].view(param.shape)
            for param in self._params
        ]

    def stage(self) -> None:
        """Casts the masters that this rank owns into its shard of the transport."""
        if self._bucket.is_managed_by_layer_wise_optimizer:
            _stage_layerwise_mxfp8_params(self._bucket)
        else:
            _stage_master_shards(self._bucket)

    def install(self) -> None:
        """Quantises every parameter from the transport and leaves clean gradients behind."""
        copy_tensors_to_quantized_params(self._params, self._arrivals)
        if self._bucket.param_data_is_grad_memory:
            self._output.zero_()


class WholeParamGather:
    """For whole parameters that lie outside the bucket (the legacy layout).

    The transport is the memory of the bucket's gradients, which are read by then and not yet
    accumulated anew: its first bytes, in the parameters' nominal dtype, rank by rank.
    """

    def __init__(self, bucket: _ParamAndGradBucket) -> None:
        owned = bucket.layerwise_params_list
        if owned is None:
            raise ValueError("a gather of whole parameters needs to know every rank's parameters")
        self._bucket = bucket
        self._rank, self._alone = bucket.shard_rank, bucket.num_shards == 1
        numel = sum(param.numel() for params in owned for param in params)
        self._transport = bucket.grad_data.view(bucket.params_list[0].dtype)[:numel]
        self._pieces, self._arrivals = [], []
        cursor = 0
        for params in owned:
            start = cursor
            slots = []
            for param in params:
                slots.append(self._transport[cursor : cursor + param.numel()].view(param.shape))
                cursor += param.numel()
            self._pieces.append(self._transport[start:cursor])
            self._arrivals.append((params, slots))

    def stage(self) -> None:
        """Casts this rank's masters, or copies its parameters, into its piece of the transport."""
        params, slots = self._arrivals[self._rank]
        if not params:
            return
        if self._bucket.has_quantized_params:
            masters = [_master_of(self._bucket, param, param.numel()) for param in params]
            cast_many(slots, masters)
        else:
            torch._foreach_copy_(slots, [param.detach() for param in params])

    def gather(self, group: dist.ProcessGroup | None, async_op: bool) -> Work | None:
        """Gathers the pieces, which differ in size."""
        return None if self._alone else all_gather_uneven(self._pieces, group, async_op)

    def install(self) -> None:
        """Quantises or copies from the transport and leaves clean gradients behind."""
        for rank, (params, slots) in enumerate(self._arrivals):
            if self._bucket.has_quantized_params:
                copy_tensors_to_quantized_params(params, slots)
            elif rank != self._rank and params:
                torch._foreach_copy_([param.detach() for param in params], slots)
            forget_quantized_weights(params)
        self._transport.zero_()


def _stage_layerwise_mxfp8_params(bucket: _ParamAndGradBucket) -> None:
    """Stages the whole masters that this rank owns in a layer-wise bucket (law L6).

    Raises:
        RuntimeError: If a parameter is cut by a shard boundary, has no master on its owner, or has
            one of another size than its slot.
    """
    shards = list(bucket.param_shards())
    for shard in shards:
        if not shard.is_whole:
            raise RuntimeError(
                f"layer-wise parameter {bucket.name_of(shard.param)} of {shard.param.numel()} "
                f"elements is cut by a shard boundary: rank {bucket.shard_rank} of "
                f"{bucket.num_shards} holds elements {shard.start} to {shard.end}; use a layout that "
                "keeps whole parameters in one shard "
                "(LayerWiseDistributedOptimizer.compute_full_param_layout)"
            )
    _cast_masters(bucket, shards)


def _stage_master_shards(bucket: _ParamAndGradBucket) -> None:
    """Stages the shards of masters that this rank owns in a byte-sharded bucket.

    Raises:
        RuntimeError: If a shard has no master on its owner or one of another size.
    """
    _cast_masters(bucket, list(bucket.param_shards()))


def _cast_masters(bucket: _ParamAndGradBucket, shards: list[ParamShard]) -> None:
    if not shards or bucket.param_data is None:
        return
    slots = [bucket.param_data[shard.bucket_start : shard.bucket_end] for shard in shards]
    masters = [_master_of(bucket, shard.param, shard.end - shard.start) for shard in shards]
    cast_many(slots, masters)


def _master_of(bucket: _ParamAndGradBucket, param: torch.nn.Parameter, numel: int) -> torch.Tensor:
    """The flat FP32 master of ``param`` on this rank, which owns ``numel`` elements of it."""
    master = getattr(param, "main_param", None)
    if master is None:
        raise RuntimeError(
            f"rank {bucket.shard_rank} owns {bucket.name_of(param)} and has no FP32 master "
            "(param.main_param) to stage it from; build the optimizer before parameters are gathered"
        )
    if master.numel() != numel:
        raise RuntimeError(
            f"the FP32 master of {bucket.name_of(param)} on rank {bucket.shard_rank} has "
            f"{master.numel()} elements, its slot in the bucket {numel}"
        )
    return master.detach().view(-1)
