"""Gradients: reduced to the right values, in one order, reported when they are missing."""

import pytest
import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from tests.ranks import RankError, run_ranks
from tests.training_run import DEVICE, Run, batch, build, train_step

EXACT = Run(bf16=False, microbatches=1)


def reduced_gradients(run: Run) -> dict[str, torch.Tensor]:
    """What each rank's share of the gradients adds up to, by name."""
    ddp, _ = build(run)
    train_step(run, ddp, 0)
    result = {}
    for buffer in ddp.all_buffers:
        for bucket in buffer.buckets:
            for param in bucket.params_list:
                full = torch.zeros(param.numel(), dtype=torch.float64, device=DEVICE)
                for shard in bucket.param_shards():
                    if shard.param is param:
                        grad = param.main_grad.view(-1)[shard.start : shard.end]
                        full[shard.start : shard.end] = grad.double()
                if run.distributed_optimizer:
                    dist.all_reduce(full, group=ddp.intra_dp_cp_group)
                else:
                    full = param.main_grad.double().view(-1)
                result[ddp.param_to_name[param]] = full.cpu()
    return result


VARIANTS = {
    "reduce_scatter": EXACT,
    "all_reduce": EXACT.but(distributed_optimizer=False),
    "average_in_collective": EXACT.but(average_in_collective=True),
    "overlap": EXACT.but(overlap_grad_reduce=True),
    "microbatches": EXACT.but(microbatches=3),
    "fp32_accumulation": EXACT.but(fp32_accumulation=True),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_reduced_gradients_are_those_of_one_process(variant, ranks):
    if variant == "microbatches":
        ranks = 2
    alone = run_ranks(reduced_gradients, 1, EXACT)[0]
    for shared in run_ranks(reduced_gradients, ranks, VARIANTS[variant]):
        for name, grad in alone.items():
            scale = grad.abs().max()
            assert (shared[name] - grad).abs().max() <= 1e-5 * scale, name


def test_two_optimizer_instances_reduce_over_all_ranks():
    alone = run_ranks(reduced_gradients, 1, EXACT.but(optimizer="adam"))[0]
    run = EXACT.but(optimizer="adam", instances=2)
    for shared in run_ranks(reduced_gradients, 4, run):
        for name, grad in alone.items():
            assert (shared[name] - grad).abs().max() <= 1e-5 * grad.abs().max(), name


def start_order(run: Run) -> list[list[int]]:
    """Numbers of the bucket groups in the order in which their reductions start, second step on."""
    ddp, optimizer = build(run)
    order: list[int] = []
    numbers = {group: i for i, group in enumerate(ddp.bucket_groups)}
    for group in ddp.bucket_groups:
        original = group.start_grad_sync

        def starting(force=False, group=group, original=original):
            order.append(numbers[group])
            original(force)

        group.start_grad_sync = starting
    orders = []
    for step in range(3):
        train_step(run, ddp, step)
        orders.append(list(order))
        order.clear()
        optimizer.step()
    return orders


def test_reductions_start_in_one_order():
    run = EXACT.but(overlap_grad_reduce=True, bucket_size=2_000)
    for orders in run_ranks(start_order, 2, run):
        assert all(order == sorted(order) and len(order) > 3 for order in orders)


def ready_in_wrong_order() -> list[bool]:
    """A later group's gradients are complete first: its reduction has to wait for the earlier."""
    ddp, _ = build(EXACT.but(overlap_grad_reduce=True, bucket_size=2_000))
    train_step(EXACT, ddp, 0)
    ddp.zero_grad_buffer()
    first, second = ddp.bucket_groups[:2]
    for param in second.params_in_order():
        second.register_grad_ready(param)
    waits = second.grad_reduce_handle is None
    for param in first.params_in_order():
        first.register_grad_ready(param)
    started = first.grad_reduce_handle is not None and second.grad_reduce_handle is not None
    for group in (first, second):
        group.finish_grad_sync()
    return [waits, started]


def test_a_group_that_is_ready_early_waits_for_its_predecessors():
    assert run_ranks(ready_in_wrong_order, 2) == [[True, True]] * 2


def missing_gradient(finish: bool) -> str:
    ddp, _ = build(EXACT.but(overlap_grad_reduce=True))
    train_step(EXACT, ddp, 0)
    ddp.zero_grad_buffer()
    group = ddp.bucket_groups[0]
    params = group.params_in_order()
    for param in params[:-1]:
        group.register_grad_ready(param)
    try:
        if finish:
            group.finish_grad_sync()
        else:
            group.register_grad_ready(params[-1])
            group.register_grad_ready(params[0])
    except (AssertionError, RuntimeError) as error:
        return f"{group.name_of(params[-1] if finish else params[0])}|{error}"
    return "|no error"


@pytest.mark.parametrize("finish", [True, False])
def test_missing_and_late_gradients_are_errors_that_name_the_parameter(finish):
    name, message = run_ranks(missing_gradient, 1, finish)[0].split("|")
    assert name in message and "overlap_grad_reduce=False" in message


def poisoned(value: float) -> None:
    ddp, _ = build(EXACT)
    ddp.zero_grad_buffer()
    if dist.get_rank() == 1:
        dict(ddp.module.named_parameters())["blocks.1.up.weight"].main_grad[3, 5] = value
    ddp.finish_grad_sync()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_gradient_is_named_with_its_rank_before_reduction(value):
    with pytest.raises(RankError, match=r"rank 1: the local gradient of blocks\.1\.up\.weight"):
        run_ranks(poisoned, 2, value)


class PartlyUsed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = torch.nn.Linear(32, 32)
        self.unused = torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def train_partly_used(overlap: bool) -> list[torch.Tensor]:
    from types import SimpleNamespace

    from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    parallel_state.initialize_model_parallel()
    torch.manual_seed(1)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        bucket_size=1000,
    )
    ddp = DistributedDataParallel(
        SimpleNamespace(calculate_per_token_loss=False), ddp_config, PartlyUsed().to(DEVICE)
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=0.1, weight_decay=0.1, use_distributed_optimizer=True, overlap_param_gather=overlap
        ),
        [ddp],
    )
    for step in range(3):
        ddp.zero_grad_buffer()
        inputs = torch.full((2, 32), 1.0 + step + dist.get_rank(), device=DEVICE)
        ddp(inputs).square().mean().backward()
        finalize_model_grads([ddp])
        optimizer.step()
    if overlap:
        ddp.disable_forward_pre_hook()
    return [param.detach().cpu() for param in ddp.module.parameters()]


def test_parameters_that_a_forward_does_not_use_are_updated_alike_with_overlap():
    """Their gradient is zero, their weights decay, and no rank is left with old ones."""
    plain = run_ranks(train_partly_used, 2, False)
    overlapped = run_ranks(train_partly_used, 2, True)
    for ours in plain + overlapped:
        for one, other in zip(ours, plain[0], strict=True):
            assert torch.equal(one, other)


def accumulate_twice(no_sync: bool) -> bool:
    """Whether gradients of a microbatch under no_sync stay local."""
    ddp, _ = build(EXACT.but(overlap_grad_reduce=True))
    train_step(EXACT, ddp, 0)
    ddp.zero_grad_buffer()
    tokens = batch(0, 0, 1)
    if no_sync:
        with ddp.no_sync():
            ddp(tokens[:, :-1]).sum().backward()
    else:
        ddp(tokens[:, :-1]).sum().backward()
    started = any(group.grad_reduce_handle is not None for group in ddp.bucket_groups)
    if started:
        ddp.finish_grad_sync()
    return started


@pytest.mark.parametrize("no_sync", [True, False])
def test_no_sync_keeps_gradients_local(no_sync):
    assert run_ranks(accumulate_twice, 2, no_sync) == [not no_sync] * 2
