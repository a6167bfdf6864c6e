"""The loss scale's states."""

import pytest

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


def test_state_goes_on():
    first, second = DynamicGradScaler(**OPTIONS), DynamicGradScaler(**OPTIONS)
    scales("x..", first)
    second.load_state_dict(first.state_dict())
    assert scales(".xx", second) == scales(".xx", first)


def test_a_constant_scale_is_constant_and_its_inverse_exact():
    scaler = ConstantGradScaler(1024.0)
    scaler.update(True)
    assert float(scaler.scale) == 1024.0 and float(scaler.inv_scale) == 1 / 1024


@pytest.mark.parametrize(
    "change",
    [
        {"initial_scale": 0.0},
        {"min_scale": 32.0},
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"growth_interval": 0},
        {"hysteresis": 0},
    ],
)
def test_bad_options_are_refused(change):
    with pytest.raises(ValueError, match=r"scale|factor|interval|hysteresis"):
        DynamicGradScaler(**(OPTIONS | change))
