"""Muon's step in Triton kernels: interpreted everywhere, compiled on a GPU.

Run as a script, this file runs its cases interpreted: see :mod:`tests.interpreted`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from megatron.core.optimizer.muon import TensorParallelMuon
from megatron.core.optimizer.newton_schulz import get_coefficients, iterate, newton_schulz
from tests.interpreted import needs_triton, report, run_interpreted

# Square, wide, tall and narrow: the plain form and the Gram form, tiles whole and cut.
SHAPES = [(96, 96), (64, 160), (160, 64), (72, 136)]


def weights(shapes: list[tuple[int, int]], device: str, seed: int = 1) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    params = []
    for shape in shapes:
        param = torch.nn.Parameter(torch.randn(shape, generator=generator).to(device))
        param.grad = torch.randn(shape, generator=generator).to(device)
        params.append(param)
    return params


def muon(params: list[torch.nn.Parameter], **options) -> TensorParallelMuon:
    """An optimizer, which must take the way of the kernels for all of ``params``."""
    optimizer = TensorParallelMuon(params, **({"lr": 0.125} | options))
    optimizer.check_graph_capture()
    return optimizer


def symmetric_products_are_exactly_symmetric(device: str) -> None:
    from megatron.core.optimizer import symmetric_products
    from megatron.core.optimizer.symmetric_products import Tiling

    # From one square to three groups of rows, whole and cut, for both kinds of programs.
    for side, squares in ((128, 1), (64, 1), (128, 2), (64, 2), (16, 2)):
        tiling = Tiling(side, squares, depth=32, warps=4, stages=2)
        check_symmetric_product(
            partial(symmetric_products.symmetric_product, tiling=tiling), device
        )


def check_symmetric_product(symmetric_product: Callable[..., torch.Tensor], device: str) -> None:

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 136, 72, generator=generator).half().to(device)
    tall = torch.randn(3, 72, 136, generator=generator).half().to(device).mT
    for matrix in (x, tall):
        gram = symmetric_product(matrix, matrix, 0.125)
        exact = 0.125 * matrix.double() @ matrix.double().mT
        assert torch.equal(gram, gram.mT)
        # One rounding to FP16 of a sum in FP32.
        assert ((gram.double() - exact).abs() <= 2.0**-10 * exact.abs() + 1e-5).all()
        mixed = symmetric_product(gram, gram, 2.0**-8, gram, -0.5, 3.0)
        exact = 2.0**-8 * gram.double() @ gram.double() - 0.5 * gram.double()
        exact += 3.0 * torch.eye(136, dtype=torch.float64, device=device)
        assert torch.equal(mixed, mixed.mT)
        assert ((mixed.double() - exact).abs() <= 2.0**-10 * exact.abs() + 1e-4).all()
        alone = symmetric_product(matrix[1:2].mT.contiguous().mT, matrix[1:2], 0.125)
        assert torch.equal(alone[0], gram[1]), "a result depends on its batch"


def updates_are_no_further_off_than_in_bf16(device: str) -> None:
    for kind in ("simple", "quintic", "polar_express", "deepseekv4"):
        params = weights(SHAPES, device)
        before = [param.detach().clone() for param in params]
        muon(
            params,
            momentum=0.0,
            weight_decay=0.0,
            coefficient_type=kind,
            scale_mode="shape_scaling",
        ).step()
        for old, param in zip(before, params, strict=True):
            grad = param.grad
            rows, columns = grad.shape
            wide = grad.mT if rows > columns else grad
            exact = iterate((wide / wide.norm()).double(), get_coefficients(kind, 5))
            exact = exact.mT if rows > columns else exact
            factor = 0.125 * max(1.0, rows / columns) ** 0.5
            ours = (old.double() - param.detach().double()) / factor
            plain = newton_schulz(grad, 5, kind, "medium").double()
            assert (ours - exact).norm() <= (plain - exact).norm(), (kind, tuple(grad.shape))


def momentum_and_decay_are_those_of_the_rule(device: str) -> None:
    for nesterov in (False, True):
        params, others = weights(SHAPES, device), weights(SHAPES, device)
        fused = muon(params, nesterov=nesterov, weight_decay=0.5)
        plain = TensorParallelMuon(
            others, lr=0.125, nesterov=nesterov, weight_decay=0.5, fp32_matmul_prec="highest"
        )
        for seed in (5, 6):
            for mine, theirs, new in zip(
                params, others, weights(SHAPES, device, seed), strict=True
            ):
                mine.grad.copy_(new.grad)
                theirs.grad.copy_(new.grad)
            fused.step()
            plain.step()
        for mine, theirs in zip(params, others, strict=True):
            one, other = (
                o.state[p]["momentum_buffer"] for o, p in ((fused, mine), (plain, theirs))
            )
            # A fused multiply-add may round once where two operations round twice.
            assert ((one - other).abs() <= 2.0**-22).all()
            assert (mine - theirs).norm() <= 4e-3 * theirs.norm()


def powers_of_two_change_no_bits(device: str) -> None:
    for exponent in (-110, -100, -37, 100):
        params, scaled = weights(SHAPES, device), weights(SHAPES, device)
        for param in scaled:
            param.grad.mul_(2.0**exponent)
        muon(params).step()
        muon(scaled).step()
        assert all(torch.equal(one, other) for one, other in zip(params, scaled, strict=True))


def an_update_that_is_almost_nothing_stays_finite(device: str) -> None:
    # Momenta of a matrix without gradients decay until they are no FP32 numbers any more.
    for exponent in (-126, -135, -148):
        params = weights(SHAPES, device)
        before = [param.detach().clone() for param in params]
        for param in params:
            param.grad.mul_(2.0**exponent)
        muon(params).step()
        assert all(param.isfinite().all() for param in params)
        if exponent == -126:
            assert not any(torch.equal(old, new) for old, new in zip(before, params, strict=True))


def zero_and_nan_stay_where_they_are(device: str) -> None:
    params, whole = weights(SHAPES, device), weights(SHAPES, device)
    before = params[0].detach().clone()
    params[0].grad.zero_()
    params[1].grad[3, 4] = float("nan")
    params[2].grad[3, 4] = float("inf")
    muon(params, weight_decay=0.0).step()
    muon(whole, weight_decay=0.0).step()
    assert torch.equal(params[0], before)
    assert params[1].isnan().all() and params[2].isnan().all()
    assert torch.equal(params[3], whole[3])


def parts_of_a_fused_weight_are_matrices_of_their_own(device: str) -> None:
    # Two query groups of two query heads, a key and a value head, of 16 rows each.
    for per_head in (False, True):
        (fused,) = weights([(128, 64)], device)
        fused.is_qkv = True
        rows = torch.arange(128, device=device).view(2, 64)
        cuts = [rows[:, :32], rows[:, 32:48], rows[:, 48:]]
        if per_head:
            cuts = list(torch.arange(128, device=device).view(8, 16))
        parts = []
        for cut in cuts:
            part = torch.nn.Parameter(fused.detach()[cut.flatten()].clone())
            part.grad = fused.grad[cut.flatten()].clone()
            parts.append(part)
        muon(
            [fused], split_qkv=True, qkv_split_shapes=[32, 16, 16], split_qkv_per_head=per_head
        ).step()
        for cut, part in zip(cuts, parts, strict=True):
            muon([part]).step()
            assert torch.equal(fused[cut.flatten()], part)


def other_shapes_take_the_other_way(device: str) -> None:
    params = weights([(64, 64), (30, 50)], device)
    with pytest.raises(ValueError, match=r"\(30, 50\)"):
        muon(params)
    before = [param.detach().clone() for param in params]
    TensorParallelMuon(params, lr=0.125).step()
    assert not any(torch.equal(old, new) for old, new in zip(before, params, strict=True))
    alone = weights([(64, 64)], device)
    muon(alone).step()
    assert torch.equal(alone[0], params[0])


def a_matrix_that_is_refused_leaves_all_as_they_are(device: str) -> None:
    whole, cut = weights([(64, 64), (32, 64)], device)
    cut.is_qkv = True
    before = whole.detach().clone()
    optimizer = TensorParallelMuon(
        [whole, cut], lr=0.125, split_qkv=True, qkv_split_shapes=[32, 16, 16]
    )
    # As if it were cut over ranks: of its 96 rows no query groups of 64 can be made.
    optimizer._matrices[cut] = SimpleNamespace(shape=(96, 64))
    with pytest.raises(RuntimeError, match="96 rows does not divide"):
        optimizer.step()
    assert torch.equal(whole, before)


CASES: dict[str, Callable[[str], None]] = {
    case.__name__: case
    for case in (
        symmetric_products_are_exactly_symmetric,
        updates_are_no_further_off_than_in_bf16,
        momentum_and_decay_are_those_of_the_rule,
        powers_of_two_change_no_bits,
        an_update_that_is_almost_nothing_stays_finite,
        zero_and_nan_stay_where_they_are,
        parts_of_a_fused_weight_are_matrices_of_their_own,
        other_shapes_take_the_other_way,
        a_matrix_that_is_refused_leaves_all_as_they_are,
    )
}


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    return run_interpreted(__file__)


@needs_triton
@pytest.mark.parametrize("name", CASES)
def test_interpreted(interpreted, name):
    assert not interpreted[name], interpreted[name]


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name):
    CASES[name]("cuda")


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["muon", "adam"])
def test_a_replayed_step_is_the_same_step(kind):
    from megatron.core.optimizer.step_graph import StepGraph

    sides, optimizers = [weights(SHAPES, "cuda") for _ in range(2)], []
    for params in sides:
        if kind == "muon":
            optimizers.append(muon(params))
        else:
            optimizers.append(torch.optim.AdamW(params, lr=0.125, fused=True, capturable=True))
    graph, recorded = StepGraph(optimizers[1]), []
    for step in range(7):
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 0.125 / 2**step
        for params in sides:
            if step == 5:
                params[1].grad = None
            for param, new in zip(params, weights(SHAPES, "cuda", step), strict=True):
                if param.grad is not None:
                    param.grad.copy_(new.grad)
        optimizers[0].step()
        graph.step()
        recorded.append(graph.is_recorded)
        assert all(torch.equal(one, other) for one, other in zip(*sides, strict=True)), step
    # The first step makes the state.
    assert recorded == [False, False, True, True, True, False, True]


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(512, 2048), (768, 2048), (1024, 1024), (2048, 8192)])
def test_a_matrix_does_not_depend_on_those_beside_it(shape):
    (alone,), together = weights([shape], "cuda"), weights([shape] * 5, "cuda")
    with torch.no_grad():
        together[3].copy_(alone)
    together[3].grad.copy_(alone.grad)
    muon([alone]).step()
    muon(together).step()
    assert torch.equal(together[3], alone)


@needs_triton
@pytest.mark.gpu
def test_a_step_does_not_wait_for_the_gpu():
    optimizer = muon(weights(SHAPES, "cuda"))
    for _ in range(2):
        optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_cannot_be_recorded_is_refused():
    from megatron.core.optimizer.step_graph import StepGraph

    params = weights([(8, 8)], "cpu")
    with pytest.raises(ValueError, match="whole FP32 matrices on a GPU"):
        StepGraph(TensorParallelMuon(params))
    with pytest.raises(ValueError, match="step of SGD cannot be a CUDA graph"):
        StepGraph(torch.optim.SGD(params, lr=0.1))


if __name__ == "__main__":
    report(CASES)
