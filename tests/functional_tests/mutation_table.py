"""What goes red when a cause is put back: ``python -m tests.functional_tests.mutation_table``.

Each mutation undoes one thing that keeps MXFP8 weights right. For each the table says, with overlap of
the parameter gather off and on, whether ON still equals OFF (law L1) and what the audit says. Undoing
the separation of owners shows with overlap off only: with overlap on, whoever gathers a group does so
in the next forward pass, when both owners have stepped. That is how the bug stayed hidden.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from megatron.core.distributed import distributed_data_parallel, param_sync
from megatron.core.distributed.bucket_group import _ParamAndGradBucketGroup
from megatron.core.optimizer import (
    LayerWiseDistributedOptimizer,
    ParamSyncError,
    audit_param_sync,
    layer_wise_optimizer,
    main_params,
)
from megatron.core.optimizer import optimizer as optimizer_module
from tests.ranks import RankError, run_ranks
from tests.training_run import Run, train

OFF = Run(steps=4, fp8="computed", optimizer_options={"lr": 0.05})
RANKS = 2


@contextlib.contextmanager
def edit_a_undone() -> Iterator[None]:
    """The layer-wise optimizer steps masters; nobody stages them for the gather."""
    with mock.patch.object(param_sync, "_stage_layerwise_mxfp8_params", lambda bucket: None):
        yield


@contextlib.contextmanager
def edit_a_flag_undone() -> Iterator[None]:
    """The layer-wise optimizer gathers parameters itself, past the bucket groups (legacy layout)."""
    original = LayerWiseDistributedOptimizer.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.layerwise_param_sync_via_bucket_group = False

    with mock.patch.object(LayerWiseDistributedOptimizer, "__init__", init):
        yield


@contextlib.contextmanager
def edit_b_undone() -> Iterator[None]:
    """Buckets of both owners share a group, and the layer-wise optimizer takes it for its own."""

    def merged(buffers: list[Any], **options: Any) -> list[_ParamAndGradBucketGroup]:
        if not buffers:
            return []
        buckets = [bucket for buffer in buffers for bucket in buffer.buckets]
        buckets.sort(key=lambda bucket: not bucket.is_managed_by_layer_wise_optimizer)
        first = buffers[0]
        return [
            _ParamAndGradBucketGroup(
                buckets, first.ddp_config, first.data_parallel_group, first.data_parallel_world_size
            )
        ]

    with (
        mock.patch.object(distributed_data_parallel, "partition_buckets", merged),
        mock.patch.object(_ParamAndGradBucketGroup, "_check", lambda self: None),
    ):
        yield


@contextlib.contextmanager
def edit_c_undone() -> Iterator[None]:
    """Masters start at the dequantised weight, and the initial value stays where it is."""

    def from_weight(param: torch.nn.Parameter) -> torch.Tensor:
        dequantize = getattr(param, "_rowwise_data", None) is not None
        return param.dequantize(dtype=torch.float32) if dequantize else param.detach().float()  # type: ignore[attr-defined]

    with (
        mock.patch.object(main_params, "seed_value", from_weight),
        mock.patch.object(layer_wise_optimizer, "pop_high_precision_init_val", lambda p: None),
    ):
        yield


@contextlib.contextmanager
def transport_not_zeroed() -> Iterator[None]:
    """What was gathered stays in the gradient memory that the next backward pass adds to."""
    with mock.patch.object(param_sync.StagedGather, "install", _install_without_zeroing):
        yield


def _install_without_zeroing(self: Any) -> None:
    param_sync.copy_tensors_to_quantized_params(self._params, self._arrivals)


@contextlib.contextmanager
def staged_before_the_update() -> Iterator[None]:
    """Masters are staged and gathered, and only then updated."""
    original = optimizer_module.MainParamOptimizer.step_with_ready_grads
    previous: dict[int, torch.Tensor] = {}

    def remember(self: Any) -> bool:
        for record in self.main_params:
            if record.is_master:
                previous[id(record.main_param)] = record.main_param.detach().clone()
        return original(self)

    def stale(bucket: Any, param: Any, numel: int) -> torch.Tensor:
        master = param.main_param
        return previous.get(id(master), master.detach()).view(-1)

    with (
        mock.patch.object(optimizer_module.MainParamOptimizer, "step_with_ready_grads", remember),
        mock.patch.object(param_sync, "_master_of", stale),
    ):
        yield


@contextlib.contextmanager
def gather_skipped() -> Iterator[None]:
    """Staged values stay on the rank that owns them."""
    with mock.patch.object(param_sync.InPlaceGather, "gather", lambda self, group, async_op: None):
        yield


@contextlib.contextmanager
def ties_broken_by_rank() -> Iterator[None]:
    """Legacy layout: each rank deals parameters of one size out in an order of its own."""
    original = layer_wise_optimizer.owners_by_ping_pong

    def by_rank(params: list[Any], ranks: int) -> dict[Any, int]:
        turned = params if torch.distributed.get_rank() == 0 else params[::-1]
        return original(turned, ranks)

    with mock.patch.object(layer_wise_optimizer, "owners_by_ping_pong", by_rank):
        yield


@dataclass(frozen=True)
class Mutation:
    """A cause that is put back, and the tests that hold it.

    Attributes:
        title: What is undone.
        apply: Undoes it for a while.
        layout: In which layout.
        test: The test of the suite that goes red with it.
    """

    title: str
    apply: Callable[[], contextlib.AbstractContextManager[None]]
    layout: str
    test: str


_MATRIX = "test_on_equals_off"
MUTATIONS = {
    "none": Mutation("nothing", contextlib.nullcontext, "padded", "-"),
    "a_staging": Mutation("(a) staging", edit_a_undone, "padded", _MATRIX),
    "a_flag": Mutation("(a) the flag", edit_a_flag_undone, "legacy", _MATRIX),
    "b": Mutation("(b) owners apart", edit_b_undone, "padded", _MATRIX),
    "c": Mutation("(c) seeding", edit_c_undone, "padded", _MATRIX),
    "zeroing": Mutation(
        "zeroing the transport",
        transport_not_zeroed,
        "padded",
        "test_gradients_are_clean_when_backward_begins",
    ),
    "order": Mutation("staging after the update", staged_before_the_update, "padded", _MATRIX),
    "gather": Mutation("the gather", gather_skipped, "padded", _MATRIX),
    "ties": Mutation("one order of ties", ties_broken_by_rank, "legacy", _MATRIX),
}


@dataclass(frozen=True)
class Outcome:
    """What a mutated run shows.

    Attributes:
        equal: Whether losses, norms and masters are OFF's, on every rank.
        audit: The audit's first finding and the step it came at; empty if none.
        error: What the run itself died of; empty if it did not.
    """

    equal: bool
    audit: str
    error: str


def run_mutated(name: str, overlap: bool) -> Outcome:
    """On one rank: OFF, then ON with the mutation, audited after every step."""
    mutation = MUTATIONS[name]
    off = OFF.but(layout=mutation.layout)
    on = off.but(fp8="stored", overlap_param_gather=overlap, overlap_grad_reduce=overlap)
    expected = train(off)
    with mutation.apply():
        try:
            result = train(on)
            equal = result.losses == expected.losses and all(
                torch.equal(value, expected.masters[name]) for name, value in result.masters.items()
            )
        except (RuntimeError, NotImplementedError, AssertionError) as error:
            return Outcome(False, "", str(error).splitlines()[0])
        try:
            train(on, _audit)
        except ParamSyncError as error:
            return Outcome(equal, str(error), "")
    return Outcome(equal, "", "")


def _audit(ddp: Any, optimizer: Any, step: int) -> None:
    try:
        audit_param_sync([ddp], optimizer)
    except ParamSyncError as error:
        raise ParamSyncError(f"step {step + 1}: {error}") from None


def outcome(name: str, overlap: bool) -> Outcome:
    """Over all ranks: equal if all are; the first finding."""
    try:
        results = run_ranks(run_mutated, RANKS, name, overlap, timeout_s=60)
    except RankError as error:
        line = str(error).strip().splitlines()[-1]
        return Outcome(False, "", line)
    return Outcome(
        all(result.equal for result in results),
        next((r.audit for r in results if r.audit), ""),
        next((r.error for r in results if r.error), ""),
    )


def main() -> None:
    """Prints the table."""
    print(f"{'undone':26} {'overlap':8} {'ON = OFF':9} what is said")
    for name, mutation in MUTATIONS.items():
        for overlap in (False, True):
            got = outcome(name, overlap)
            said = got.error or got.audit or "-"
            verdict = "equal" if got.equal else "RED"
            print(f"{mutation.title:26} {'on' if overlap else 'off':8} {verdict:9} {said[:150]}")
        if name != "none":
            print(f"{'':26} held by {mutation.test}")


if __name__ == "__main__":
    main()
