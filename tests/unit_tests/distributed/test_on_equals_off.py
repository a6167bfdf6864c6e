"""Laws L1, L2, L5, L6 and L7: MXFP8 weights gathered through gradient memory change no bit.

OFF is BF16 weights that layers quantise on the fly; ON is weights that are stored in MXFP8. The
model has a quantised matrix that Muon does not own, matrices that are never quantised, tied
embeddings, biases and norms.
"""

import itertools

import pytest
import torch

from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_sync import make_param_sync
from megatron.core.optimizer import LayerWiseDistributedOptimizer, MegatronOptimizer
from megatron.core.optimizer.audit import audit_param_sync
from megatron.core.optimizer.main_params import seed_value
from megatron.core.optimizer.masters import iter_param_masters
from megatron.core.quantization import MXFP8Tensor, quantized_like
from tests.ranks import RankError, run_ranks
from tests.training_run import Run, build, train, train_all, train_step

OFF = Run(steps=10, fp8="computed", tied=True)
ON = OFF.but(fp8="stored")
OVERLAPS = list(itertools.product([False, True], [False, True]))
GROUPINGS = {
    "default": {},
    "single": {"single_bucket_group": True},
    "fp32_accumulation": {"fp32_accumulation": True},
}
# Gradients of the legacy layout are all-reduced, so it has no FP32-accumulating reduce-scatter.
CASES = [
    (layout, grouping)
    for layout, grouping in itertools.product(["padded", "legacy"], GROUPINGS)
    if (layout, grouping) != ("legacy", "fp32_accumulation")
]


def on_and_off(run: Run) -> list[Run]:
    """OFF, and ON with every overlap."""
    runs = [run.but(fp8="computed")]
    for param, grad in OVERLAPS:
        runs.append(run.but(fp8="stored", overlap_param_gather=param, overlap_grad_reduce=grad))
    return runs


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("grad_reduce_in_fp32", [True, False], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("layout", "grouping"), CASES)
def test_on_equals_off(layout, grouping, grad_reduce_in_fp32, microbatches, ranks):
    run = OFF.but(
        layout=layout,
        grad_reduce_in_fp32=grad_reduce_in_fp32,
        microbatches=microbatches,
        **GROUPINGS[grouping],
    )
    runs = on_and_off(run)
    for off, *on in run_ranks(train_all, ranks, runs):
        assert len(set(off.losses)) == run.steps
        for case, result in zip(runs[1:], on, strict=True):
            overlap = f"{case.overlap_param_gather=} {case.overlap_grad_reduce=}"
            result.check_equal(off, overlap)


VARIANTS = {
    "untied": {"tied": False},
    "no_biases": {"biases": False},
    "all_muon": {"excluded_matrix": False},
    "adam": {"optimizer": "adam"},
    "transport_of_its_own": {"reuse_grad_buf": False},
    "clipped": {"clip_grad": 0.1},
    "one_bucket": {"bucket_size": None},
    "replicated": {"distributed_optimizer": False},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_on_equals_off_in_other_models_and_optimizers(variant):
    runs = on_and_off(OFF.but(steps=5, **VARIANTS[variant]))
    if variant == "replicated":
        runs = [run for run in runs if not run.overlap_param_gather]
    for off, *on in run_ranks(train_all, 2, runs):
        for result in on:
            result.check_equal(off)


@pytest.mark.parametrize("ranks", [2, 4])
def test_padded_and_legacy_agree_to_rounding(ranks):
    padded, legacy = run_ranks(train_all, ranks, [ON, ON.but(layout="legacy")])[0]
    assert padded.losses == pytest.approx(legacy.losses, rel=2e-3)
    assert padded.losses[0] == legacy.losses[0]


def test_mxfp8_is_not_bf16():
    """The comparison has something to find: computing in MXFP8 changes the losses."""
    mxfp8, bf16 = run_ranks(train_all, 1, [OFF, OFF.but(fp8="off")])[0]
    assert mxfp8.losses != bf16.losses


def weights_are_quantised_masters(run: Run) -> list[str]:
    """Parameters that on this rank are not quantise(bf16(master)), after each step."""
    wrong = []

    def check(ddp: DistributedDataParallel, optimizer: MegatronOptimizer, step: int) -> None:
        audit_param_sync([ddp], optimizer)
        for name, param, master in iter_param_masters(optimizer, [ddp]):
            if isinstance(param, MXFP8Tensor):
                same = param.has_same_bytes(quantized_like(param, master.bfloat16()))
            else:
                same = torch.equal(param.detach(), master.bfloat16())
            if not same:
                wrong.append(f"{name} after step {step}")

    train(run, check)
    return wrong


@pytest.mark.parametrize("layout", ["padded", "legacy"])
@pytest.mark.parametrize("overlap", [False, True])
def test_every_rank_holds_the_quantised_master_after_every_sync(layout, overlap):
    run = ON.but(layout=layout, overlap_param_gather=overlap, steps=3)
    assert run_ranks(weights_are_quantised_masters, 2, run) == [[], []]


def gradients_at_first_backward(run: Run) -> list[str]:
    """Parameters whose main_grad is not zero when the first backward of a step begins."""
    dirty: list[str] = []
    ddp, optimizer = build(run)
    original = ddp.forward
    calls = 0

    def forward(*args, **kwargs):
        nonlocal calls
        output = original(*args, **kwargs)
        if calls % run.microbatches == 0:
            dirty.extend(n for n, p in ddp.module.named_parameters() if p.main_grad.any())
        calls += 1
        return output

    ddp.forward = forward
    for step in range(3):
        train_step(run, ddp, step)
        optimizer.step()
    return dirty


@pytest.mark.parametrize("layout", ["padded", "legacy"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("grad_reduce_in_fp32", [True, False])
def test_gradients_are_clean_when_backward_begins(layout, overlap, grad_reduce_in_fp32):
    run = ON.but(
        layout=layout,
        overlap_param_gather=overlap,
        grad_reduce_in_fp32=grad_reduce_in_fp32,
        microbatches=2,
    )
    assert run_ranks(gradients_at_first_backward, 2, run) == [[], []]


def transports_and_gradients(run: Run) -> list[tuple[bool, bool]]:
    """For each quantised bucket: is its transport inside its own gradients, and clear of others'?"""
    ddp, _ = build(run)
    spans = [
        (b, b.grad_data.data_ptr(), b.grad_data.data_ptr() + b.grad_data.nbytes)
        for buffer in ddp.buffers
        for b in buffer.buckets
    ]
    result = []
    for bucket, first, last in spans:
        if bucket.has_quantized_params:
            start = bucket.param_data.data_ptr()
            end = start + bucket.param_data.nbytes
            others = [s for s in spans if s[0] is not bucket]
            clear = all(
                end <= other_first or start >= other_last for _, other_first, other_last in others
            )
            result.append((first <= start and end <= last, clear))
    return result


@pytest.mark.parametrize("grad_reduce_in_fp32", [True, False])
def test_transport_lies_within_its_own_buckets_gradients(grad_reduce_in_fp32):
    run = ON.but(grad_reduce_in_fp32=grad_reduce_in_fp32, bucket_size=2_000)
    places = run_ranks(transports_and_gradients, 2, run)[0]
    assert len(places) > 2 and set(places) == {(True, True)}


def break_staging(how: str) -> str:
    """Breaks one thing that staging relies on; returns the name of the parameter and the error."""
    ddp, _ = build(ON)
    bucket = next(
        b
        for buffer in ddp.buffers
        for b in buffer.buckets
        if b.has_quantized_params and b.is_managed_by_layer_wise_optimizer and any(b.param_shards())
    )
    shard = next(iter(bucket.param_shards()))
    if how == "no master":
        del shard.param.main_param
    elif how == "other size":
        shard.param.main_param = shard.param.main_param[:-1]
    else:
        start, end = bucket.param_to_index[shard.param]
        bucket.param_to_index[shard.param] = (
            (start + 32, end + 32) if start == 0 else (start - 32, end - 32)
        )
        bucket.num_shards *= 8
    try:
        make_param_sync(bucket).stage()
    except RuntimeError as error:
        name = "blocks." if how == "cut" else bucket.name_of(shard.param)
        return f"{name}|{error}"
    return "|no error"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no master", "no FP32 master"),
        ("other size", "elements, its slot"),
        ("cut", "cut by a shard"),
    ],
)
def test_staging_what_is_cut_or_has_no_fitting_master_names_the_parameter(how, message):
    name, error = run_ranks(break_staging, 1, how)[0].split("|")
    assert message in error and name in error


def build_with_cut_layout() -> None:
    """A layout that cuts matrices, given to the layer-wise optimizer."""
    from megatron.core.optimizer import DistributedOptimizer

    original = LayerWiseDistributedOptimizer._find_owners

    def find(self, managed):
        for chunk in self.model_chunks:
            for key, layout in chunk.full_param_layout.layouts.items():
                if key.is_managed_by_layer_wise_optimizer:
                    cut = DistributedOptimizer._compute_per_buffer_param_layout(
                        list(layout.param_index_map)[::-1], None, 2, chunk.ddp_config
                    )
                    layout.param_index_map = cut.param_index_map
                    layout.bucket_indices = cut.bucket_indices
        return original(self, managed)

    LayerWiseDistributedOptimizer._find_owners = find
    try:
        build(ON)
    finally:
        LayerWiseDistributedOptimizer._find_owners = original


def test_the_layer_wise_optimizer_refuses_a_layout_that_cuts_matrices():
    with pytest.raises(RankError, match="crosses the end of shard"):
        run_ranks(build_with_cut_layout, 2)


def masters_and_initial_values(run: Run) -> tuple[dict[str, torch.Tensor], list[str]]:
    ddp, optimizer = build(run)
    masters = {name: master for name, _, master in iter_param_masters(optimizer, [ddp])}
    kept = [
        name
        for name, param in ddp.module.named_parameters()
        if isinstance(param, MXFP8Tensor) and param.get_high_precision_init_val() is not None
    ]
    return masters, kept


@pytest.mark.parametrize("layout", ["padded", "legacy"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_masters_start_at_the_high_precision_values_and_no_rank_keeps_them(layout, ranks):
    off, _ = run_ranks(masters_and_initial_values, ranks, OFF.but(layout=layout))[0]
    for masters, kept in run_ranks(masters_and_initial_values, ranks, ON.but(layout=layout)):
        assert kept == []
        assert all(torch.equal(masters[name], value) for name, value in off.items())


def test_a_quantised_parameter_without_initial_value_seeds_from_what_it_holds():
    from megatron.core.quantization import MXFP8Quantizer

    source = torch.randn(32, 64).bfloat16()
    param = torch.nn.Parameter(MXFP8Quantizer().quantize(source))
    assert torch.equal(seed_value(param), param.dequantize(torch.float32))


def bytes_of_high_precision_weights(run: Run) -> tuple[int, int]:
    """BF16 bytes alive between steps that could be a copy of a quantised weight, and of one weight."""
    import gc

    def high_precision() -> dict[int, torch.Tensor]:
        gc.collect()
        return {
            id(item): item
            for item in gc.get_objects()
            if issubclass(type(item), torch.Tensor)
            and not issubclass(type(item), MXFP8Tensor)
            and item.dtype == torch.bfloat16
        }

    before = high_precision()
    ddp, optimizer = build(run)
    for step in range(2):
        train_step(run, ddp, step)
        optimizer.step()
    quantized = [p for p in ddp.module.parameters() if isinstance(p, MXFP8Tensor)]
    shapes = {tuple(p.shape) for p in quantized} | {(p.numel(),) for p in quantized}
    own = {p.data_ptr() for p in ddp.module.parameters() if not isinstance(p, MXFP8Tensor)}
    memory = [(b.grad_data.data_ptr(), b.grad_data.nbytes) for b in ddp.buffers]
    copies = 0
    for key, item in high_precision().items():
        inside = any(first <= item.data_ptr() < first + size for first, size in memory)
        if key not in before and tuple(item.shape) in shapes and not inside:
            copies += 0 if item.data_ptr() in own else item.nbytes
    return copies, quantized[0].numel() * 2


@pytest.mark.parametrize("overlap", [False, True])
def test_no_bf16_copy_of_a_quantised_weight_lives_between_steps(overlap):
    run = ON.but(overlap_param_gather=overlap, overlap_grad_reduce=overlap)
    for copies, _ in run_ranks(bytes_of_high_precision_weights, 2, run):
        assert copies == 0
    # The measurement finds the copies that weights quantised on the fly are.
    assert run_ranks(bytes_of_bf16_weights, 1, OFF)[0] > 0


def bytes_of_bf16_weights(run: Run) -> int:
    ddp, _ = build(run)
    return sum(p.nbytes for p in ddp.module.parameters() if getattr(p, "computes_in_mxfp8", False))
