"""Muon: its formulas, its peer in torch, fused weights, and independence of grouping and scale."""

import pytest
import torch

from megatron.core.optimizer.muon import TensorParallelMuon
from megatron.core.optimizer.newton_schulz import get_muon_scale_factor, newton_schulz


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(
    params: list[torch.Tensor], steps: int = 3, scale: float = 1.0, **options
) -> list[torch.Tensor]:
    """Parameters after some steps on gradients that depend on their shape and the step alone."""
    params = [torch.nn.Parameter(p.clone()) for p in params]
    optimizer = TensorParallelMuon(params, **({"lr": 0.1} | options))
    for step in range(steps):
        for param in params:
            param.grad = values(*param.shape, seed=100 + step) * scale
        optimizer.step()
    return [param.detach() for param in params]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("decoupled", [True, False])
def test_momentum_decay_and_update_by_hand(nesterov, decoupled):
    weight = values(32, 48)
    options = {"momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.1}
    got = run(
        [weight], use_decoupled_weight_decay=decoupled, fp32_matmul_prec="highest", **options
    )[0]
    expected, buffer = weight.clone(), torch.zeros(32, 48)
    for step in range(3):
        grad = values(32, 48, seed=100 + step)
        if not decoupled:
            grad = grad + 0.1 * expected
        buffer = 0.9 * buffer + 0.1 * grad
        update = 0.1 * grad + 0.9 * buffer if nesterov else buffer
        if decoupled:
            expected = expected * (1 - 0.1 * 0.1)
        expected = expected - 0.1 * 48**0.5 * newton_schulz(update, precision="highest")
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"scale_mode": "shape_scaling"}, "original"),
        ({"scale_mode": "spectral", "extra_scale_factor": 0.2}, "match_rms_adamw"),
    ],
)
@pytest.mark.parametrize("shape", [(64, 96), (96, 64)])
def test_torch_muon_is_a_peer(shape, ours, theirs):
    weight = values(*shape)
    got = run([weight], coefficient_type="simple", momentum=0.95, weight_decay=0.1, **ours)[0]
    peer = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.Muon(
        [peer], lr=0.1, momentum=0.95, weight_decay=0.1, adjust_lr_fn=theirs
    )
    for step in range(3):
        peer.grad = values(*shape, seed=100 + step)
        optimizer.step()
    # Both iterate in BF16; torch also normalises in BF16.
    update = (weight - peer.detach()).norm()
    assert (got - peer.detach()).norm() < 2e-2 * update


@pytest.mark.parametrize("precision", ["medium", "highest"])
def test_powers_of_two_in_the_gradient_leave_no_trace(precision):
    weight = values(32, 64)
    expected = run([weight], fp32_matmul_prec=precision)[0]
    for exponent in (-100, -33, 1, 60, 100):
        got = run([weight], scale=2.0**exponent, fp32_matmul_prec=precision)[0]
        assert torch.equal(got, expected)


def test_a_zero_gradient_only_decays_the_weight():
    weight = values(16, 32)
    got = run([weight], steps=1, scale=0.0, weight_decay=0.5)[0]
    assert torch.equal(got, weight * (1 - 0.1 * 0.5))


def test_a_matrix_does_not_care_what_is_updated_beside_it():
    weights = [values(32, 48, seed=i) for i in range(3)] + [values(48, 32), values(64, 16)]
    together = run(weights)
    for weight, got in zip(weights, together, strict=True):
        assert torch.equal(run([weight])[0], got)


def test_parameters_without_gradient_stay():
    params = [torch.nn.Parameter(values(8, 8)) for _ in range(2)]
    before = params[1].detach().clone()
    optimizer = TensorParallelMuon(params, lr=0.1)
    params[0].grad = values(8, 8)
    optimizer.step()
    assert torch.equal(params[1], before) and params[1] not in optimizer.state


def test_fused_qkv_is_three_matrices():
    """Rows come group by group: [2 heads x 4, key 4, value 4], of two query groups."""
    shapes = [8, 4, 4]
    weight = torch.nn.Parameter(values(32, 24))
    weight.is_qkv, weight.qkv_split_shapes = True, shapes
    weight.grad = values(32, 24, seed=5)
    optimizer = TensorParallelMuon(
        [weight], lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0, split_qkv=True
    )
    before, grad = weight.detach().clone(), weight.grad.clone()
    optimizer.step()
    moved = (before - weight.detach()).view(2, 16, 24)
    for start, rows in ((0, 8), (8, 4), (12, 4)):
        part = grad.view(2, 16, 24)[:, start : start + rows].reshape(-1, 24)
        alone = newton_schulz(part).float() * get_muon_scale_factor(2 * rows, 24)
        difference = moved[:, start : start + rows].reshape(-1, 24) - alone
        assert difference.abs().max() < 1e-5
    expected = optimizer.orthogonalize(weight, grad)
    torch.testing.assert_close(moved.view(32, 24), expected, rtol=0, atol=1e-5)


def test_without_split_a_fused_weight_is_one_matrix():
    weight = torch.nn.Parameter(values(32, 24))
    weight.is_qkv, weight.qkv_split_shapes = True, [8, 4, 4]
    whole = TensorParallelMuon([weight], split_qkv=False).orthogonalize(weight, values(32, 24))
    split = TensorParallelMuon([weight], split_qkv=True).orthogonalize(weight, values(32, 24))
    assert not torch.equal(whole, split)
    assert torch.equal(whole, newton_schulz(values(32, 24)).float() * 32**0.5)


@pytest.mark.parametrize(
    ("shapes", "message"), [(None, "qkv_split_shapes"), ([7, 4, 4], "does not divide")]
)
def test_a_fused_weight_that_cannot_be_split_is_an_error(shapes, message):
    weight = torch.nn.Parameter(values(32, 24))
    weight.is_qkv = True
    optimizer = TensorParallelMuon([weight], split_qkv=True, qkv_split_shapes=shapes)
    weight.grad = values(32, 24)
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr"),
        ({"momentum": 1.0}, "momentum"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"tp_mode": "gathered"}, "duplicated"),
        ({"fp32_matmul_prec": "tf32"}, "highest"),
        ({"coefficient_type": "cubic"}, "quintic"),
        ({"num_ns_steps": 0}, "at least 1"),
        ({"scale_mode": "rms"}, "spectral"),
    ],
)
def test_bad_options_are_refused_with_the_choices(options, message):
    with pytest.raises(ValueError, match=message):
        TensorParallelMuon([torch.nn.Parameter(values(4, 4))], **options)


@pytest.mark.parametrize("shape", [(4,), (2, 3, 4)])
def test_what_is_no_matrix_is_refused_with_its_shape(shape):
    with pytest.raises(ValueError, match=str(shape[0])):
        TensorParallelMuon([torch.nn.Parameter(torch.zeros(shape))])
