"""Muon: its formulas, its peer in torch, fused weights, and independence of grouping and scale."""

import copy
import re

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


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("precision", ["medium", "highest"])
def test_powers_of_two_in_the_gradient_leave_no_trace(precision, nesterov):
    weight = values(32, 64)
    options = {"fp32_matmul_prec": precision, "nesterov": nesterov, "weight_decay": 0.1}
    expected = run([weight], **options)[0]
    for exponent in range(-100, 101, 3):
        assert torch.equal(run([weight], scale=2.0**exponent, **options)[0], expected), exponent
    assert torch.equal(run([weight], scale=2.0**100, **options)[0], expected)


@pytest.mark.parametrize("precision", ["medium", "highest"])
def test_a_zero_gradient_only_decays_the_weight(precision):
    weight = values(16, 32)
    got = run([weight], steps=1, scale=0.0, weight_decay=0.5, fp32_matmul_prec=precision)[0]
    assert torch.equal(got, weight * (1 - 0.1 * 0.5))
    assert torch.equal(run([weight], scale=0.0, weight_decay=0.0)[0], weight)


def test_nan_stays_in_its_own_matrix():
    weights = [values(8, 16), values(8, 16, seed=1), values(16, 8)]
    expected = run(weights, steps=1)
    params = [torch.nn.Parameter(weight.clone()) for weight in weights]
    optimizer = TensorParallelMuon(params, lr=0.1)
    for param in params:
        param.grad = values(*param.shape, seed=100)
    params[1].grad[3, 4] = float("nan")
    optimizer.step()
    assert torch.equal(params[0], expected[0]) and torch.equal(params[2], expected[2])
    assert params[1].isnan().all()


def test_a_matrix_does_not_care_what_is_updated_beside_it():
    weights = [values(32, 48, seed=i) for i in range(3)] + [values(48, 32), values(64, 16)]
    together = run(weights)
    for weight, got in zip(weights, together, strict=True):
        assert torch.equal(run([weight])[0], got)
    for weight, got in zip(weights[::-1], run(weights[::-1]), strict=True):
        assert torch.equal(run([weight])[0], got)


def test_groups_have_options_of_their_own():
    weights = [values(32, 48), values(48, 32)]
    own = [{"lr": 0.1, "momentum": 0.5, "weight_decay": 0.3}, {"lr": 0.02, "nesterov": False}]
    params = [torch.nn.Parameter(weight.clone()) for weight in weights]
    groups = [{"params": [p], **o} for p, o in zip(params, own, strict=True)]
    optimizer = TensorParallelMuon(groups, momentum=0.9)
    for step in range(3):
        for param in params:
            param.grad = values(*param.shape, seed=100 + step)
        optimizer.step()
    for param, weight, options in zip(params, weights, own, strict=True):
        assert torch.equal(param, run([weight], **({"momentum": 0.9} | options))[0])


def test_a_learning_rate_may_be_a_tensor_and_a_gradient_transposed():
    weight = values(32, 48)
    expected = run([weight], steps=1)[0]
    param = torch.nn.Parameter(weight.clone())
    param.grad = values(32, 48, seed=100).mT.contiguous().mT
    TensorParallelMuon([param], lr=torch.tensor(0.1)).step()
    torch.testing.assert_close(param.detach(), expected, rtol=0, atol=1e-2)


def test_saved_momentum_goes_on_bit_for_bit():
    def advance(optimizer, param, steps):
        for step in steps:
            param.grad = values(16, 24, seed=step)
            optimizer.step()

    first = torch.nn.Parameter(values(16, 24))
    optimizer = TensorParallelMuon([first], lr=0.1)
    advance(optimizer, first, range(2))
    second = torch.nn.Parameter(first.detach().clone())
    other = TensorParallelMuon([second], lr=0.5)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    advance(optimizer, first, range(2, 4))
    advance(other, second, range(2, 4))
    assert torch.equal(first, second)


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
    weight = torch.nn.Parameter(torch.zeros(32, 24))
    weight.is_qkv, weight.qkv_split_shapes = True, shapes
    weight.grad = values(32, 24, seed=5)
    optimizer = TensorParallelMuon(
        [weight], lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0, split_qkv=True
    )
    grad = weight.grad.clone()
    optimizer.step()
    # Rows of queries, keys and values, written out.
    rows_of = (
        [0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23],
        [8, 9, 10, 11, 24, 25, 26, 27],
        [12, 13, 14, 15, 28, 29, 30, 31],
    )
    for rows in rows_of:
        alone = newton_schulz(grad[rows]).float() * get_muon_scale_factor(len(rows), 24)
        assert torch.equal(-weight.detach()[rows], alone)
    assert torch.equal(-weight.detach(), optimizer.orthogonalize(weight, grad))


def test_a_function_says_which_weights_are_fused():
    weight = torch.nn.Parameter(values(32, 24))
    marked = torch.nn.Parameter(values(32, 24))
    marked.is_qkv, marked.qkv_split_shapes = True, [8, 4, 4]
    options = {"split_qkv": True, "qkv_split_shapes": [8, 4, 4]}
    by_function = TensorParallelMuon([weight], is_qkv_fn=lambda p: p is weight, **options)
    by_mark = TensorParallelMuon([marked], split_qkv=True)
    grad = values(32, 24)
    split = by_mark.orthogonalize(marked, grad)
    assert torch.equal(by_function.orthogonalize(weight, grad), split)
    assert not torch.equal(by_function.orthogonalize(marked, grad), split)


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
    assert torch.equal(weight, values(32, 24))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be at least 0, got -1.0"),
        ({"momentum": 1.0}, "momentum must be .* got 1.0"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0, got -0.1"),
        (
            {"tp_mode": "gathered"},
            "blockwise, duplicated, distributed, layer_sharded, got 'gathered'",
        ),
        ({"fp32_matmul_prec": "tf32"}, "medium, high, highest, got 'tf32'"),
        ({"coefficient_type": "cubic"}, "simple, quintic, .*, deepseekv4, got 'cubic'"),
        ({"num_ns_steps": 0}, "at least 1, got 0"),
        ({"scale_mode": "rms"}, "spectral, unit_rms_norm, shape_scaling, got 'rms'"),
    ],
)
def test_bad_options_are_refused_with_the_choices(options, message):
    with pytest.raises(ValueError, match=message):
        TensorParallelMuon([torch.nn.Parameter(values(4, 4))], **options)


@pytest.mark.parametrize("shape", [(4,), (2, 3, 4)])
def test_what_is_no_matrix_is_refused_with_its_shape(shape):
    bad = torch.nn.Parameter(torch.zeros(shape))
    with pytest.raises(ValueError, match=re.escape(str(shape))):
        TensorParallelMuon([bad])
    optimizer = TensorParallelMuon([torch.nn.Parameter(values(4, 4))])
    with pytest.raises(ValueError, match=re.escape(str(shape))):
        optimizer.add_param_group({"params": [bad]})
    assert len(optimizer.param_groups) == 1
