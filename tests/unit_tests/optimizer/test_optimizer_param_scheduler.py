"""Schedules against their formulas."""

import math
from types import SimpleNamespace

import pytest
import torch

from megatron.core.optimizer_param_scheduler import (
    OptimizerParamScheduler,
    combine_param_group_overrides,
    get_canonical_lr_for_logging,
    param_group_override_to_tuple,
)

OPTIONS = {
    "init_lr": 0.0,
    "max_lr": 1.0,
    "min_lr": 0.1,
    "lr_warmup_steps": 10,
    "lr_decay_steps": 110,
    "lr_decay_style": "linear",
    "start_wd": 0.1,
    "end_wd": 0.1,
    "wd_incr_steps": 100,
    "wd_incr_style": "constant",
}


def make(groups: list[dict] | None = None, **changes) -> OptimizerParamScheduler:
    optimizer = SimpleNamespace(param_groups=groups if groups is not None else [{}])
    return OptimizerParamScheduler(optimizer, **(OPTIONS | changes))


def make_wsd(**changes) -> OptimizerParamScheduler:
    wsd = {"lr_decay_style": "WSD", "wsd_decay_steps": 40, "lr_wsd_decay_style": "linear"}
    return make(**(wsd | changes))


def rate(step: int, **changes) -> float:
    scheduler = make(**changes)
    scheduler.step(step)
    return scheduler.optimizer.param_groups[0]["lr"]


def test_warm_up_is_linear():
    assert [rate(s) for s in range(11)] == pytest.approx([s / 10 for s in range(11)])
    assert rate(11) == pytest.approx(0.991)
    assert rate(5, init_lr=0.5) == pytest.approx(0.75)
    assert rate(0, lr_warmup_steps=0) == 1.0


def test_every_step_of_every_style_is_its_formula():
    """With warm-up of 10, decay until 110 and rates from 1 to 0.1."""
    left = {
        "linear": lambda step: 1 - (step - 10) / 100,
        "cosine": lambda step: (1 + math.cos(math.pi * (step - 10) / 100)) / 2,
    }
    for style, formula in left.items():
        for step in range(11, 111):
            got = rate(step, lr_decay_style=style)
            assert got == pytest.approx(0.1 + 0.9 * formula(step)), (style, step)
    for step in range(11, 111):
        got = rate(step, lr_decay_style="inverse-square-root", min_lr=0.5)
        assert got == pytest.approx(max(0.5, math.sqrt(10 / step)))
    for step in range(1, 111):
        got = rate(step, lr_decay_style="inverse-square-root", lr_warmup_steps=0)
        assert got == pytest.approx(max(0.1, 1 / math.sqrt(step)))


def test_steps_add_up():
    scheduler = make()
    for _ in range(12):
        scheduler.step(5)
    assert scheduler.num_steps == 60
    assert scheduler.optimizer.param_groups[0]["lr"] == pytest.approx(rate(60))


@pytest.mark.parametrize(
    ("style", "half"),
    [
        ("constant", 1.0),
        ("linear", 0.1 + 0.9 * 0.5),
        ("cosine", 0.1 + 0.9 * 0.5),
        ("inverse-square-root", math.sqrt(10 / 60)),
    ],
)
def test_decay_half_way_and_after_the_end(style, half):
    assert rate(60, lr_decay_style=style) == pytest.approx(half)
    assert rate(111, lr_decay_style=style) == pytest.approx(1.0 if style == "constant" else 0.1)


def test_cosine_at_a_quarter():
    expected = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))
    assert rate(35, lr_decay_style="cosine") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("style", "left"),
    [
        ("linear", 0.75),
        ("cosine", 0.5 * (1 + math.cos(math.pi / 4))),
        ("exponential", 2 * 0.5**0.25 - 1),
        ("minus_sqrt", 0.5),
    ],
)
def test_wsd_is_stable_and_then_decays(style, left):
    options = {"lr_decay_style": "WSD", "wsd_decay_steps": 40, "lr_wsd_decay_style": style}
    for step in (11, 40, 70):
        assert rate(step, **options) == pytest.approx(1.0)
    assert rate(80, **options) == pytest.approx(0.1 + 0.9 * left)
    assert rate(110, **options) == pytest.approx(0.1)
    assert rate(111, **options) == pytest.approx(0.1)
    assert rate(5, **options) == pytest.approx(0.5)


def test_groups_have_rates_and_decays_of_their_own():
    groups = [
        {"default_config": True},
        {"max_lr": 0.5, "min_lr": 0.0},
        {"lr_mult": 2.0, "wd_mult": 0.0},
    ]
    scheduler = make(groups)
    scheduler.step(60)
    assert [group["lr"] for group in groups] == pytest.approx([0.55, 0.25, 1.1])
    assert [group["weight_decay"] for group in groups] == pytest.approx([0.1, 0.1, 0.0])
    assert get_canonical_lr_for_logging(groups) == pytest.approx(0.55)
    assert get_canonical_lr_for_logging(groups[1:]) is None


def test_groups_warm_up_to_their_own_rate_and_end_at_it():
    groups = [{"max_lr": 0.5, "min_lr": 0.3}, {"max_lr": None, "min_lr": None}]
    scheduler = make(groups)
    scheduler.step(5)
    assert [group["lr"] for group in groups] == pytest.approx([0.25, 0.5])
    scheduler.step(200)
    assert [group["lr"] for group in groups] == pytest.approx([0.3, 0.1])


def test_groups_have_first_and_last_weight_decays_of_their_own():
    groups = [{"start_wd": 0.2, "end_wd": 0.6, "wd_mult": 0.5}, {}]
    scheduler = make(groups, start_wd=0.0, end_wd=1.0, wd_incr_style="linear")
    assert [group["weight_decay"] for group in groups] == pytest.approx([0.1, 0.0])
    scheduler.step(25)
    assert [group["weight_decay"] for group in groups] == pytest.approx([0.15, 0.25])
    scheduler.step(75)
    assert [group["weight_decay"] for group in groups] == pytest.approx([0.3, 1.0])


def test_a_rate_that_is_a_tensor_stays_the_same_tensor():
    rate_tensor = torch.tensor(0.0)
    groups = [{"lr": rate_tensor}]
    make(groups).step(60)
    assert groups[0]["lr"] is rate_tensor and float(rate_tensor) == pytest.approx(0.55)


@pytest.mark.parametrize(
    ("style", "quarter"), [("linear", 0.25), ("cosine", 0.5 * (1 - math.cos(math.pi / 4)))]
)
def test_weight_decay_rises(style, quarter):
    scheduler = make(start_wd=0.0, end_wd=1.0, wd_incr_style=style)
    scheduler.step(25)
    assert scheduler.get_wd() == pytest.approx(quarter)
    scheduler.step(100)
    assert scheduler.get_wd() == 1.0


def test_loading_takes_keeps_or_refuses_other_options():
    saved = make(max_lr=2.0)
    saved.step(30)
    taken = make(use_checkpoint_opt_param_scheduler=True)
    taken.load_state_dict(saved.state_dict())
    assert taken.max_lr == 2.0 and taken.num_steps == 30
    kept = make(use_checkpoint_opt_param_scheduler=False, override_opt_param_scheduler=True)
    kept.load_state_dict(saved.state_dict())
    assert kept.max_lr == 1.0 and kept.num_steps == 30
    refused = make(use_checkpoint_opt_param_scheduler=False)
    with pytest.raises(ValueError, match=r"max_lr is 1\.0 here and 2\.0 in the loaded state"):
        refused.load_state_dict(saved.state_dict())
    assert refused.max_lr == 1.0 and refused.num_steps == 0


@pytest.mark.parametrize(
    "change",
    [
        {"max_lr": 2.0},
        {"min_lr": 0.2},
        {"lr_warmup_steps": 5},
        {"lr_decay_steps": 120},
        {"lr_decay_style": "cosine"},
        {"start_wd": 0.0, "wd_incr_style": "linear"},
        {"wd_incr_steps": 50},
        {"wsd_decay_steps": 20},
        {"lr_wsd_decay_style": "cosine"},
    ],
)
def test_every_option_is_saved_and_compared(change):
    saved = make_wsd(**change)
    saved.step(90)
    taken = make_wsd()
    taken.load_state_dict(saved.state_dict())
    assert taken.state_dict() == saved.state_dict()
    assert taken.optimizer.param_groups == saved.optimizer.param_groups
    with pytest.raises(ValueError, match=next(iter(change))):
        make_wsd(use_checkpoint_opt_param_scheduler=False).load_state_dict(saved.state_dict())


def test_equal_options_load_without_either_flag_whatever_was_stepped_before():
    saved = make()
    saved.step(60)
    other = make(use_checkpoint_opt_param_scheduler=False)
    other.step(7)
    other.load_state_dict(saved.state_dict())
    assert other.optimizer.param_groups == saved.optimizer.param_groups


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing():
    """One without the options of its own style, as Megatron's states are."""
    state = make_wsd().state_dict()
    del state["wsd_decay_steps"], state["lr_wsd_decay_style"]
    scheduler = make()
    before = scheduler.state_dict()
    with pytest.raises(ValueError, match="wsd_decay_steps"):
        scheduler.load_state_dict(state)
    assert scheduler.state_dict() == before
    make_wsd().load_state_dict(state)


STYLES = "constant, linear, cosine, inverse-square-root, WSD, got 'step'"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"min_lr": 2.0}, "min_lr .* max_lr=1.0, got 2.0"),
        ({"min_lr": -1.0}, "min_lr .* got -1.0"),
        ({"init_lr": 2.0}, "init_lr .* got 2.0"),
        ({"lr_warmup_steps": 110}, "lr_warmup_steps .* lr_decay_steps=110, got 110"),
        ({"lr_decay_style": "step"}, STYLES),
        ({"lr_decay_style": "WSD"}, "wsd_decay_steps above 0 .* got None"),
        (
            {"lr_decay_style": "WSD", "wsd_decay_steps": 111, "lr_wsd_decay_style": "linear"},
            "got 111",
        ),
        (
            {"lr_decay_style": "WSD", "wsd_decay_steps": 10, "lr_wsd_decay_style": "step"},
            "linear, cosine, exponential, minus_sqrt, got 'step'",
        ),
        ({"start_wd": 0.2}, "start_wd=0.2, end_wd=0.1"),
        ({"start_wd": -0.2}, "start_wd=-0.2"),
        ({"wd_incr_style": "step"}, "constant, linear, cosine, got 'step'"),
        ({"end_wd": 0.2}, "'constant' needs start_wd=0.1 equal to end_wd=0.2"),
        ({"override_opt_param_scheduler": True}, "contradicts"),
    ],
)
def test_bad_options_are_refused_with_the_choices(change, message):
    with pytest.raises(ValueError, match=message):
        make(**change)


def test_overrides_combine_unless_they_contradict():
    assert combine_param_group_overrides([{"wd_mult": 0.0}, None, {"max_lr": 1.0}]) == {
        "wd_mult": 0.0,
        "max_lr": 1.0,
    }
    with pytest.raises(ValueError, match="wd_mult"):
        combine_param_group_overrides([{"wd_mult": 0.0}, {"wd_mult": 1.0}])
    first = param_group_override_to_tuple({"wd_mult": 0.0, "max_lr": 1.0})
    assert first == param_group_override_to_tuple({"max_lr": 1.0, "wd_mult": 0.0})
    assert param_group_override_to_tuple(None) is None
