"""What a rank holds between steps is what the layout predicts, and masters are owners' alone."""

import gc

import pytest
import torch

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.quantization import MXFP8Tensor
from tests.ranks import run_ranks
from tests.training_run import Run, build, train_step

STATE_BYTES = {"muon": 4 + 4, "adam": 4 + 8, "sgd": 4 + 4, "lion": 4 + 4}


def live_storage_bytes() -> dict[int, int]:
    """Address and bytes of every storage that a tensor known to the collector keeps alive."""
    gc.collect()
    storages = {}
    for item in gc.get_objects():
        # Not isinstance: that would run code of whatever object looks like a class. The bytes of an
        # MXFP8Tensor are tensors of their own.
        if issubclass(type(item), torch.Tensor) and not issubclass(type(item), MXFP8Tensor):
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return storages


def predicted_bytes(ddp, run: Run) -> int:
    """Parameters, gradients and this rank's optimizer state, from the layout's numbers."""
    total = 0
    for key, layout in ddp.full_param_layout.layouts.items():
        numel = layout.bucket_indices[-1][1]
        total += numel * (key.param_dtype.itemsize + key.grad_dtype.itemsize)
    for buffer in ddp.buffers:
        for bucket in buffer.buckets:
            owned = sum(shard.end - shard.start for shard in bucket.param_shards())
            name = "muon" if bucket.is_managed_by_layer_wise_optimizer else "adam"
            total += owned * (STATE_BYTES[name] - (0 if run.bf16 else 4))
    return total


def measure(run: Run) -> tuple[int, int]:
    before = set(live_storage_bytes())
    ddp, optimizer = build(run)
    for step in range(2):
        train_step(run, ddp, step)
        optimizer.step()
    after = live_storage_bytes()
    return sum(size for key, size in after.items() if key not in before), predicted_bytes(ddp, run)


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_rank_holds_what_the_layout_predicts(bf16, ranks):
    run = Run(bf16=bf16, bucket_size=None)
    for held, predicted in run_ranks(measure, ranks, run):
        assert predicted <= held <= 1.02 * predicted


def owned_elements(run: Run) -> tuple[int, int, int]:
    """Elements of the model, of this rank's main parameters and of its optimizer state."""
    ddp, optimizer = build(run)
    train_step(run, ddp, 0)
    optimizer.step()
    model = sum(param.numel() for param in ddp.module.parameters())
    main = sum(param.numel() for param in optimizer.get_parameters())
    return model, main, state_elements(optimizer)


def state_elements(optimizer: MegatronOptimizer) -> int:
    return sum(
        value.numel()
        for leaf in optimizer.leaves()
        for state in leaf.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.numel() > 1
    )


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_masters_and_moments_exist_once_over_all_ranks(ranks):
    results = run_ranks(owned_elements, ranks, Run())
    model = results[0][0]
    assert sum(main for _, main, _ in results) == model
    # One momentum for each element of Muon's, two moments for each of Adam's.
    assert model < sum(state for _, _, state in results) < 2 * model
    assert max(main for _, main, _ in results) < 1.5 * model / ranks


def masters_of_others() -> int:
    """Parameters with a master on a rank that does not update them."""
    ddp, optimizer = build(Run())
    own = {record.model_param for leaf in optimizer.leaves() for record in leaf.main_params}
    return sum(
        hasattr(param, "main_param") and param not in own for param in ddp.module.parameters()
    )


def test_no_rank_has_a_master_of_what_it_does_not_update():
    assert run_ranks(masters_of_others, 4) == [0, 0, 0, 0]
