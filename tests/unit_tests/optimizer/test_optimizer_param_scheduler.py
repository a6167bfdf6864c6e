"""Schedules against their formulas."""

import math
from types import SimpleNamespace

import pytest

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


def rate(step: int, **changes) -> float:
    scheduler = make(**changes)
    scheduler.step(step)
    return scheduler.optimizer.param_groups[0]["lr"]


def test_warm_up_is_linear():
    assert [rate(s) for s in (0, 5, 10)] == pytest.approx([0.0, 0.5, 1.0])
    assert rate(5, init_lr=0.5) == pytest.approx(0.75)


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
    assert rate(70, **options) == pytest.approx(1.0)
    assert rate(80, **options) == pytest.approx(0.1 + 0.9 * left)
    assert rate(110, **options) == pytest.approx(0.1)


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
    with pytest.raises(ValueError, match="max_lr"):
        refused.load_state_dict(saved.state_dict())


@pytest.mark.parametrize(
    "change",
    [
        {"min_lr": 2.0},
        {"init_lr": 2.0},
        {"lr_warmup_steps": 110},
        {"lr_decay_style": "step"},
        {"lr_decay_style": "WSD"},
        {"lr_decay_style": "WSD", "wsd_decay_steps": 10, "lr_wsd_decay_style": "step"},
        {"start_wd": 0.2},
        {"wd_incr_style": "step"},
        {"end_wd": 0.2},
    ],
)
def test_bad_options_are_refused(change):
    with pytest.raises(ValueError):
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
