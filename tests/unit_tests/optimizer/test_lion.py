"""Lion against its formula."""

import pytest
import torch

from megatron.core.optimizer.lion import Lion


def values(seed: int, count: int = 50) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_lion_is_its_formula(decay):
    param = torch.nn.Parameter(values(0))
    optimizer = Lion([param], lr=0.1, betas=(0.9, 0.99), weight_decay=decay)
    expected, momentum = values(0), torch.zeros(50)
    for step in range(1, 5):
        grad = values(step)
        param.grad = grad.clone()
        optimizer.step()
        update = torch.sign(0.9 * momentum + 0.1 * grad)
        expected = expected * (1 - 0.1 * decay) - 0.1 * update
        momentum = 0.99 * momentum + 0.01 * grad
        torch.testing.assert_close(param.detach(), expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(optimizer.state[param]["exp_avg"], momentum)


def test_the_update_and_the_momentum_have_a_beta_each():
    """After a gradient of 1 the momentum is 0.01, and -0.1 turns 0.9 of it around but not 0.99."""
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = Lion([param], lr=1.0, betas=(0.9, 0.99))
    for grad, expected in ((1.0, -1.0), (-0.1, 0.0), (-0.05, -1.0)):
        param.grad = torch.tensor([grad])
        optimizer.step()
        assert param.item() == expected


def test_a_zero_gradient_only_decays_the_weight():
    param = torch.nn.Parameter(values(0))
    param.grad = torch.zeros(50)
    Lion([param], lr=0.1, weight_decay=0.5).step()
    assert torch.equal(param, values(0) * (1 - 0.1 * 0.5))


def test_nan_shows_in_its_element_and_in_no_other():
    """The sign of NaN is 0, which would leave the element as it is for good."""
    params = [torch.nn.Parameter(values(0)), torch.nn.Parameter(values(1))]
    for param in params:
        param.grad = torch.ones(50)
    params[0].grad[7] = float("nan")
    Lion(params, lr=0.1).step()
    assert params[0].isnan().nonzero().flatten().tolist() == [7]
    assert not params[1].isnan().any()


def test_groups_have_options_of_their_own_and_no_gradient_is_no_step():
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    groups = [{"params": params[:1]}, {"params": params[1:], "lr": torch.tensor(0.5)}]
    optimizer = Lion(groups, lr=0.1)
    for param in params[:2]:
        param.grad = torch.tensor([1.0, -3.0])
    optimizer.step()
    assert torch.equal(params[0], torch.tensor([0.9, 1.1]))
    assert torch.equal(params[1], torch.tensor([0.5, 1.5]))
    assert torch.equal(params[2], torch.ones(2)) and params[2] not in optimizer.state


@pytest.mark.parametrize(
    "options",
    [{"lr": -1}, {"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}, {"weight_decay": -1}],
)
def test_bad_options_are_refused(options):
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=f"{name} must .* got") as error:
        Lion([torch.nn.Parameter(torch.zeros(2))], **options)
    assert str(value) in str(error.value)
