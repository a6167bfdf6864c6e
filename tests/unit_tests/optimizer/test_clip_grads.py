"""The norm of a gradient is right whatever its size, scale and split."""

import math

import pytest
import torch

from megatron.core.optimizer.clip_grads import (
    clip_grad_by_total_norm_fp32,
    get_grad_norm_fp32,
    local_square_sum,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("numel", [1, 7, 1024, 1025, 5_000_003])
def test_norm_is_exact_to_eight_digits(numel):
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    exact = math.sqrt(float(grad.double().square().sum()))
    assert get_grad_norm_fp32([grad]) == pytest.approx(exact, rel=1e-8)


@pytest.mark.parametrize("exponent", [-100, -70, 0, 63, 70, 100])
def test_norm_neither_overflows_nor_vanishes(exponent):
    grad = torch.full((100, 30), 2.0**exponent)
    assert get_grad_norm_fp32([grad]) == pytest.approx(math.sqrt(3000) * 2.0**exponent, rel=1e-8)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_norm_shows_nan_and_inf(value):
    grad = torch.zeros(5000)
    grad[4999] = value
    assert not math.isfinite(get_grad_norm_fp32([torch.ones(3), grad]))


def test_norm_does_not_depend_on_the_split():
    grad = torch.randn(100_000, generator=torch.Generator().manual_seed(1))
    parts = list(grad.split([1, 999, 50_000, 49_000]))
    assert get_grad_norm_fp32(parts) == pytest.approx(get_grad_norm_fp32(grad), rel=1e-8)


def test_no_gradients_have_norm_zero():
    assert get_grad_norm_fp32([]) == 0.0
    assert local_square_sum([], CPU).dtype == torch.float64


def test_clipping_scales_all_by_one_factor_and_leaves_small_norms_alone():
    params = [torch.zeros(4, requires_grad=True), torch.zeros(2, 2, requires_grad=True)]
    for param in params:
        param.grad = torch.full_like(param, 3.0)
    before = [param.grad.clone() for param in params]
    norm = get_grad_norm_fp32([param.grad for param in params])
    clip_grad_by_total_norm_fp32(params, norm + 1.0, norm)
    assert all(torch.equal(p.grad, b) for p, b in zip(params, before, strict=True))
    clip_grad_by_total_norm_fp32(params, norm / 4, norm)
    for param, grad in zip(params, before, strict=True):
        torch.testing.assert_close(param.grad, grad / 4, rtol=1e-6, atol=0)


def test_other_norms_are_refused():
    with pytest.raises(ValueError, match="norm_type"):
        get_grad_norm_fp32([torch.ones(3)], norm_type=float("inf"))
