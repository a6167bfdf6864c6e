"""The loss scale's states."""

import pytest
import torch

from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler

OPTIONS = {
    "initial_scale": 16.0,
    "min_scale": 2.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 3,
    "hysteresis": 2,
}


def scales(bad_steps: str, scaler: DynamicGradScaler | None = None) -> list[float]:
    scaler = scaler or DynamicGradScaler(**OPTIONS)
    result = []
    for step in bad_steps:
        scaler.update(step == "x")
        result.append(float(scaler.scale))
    return result


def test_it_grows_after_a_stretch_of_good_steps():
    assert scales("......") == [16, 16, 32, 32, 32, 64]


def test_it_shrinks_once_hysteresis_is_used_up_and_not_below_the_least():
    assert scales("xx") == [16, 8]
    assert scales("xxxxxx") == [16, 8, 4, 2, 2, 2]


def test_a_bad_step_starts_the_stretch_anew_and_growth_restores_hysteresis():
    assert scales("..x...") == [16, 16, 16, 16, 16, 32]
    assert scales("x...x") == [16, 16, 16, 32, 32]


def test_good_steps_alone_do_not_restore_hysteresis():
    assert scales("x.x") == [16, 16, 8]
    assert scales("xx.x") == [16, 8, 8, 4]


def test_the_least_scale_is_kept_where_a_step_would_pass_it():
    scaler = DynamicGradScaler(**(OPTIONS | {"min_scale": 6.0, "hysteresis": 1}))
    assert scales("xxx...", scaler) == [8, 6, 6, 6, 6, 12]


@pytest.mark.parametrize("before", ["", "x", "..", "x.", "xx.", "...x"])
def test_state_goes_on(before):
    first, second = DynamicGradScaler(**OPTIONS), DynamicGradScaler(**OPTIONS)
    scales(before, first)
    saved = first.state_dict()
    after = ".xx...x"
    went_on = scales(after, first)
    second.load_state_dict(saved)
    assert scales(after, second) == went_on


def test_scale_is_one_fp32_element_and_its_inverse_is_rounded_once():
    scaler = DynamicGradScaler(**(OPTIONS | {"initial_scale": 3.0}))
    assert scaler.scale.dtype == scaler.inv_scale.dtype == torch.float32
    assert scaler.scale.shape == scaler.inv_scale.shape == (1,)
    assert torch.equal(scaler.inv_scale, torch.tensor([1 / 3], dtype=torch.float32))


def test_a_constant_scale_is_constant_and_its_inverse_exact():
    scaler = ConstantGradScaler(1024.0)
    scaler.update(True)
    scaler.load_state_dict(scaler.state_dict())
    assert float(scaler.scale) == 1024.0 and float(scaler.inv_scale) == 1 / 1024
    with pytest.raises(ValueError, match="above 0, got -1"):
        ConstantGradScaler(-1.0)


@pytest.mark.parametrize(
    "change",
    [
        {"initial_scale": 0.0},
        {"min_scale": 0.0},
        {"min_scale": 32.0},
        {"growth_factor": 1.0},
        {"backoff_factor": 0.0},
        {"backoff_factor": 1.0},
        {"growth_interval": 0},
        {"hysteresis": 0},
    ],
)
def test_bad_options_are_refused(change):
    ((name, value),) = change.items()
    name = "loss scale" if name == "initial_scale" else name
    with pytest.raises(ValueError, match=f"{name} must be .* got {value}"):
        DynamicGradScaler(**(OPTIONS | change))
