"""The parts of a step: norm, clipping, skipping, scaling, groups, and state that goes on."""

import math
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import (
    ChainedOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
)
from megatron.core.optimizer.masters import iter_full_masters
from megatron.core.optimizer.param_groups import get_param_groups, get_standard_config_overrides
from tests.ranks import RankError, on_cuda, run_ranks
from tests.training_run import DEVICE, Run, build, train, train_step

RUN = Run(bf16=False)


def norm_and_reference(run: Run) -> tuple[float, float, int, int]:
    """Norm and zero count as the optimizer takes them, and from the gradients put together."""
    ddp, optimizer = build(run)
    train_step(run, ddp, 0)
    square, zeros = 0.0, 0
    for buffer in ddp.buffers:
        for bucket in buffer.buckets:
            for shard in bucket.param_shards():
                grad = shard.param.main_grad.view(-1)[shard.start : shard.end].double()
                square += float(grad.square().sum())
                zeros += int((grad == 0).sum())
    totals = torch.tensor([square, zeros], dtype=torch.float64, device=DEVICE)
    dist.all_reduce(totals)
    assert not optimizer.prepare_grads()
    return (
        optimizer.get_grad_norm(),
        math.sqrt(float(totals[0])),
        optimizer.count_zeros(),
        int(totals[1]),
    )


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_norm_and_zeros_count_each_element_once(ranks, optimizer):
    norms = []
    for norm, reference, zeros, zeros_reference in run_ranks(
        norm_and_reference, ranks, RUN.but(optimizer=optimizer)
    ):
        assert norm == pytest.approx(reference, rel=1e-8)
        assert zeros == zeros_reference
        norms.append(norm)
    alone = run_ranks(norm_and_reference, 1, RUN.but(optimizer=optimizer))[0]
    assert norms == [pytest.approx(alone[0], rel=1e-6)] * ranks


def norm_when_replicated() -> float:
    run = RUN.but(distributed_optimizer=False)
    ddp, optimizer = build(run)
    train_step(run, ddp, 0)
    return optimizer.step()[1]


def test_norm_of_replicated_gradients_is_not_multiplied_by_ranks():
    alone = run_ranks(norm_and_reference, 1, RUN)[0][0]
    assert run_ranks(norm_when_replicated, 2) == [pytest.approx(alone, rel=1e-6)] * 2


def clipped_norms(clip: float) -> tuple[float, float]:
    run = RUN.but(clip_grad=clip)
    ddp, optimizer = build(run)
    train_step(run, ddp, 0)
    optimizer.prepare_grads()
    before = optimizer.clip_grad_norm(clip)
    return before, optimizer.get_grad_norm()


@pytest.mark.parametrize("clip", [1e-3, 1e6])
def test_clipping_brings_the_norm_of_all_owners_down_to_the_limit(clip):
    for before, after in run_ranks(clipped_norms, 2, clip):
        assert after == pytest.approx(min(before, clip), rel=1e-5)


def skip_a_step(overlap: bool) -> tuple[bool, bool, bool]:
    """Whether a step with a NaN on one rank is skipped, changes nothing, and training goes on."""
    run = Run(overlap_param_gather=overlap, overlap_grad_reduce=overlap)
    ddp, optimizer = build(run)
    ddp.ddp_config.check_for_nan_in_grad = False

    def masters() -> dict[str, torch.Tensor]:
        return dict(iter_full_masters(optimizer, [ddp]))

    def weights() -> list[torch.Tensor]:
        ddp.start_param_sync(force_sync=True)
        return [param.detach().clone() for param in ddp.module.parameters()]

    train_step(run, ddp, 0)
    optimizer.step()
    before, weights_before = masters(), weights()
    train_step(run, ddp, 1)
    if dist.get_rank() == 1:
        for param in ddp.module.parameters():
            param.main_grad.view(-1)[:] = float("nan")
    updated, norm, _ = optimizer.step()
    unchanged = all(torch.equal(v, before[k]) for k, v in masters().items()) and all(
        torch.equal(a, b) for a, b in zip(weights(), weights_before, strict=True)
    )
    train_step(run, ddp, 2)
    goes_on = optimizer.step()[0] and any(
        not torch.equal(v, before[k]) for k, v in masters().items()
    )
    return (not updated and not math.isfinite(norm)), unchanged, goes_on


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_with_nan_on_one_rank_changes_nothing_on_any(overlap):
    assert run_ranks(skip_a_step, 2, overlap) == [(True, True, True)] * 2


def scaled_run(loss_scale: float | None) -> list[torch.Tensor]:
    options = {"loss_scale": loss_scale, "muon_fp32_matmul_prec": "highest"}
    ddp, optimizer = build(RUN.but(optimizer_options=options))
    scale = float(optimizer.get_loss_scale())
    train_step(RUN, ddp, 0)
    ddp.scale_gradients(scale)
    optimizer.step()
    return [value for _, value in iter_full_masters(optimizer, [ddp])]


def test_a_loss_scale_that_is_a_power_of_two_leaves_no_trace():
    plain, scaled = run_ranks(scaled_run, 2, None)[0], run_ranks(scaled_run, 2, 2.0**10)[0]
    assert all(torch.equal(a, b) for a, b in zip(plain, scaled, strict=True))


def waits_of_a_step(run: Run) -> list[str]:
    """Where the host waits for the GPU in an optimizer step that is not the first."""
    ddp, optimizer = build(run)
    for step in range(3):
        train_step(run, ddp, step)
        if step < 2:
            optimizer.step()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [w for w in caught if "called a synchronizing CUDA operation" in str(w.message)]
    return [f"{w.filename}:{w.lineno}" for w in waits]


@pytest.mark.skipif(not on_cuda(), reason="counts on a GPU, under pytest --device cuda")
@pytest.mark.parametrize("optimizer", ["muon", "adam"])
@pytest.mark.parametrize("fp8", ["off", "stored"])
def test_a_step_waits_for_the_gpu_once_for_the_norm(optimizer, fp8):
    run = Run(optimizer=optimizer, fp8=fp8, clip_grad=0.1)
    (waits,) = run_ranks(waits_of_a_step, 1, run)
    assert len(waits) == 1 and "clip_grads.py" in waits[0], waits


class Named(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(32, 16)
        self.embedding.weight.is_embedding_or_output_parameter = True
        self.linear = torch.nn.Linear(16, 16)
        self.special = torch.nn.Linear(16, 16, bias=False)
        self.special.weight.use_muon = False
        self.norm = torch.nn.LayerNorm(16)


def groups_of(config: OptimizerConfig) -> dict[str, tuple[str, float, float | None]]:
    model = Named()
    names = {param: name for name, param in model.named_parameters()}
    return {
        names[param]: (group["optimizer"], group["wd_mult"], group["max_lr"])
        for group in get_param_groups([model], config, get_standard_config_overrides(config))
        for param in group["params"]
    }


def test_groups_follow_megatrons_rules():
    config = OptimizerConfig(optimizer="muon", lr=0.1, decoupled_lr=0.5)
    assert groups_of(config) == {
        "embedding.weight": ("adam", 1.0, 0.5),
        "linear.weight": ("muon", 1.0, 0.1),
        "linear.bias": ("adam", 0.0, 0.1),
        "special.weight": ("adam", 1.0, 0.1),
        "norm.weight": ("adam", 0.0, 0.1),
        "norm.bias": ("adam", 0.0, 0.1),
    }
    lion = groups_of(OptimizerConfig(optimizer="muon", lr=0.1, muon_scalar_optimizer="lion"))
    assert lion["special.weight"][0] == "lion" and lion["linear.weight"][0] == "muon"
    assert set(group[0] for group in groups_of(OptimizerConfig(lr=0.1)).values()) == {"adam"}


def resume(run: Run) -> tuple[bool, bool]:
    """Whether two steps, a saved state and two more are four steps, bit for bit."""
    whole = train(run)
    parallel_state.destroy_model_parallel()
    ddp, optimizer = build(run)
    for step in range(2):
        train_step(run, ddp, step)
        optimizer.step()
    ddp.start_param_sync(force_sync=True)
    state = optimizer.state_dict()
    weights = {k: v.clone() for k, v in ddp.state_dict().items()}
    parallel_state.destroy_model_parallel()

    resumed_ddp, resumed = build(run.but(seed=99))
    resumed_ddp.load_state_dict(weights)
    resumed.load_state_dict(state)
    for step in range(2, 4):
        train_step(run, resumed_ddp, step)
        resumed.step()
    masters = dict(iter_full_masters(resumed, [resumed_ddp]))
    return all(torch.equal(masters[k], v) for k, v in whole.masters.items()), len(masters) > 3


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_saved_state_goes_on_bit_for_bit(bf16, overlap):
    run = Run(bf16=bf16, steps=4, overlap_param_gather=overlap)
    assert run_ranks(resume, 2, run) == [(True, True)] * 2


def build_contradiction(ddp_options: dict, optimizer_options: dict) -> None:
    parallel_state.initialize_model_parallel()
    ddp = DistributedDataParallel(
        SimpleNamespace(calculate_per_token_loss=False),
        DistributedDataParallelConfig(**ddp_options),
        Named(),
    )
    get_megatron_optimizer(OptimizerConfig(lr=0.1, **optimizer_options), [ddp])


CONTRADICTIONS = {
    "optimizer only": ({}, {"use_distributed_optimizer": True}, "wrapped in DistributedData"),
    "model only": ({"use_distributed_optimizer": True}, {}, "owners only"),
    "overlap": (
        {"use_distributed_optimizer": True},
        {"use_distributed_optimizer": True, "overlap_param_gather": True},
        "which starts the gathers",
    ),
    "untagged muon": (
        {"use_distributed_optimizer": True},
        {"use_distributed_optimizer": True, "optimizer": "muon"},
        "tag_params_for_buffer_routing",
    ),
    "layer-wise adam": (
        {"use_distributed_optimizer": True},
        {"use_layer_wise_distributed_optimizer": True},
        "use_distributed_optimizer",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions_between_model_and_optimizer_are_refused(case):
    ddp_options, optimizer_options, message = CONTRADICTIONS[case]
    with pytest.raises(RankError, match=f"ValueError.*{message}"):
        run_ranks(build_contradiction, 1, ddp_options, optimizer_options)


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "adamax"},
        {"fp16": True, "bf16": True},
        {"optimizer": "muon", "fp16": True},
        {"clip_grad": -1.0},
        {"muon_scalar_optimizer": "sgd"},
        {"optimizer_cpu_offload": True},
    ],
)
def test_bad_options_fail_at_once(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        OptimizerConfig(**options)


def test_a_chain_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        ChainedOptimizer([])
