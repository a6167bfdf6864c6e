"""Schedules of learning rate and weight decay, by samples consumed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

import torch


class ParamGroupOverride(TypedDict, total=False):
    """Options that a parameter group may have of its own."""

    max_lr: float
    min_lr: float
    start_wd: float
    end_wd: float
    wd_mult: float
    optimizer: str


def param_group_override_to_tuple(
    param_group_override: Mapping[str, Any] | None,
) -> tuple[tuple[str, Any], ...] | None:
    """A hashable form in which the order of options does not matter."""
    return None if param_group_override is None else tuple(sorted(param_group_override.items()))


def combine_param_group_overrides(
    param_group_overrides: Sequence[ParamGroupOverride | None],
) -> ParamGroupOverride:
    """All options together.

    Raises:
        ValueError: If two give one option different values.
    """
    combined: dict[str, Any] = {}
    for override in param_group_overrides:
        for key, value in (override or {}).items():
            if combined.setdefault(key, value) != value:
                raise ValueError(
                    f"overrides of one parameter give {key} as {combined[key]} and as {value}; let "
                    "only one of their keys match it"
                )
    return combined  # type: ignore[return-value]


def get_canonical_lr_for_logging(param_groups: Sequence[Mapping[str, Any]]) -> float | None:
    """The learning rate of the groups that follow the common schedule; ``None`` if there are none."""
    return next((group["lr"] for group in param_groups if group.get("default_config", False)), None)


def _cosine(progress: float) -> float:
    return 0.5 * (math.cos(math.pi * progress) + 1.0)


# What is left of the way from the highest to the lowest rate, by progress from 0 to 1.
_DECAY: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": _cosine,
}
_WSD_DECAY: dict[str, Callable[[float], float]] = {
    **_DECAY,
    "exponential": lambda progress: 2.0 * 0.5**progress - 1.0,
    "minus_sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
LR_DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_DECAY_STYLES = tuple(_WSD_DECAY)
WD_INCREMENT_STYLES = ("constant", "linear", "cosine")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


class OptimizerParamScheduler:
    """Sets ``lr`` and ``weight_decay`` of every parameter group.

    A group's own ``max_lr``, ``min_lr``, ``start_wd``, ``end_wd``, ``lr_mult`` and ``wd_mult`` go first.

    Args:
        optimizer: Has ``param_groups``.
        init_lr: Rate at which warm-up starts.
        max_lr: Rate after warm-up.
        min_lr: Rate after decay.
        lr_warmup_steps: Steps of linear warm-up.
        lr_decay_steps: Steps until the decay ends, warm-up included.
        lr_decay_style: One of :data:`LR_DECAY_STYLES`.
        start_wd: First weight decay.
        end_wd: Last weight decay.
        wd_incr_steps: Steps from the one to the other.
        wd_incr_style: One of :data:`WD_INCREMENT_STYLES`.
        use_checkpoint_opt_param_scheduler: Take a loaded state's options without question.
        override_opt_param_scheduler: Keep these options instead of a loaded state's.
        wsd_decay_steps: For ``WSD``: steps of the final decay.
        lr_wsd_decay_style: For ``WSD``: one of :data:`WSD_DECAY_STYLES`.

    Raises:
        ValueError: If an option is out of range.
    """

    def __init__(
        self,
        optimizer: Any,
        init_lr: float,
        max_lr: float,
        min_lr: float,
        lr_warmup_steps: int,
        lr_decay_steps: int,
        lr_decay_style: str,
        start_wd: float,
        end_wd: float,
        wd_incr_steps: int,
        wd_incr_style: str,
        use_checkpoint_opt_param_scheduler: bool | None = True,
        override_opt_param_scheduler: bool | None = False,
        wsd_decay_steps: int | None = None,
        lr_wsd_decay_style: str | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.init_lr = init_lr
        self.max_lr = float(max_lr)
        self.min_lr = min_lr
        self.lr_warmup_steps = lr_warmup_steps
        self.lr_decay_steps = lr_decay_steps
        self.lr_decay_style = lr_decay_style
        self.wsd_decay_steps = wsd_decay_steps
        self.lr_wsd_decay_style = lr_wsd_decay_style
        self.start_wd = start_wd
        self.end_wd = end_wd
        self.wd_incr_steps = wd_incr_steps
        self.wd_incr_style = wd_incr_style
        self.use_checkpoint_opt_param_scheduler = use_checkpoint_opt_param_scheduler
        self.override_opt_param_scheduler = override_opt_param_scheduler
        self.num_steps = 0
        self._check()
        self.step(0)

    def _check(self) -> None:
        _require(
            not (self.use_checkpoint_opt_param_scheduler and self.override_opt_param_scheduler),
            "override_opt_param_scheduler=True contradicts use_checkpoint_opt_param_scheduler=True; set "
            "one of them to False",
        )
        _require(
            0 <= self.min_lr <= self.max_lr,
            f"min_lr must be between 0 and max_lr={self.max_lr}, got {self.min_lr}",
        )
        _require(
            0 <= self.init_lr <= self.max_lr,
            f"init_lr must be between 0 and max_lr={self.max_lr}, got {self.init_lr}",
        )
        _require(
            0 <= self.lr_warmup_steps < self.lr_decay_steps,
            f"lr_warmup_steps must be at least 0 and below lr_decay_steps={self.lr_decay_steps}, got "
            f"{self.lr_warmup_steps}",
        )
        _require(
            self.lr_decay_style in LR_DECAY_STYLES,
            f"lr_decay_style must be one of {', '.join(LR_DECAY_STYLES)}, got {self.lr_decay_style!r}",
        )
        if self.lr_decay_style == "WSD":
            _require(
                self.wsd_decay_steps is not None
                and 0 < self.wsd_decay_steps <= self.lr_decay_steps,
                "lr_decay_style='WSD' needs wsd_decay_steps above 0 and at most "
                f"lr_decay_steps={self.lr_decay_steps}, got {self.wsd_decay_steps}",
            )
            _require(
                self.lr_wsd_decay_style in WSD_DECAY_STYLES,
                f"lr_wsd_decay_style must be one of {', '.join(WSD_DECAY_STYLES)}, got "
                f"{self.lr_wsd_decay_style!r}",
            )
        _require(
            0 <= self.start_wd <= self.end_wd,
            f"weight decay must rise from at least 0: start_wd={self.start_wd}, end_wd={self.end_wd}",
        )
        _require(
            self.wd_incr_style in WD_INCREMENT_STYLES,
            f"wd_incr_style must be one of {', '.join(WD_INCREMENT_STYLES)}, got "
            f"{self.wd_incr_style!r}",
        )
        _require(
            self.wd_incr_style != "constant" or self.start_wd == self.end_wd,
            f"wd_incr_style='constant' needs start_wd={self.start_wd} equal to end_wd={self.end_wd}",
        )

    def get_wd(self, param_group: Mapping[str, Any] | None = None) -> float:
        """Weight decay at this step, before a group's ``wd_mult``."""
        group = param_group or {}
        start, end = group.get("start_wd", self.start_wd), group.get("end_wd", self.end_wd)
        if self.wd_incr_style == "constant" or self.num_steps >= self.wd_incr_steps:
            return end
        progress = self.num_steps / self.wd_incr_steps
        return start + (end - start) * (1.0 - _DECAY[self.wd_incr_style](progress))

    def get_lr(self, param_group: Mapping[str, Any]) -> float:
        """A group's learning rate at this step."""
        max_lr = param_group.get("max_lr")
        min_lr = param_group.get("min_lr")
        max_lr = self.max_lr if max_lr is None else max_lr
        min_lr = self.min_lr if min_lr is None else min_lr
        return self._scheduled_lr(max_lr, min_lr) * param_group.get("lr_mult", 1.0)

    def _scheduled_lr(self, max_lr: float, min_lr: float) -> float:
        step, warmup, decay = self.num_steps, self.lr_warmup_steps, self.lr_decay_steps
        if warmup > 0 and step <= warmup:
            return self.init_lr + (max_lr - self.init_lr) * step / warmup
        if self.lr_decay_style == "constant":
            return max_lr
        if step > decay:
            return min_lr
        if self.lr_decay_style == "inverse-square-root":
            return max(min_lr, max_lr * (max(warmup, 1) / max(step, 1)) ** 0.5)
        if self.lr_decay_style == "WSD":
            assert self.wsd_decay_steps is not None and self.lr_wsd_decay_style is not None
            progress = max(0.0, (step - (decay - self.wsd_decay_steps)) / self.wsd_decay_steps)
            left = _WSD_DECAY[self.lr_wsd_decay_style](progress)
        else:
            left = _DECAY[self.lr_decay_style]((step - warmup) / (decay - warmup))
        return min_lr + left * (max_lr - min_lr)

    def step(self, increment: int) -> None:
        """Goes ``increment`` steps (samples) on and sets every group's options."""
        self.num_steps += increment
        for group in self.optimizer.param_groups:
            lr = self.get_lr(group)
            if isinstance(group.get("lr"), torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
            group["weight_decay"] = self.get_wd(group) * group.get("wd_mult", 1.0)

    _OPTIONS = (
        "max_lr",
        "min_lr",
        "lr_warmup_steps",
        "lr_decay_steps",
        "lr_decay_style",
        "start_wd",
        "end_wd",
        "wd_incr_steps",
        "wd_incr_style",
        "wsd_decay_steps",
        "lr_wsd_decay_style",
    )

    def state_dict(self) -> dict[str, Any]:
        """Options and progress."""
        return {"num_steps": self.num_steps} | {name: getattr(self, name) for name in self._OPTIONS}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from :meth:`state_dict`.

        Raises:
            ValueError: If its options differ and neither flag says which to take, or if those taken are
                out of range. The schedule is then as before.
        """
        before = {name: getattr(self, name) for name in self._OPTIONS}
        for name in self._OPTIONS:
            if name not in state_dict or self.override_opt_param_scheduler:
                continue
            here, saved = getattr(self, name), state_dict[name]
            if here != saved and not self.use_checkpoint_opt_param_scheduler:
                raise ValueError(
                    f"{name} is {here} here and {saved} in the loaded state; make them equal, or choose "
                    "with use_checkpoint_opt_param_scheduler or override_opt_param_scheduler"
                )
            setattr(self, name, saved)
        try:
            self._check()
        except ValueError:
            vars(self).update(before)
            raise
        self.num_steps = 0
        self.step(state_dict["num_steps"])
