"""Lion against its formula."""

import pytest
import torch

from megatron.core.optimizer.lion import Lion


def test_lion_is_its_formula():
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(50, generator=generator)
    param = torch.nn.Parameter(start.clone())
    optimizer = Lion([param], lr=0.1, betas=(0.9, 0.99), weight_decay=0.2)
    expected, momentum = start.clone(), torch.zeros(50)
    for _ in range(4):
        grad = torch.randn(50, generator=generator)
        param.grad = grad.clone()
        optimizer.step()
        update = torch.sign(0.9 * momentum + 0.1 * grad)
        expected = expected * (1 - 0.1 * 0.2) - 0.1 * update
        momentum = 0.99 * momentum + 0.01 * grad
        torch.testing.assert_close(param.detach(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", [{"lr": -1}, {"betas": (1.0, 0.9)}, {"weight_decay": -1}])
def test_bad_options_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Lion([torch.nn.Parameter(torch.zeros(2))], **options)
