"""Loss scales: constant, or as large as gradients allow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch


class MegatronGradScaler(ABC):
    """Keeps the factor by which losses are multiplied.

    Args:
        initial_scale: Its first value, above 0.
        device: Where :attr:`scale` lies.
    """

    def __init__(self, initial_scale: float, device: torch.device | str = "cpu") -> None:
        if initial_scale <= 0:
            raise ValueError(f"a loss scale must be above 0, got {initial_scale}")
        self._scale = torch.tensor([initial_scale], dtype=torch.float32, device=device)

    @property
    def scale(self) -> torch.Tensor:
        """The factor: FP32, one element."""
        return self._scale

    @property
    def inv_scale(self) -> torch.Tensor:
        """Its reciprocal, rounded once from FP64."""
        return self._scale.double().reciprocal().float()

    @abstractmethod
    def update(self, found_inf: bool) -> None:
        """Learns whether the gradients of a step held NaN or Inf."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on."""

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from :meth:`state_dict`."""


class ConstantGradScaler(MegatronGradScaler):
    """A scale that never changes."""

    def update(self, found_inf: bool) -> None:
        """Nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing."""


class DynamicGradScaler(MegatronGradScaler):
    """Grows after a stretch of good steps and shrinks after some bad ones.

    Args:
        initial_scale: First value.
        min_scale: Smallest value.
        growth_factor: By which it grows, above 1.
        backoff_factor: By which it shrinks, between 0 and 1.
        growth_interval: Good steps in a row until it grows.
        hysteresis: Bad steps until it shrinks; counted anew when it grows.
        device: Where :attr:`scale` lies.

    Raises:
        ValueError: If an option is out of range.
    """

    def __init__(
        self,
        initial_scale: float,
        min_scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        hysteresis: int,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(initial_scale, device)
        if not 0 < min_scale <= initial_scale:
            raise ValueError(
                f"min_scale must be above 0 and at most {initial_scale}, got {min_scale}"
            )
        if growth_factor <= 1:
            raise ValueError(f"growth_factor must be above 1, got {growth_factor}")
        if not 0 < backoff_factor < 1:
            raise ValueError(f"backoff_factor must be between 0 and 1, got {backoff_factor}")
        if growth_interval < 1:
            raise ValueError(f"growth_interval must be at least 1, got {growth_interval}")
        if hysteresis < 1:
            raise ValueError(f"hysteresis must be at least 1, got {hysteresis}")
        self.min_scale = min_scale
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.hysteresis = hysteresis
        self._growth_tracker = 0
        self._hysteresis_tracker = hysteresis

    def update(self, found_inf: bool) -> None:
        """Counts the step, and changes the scale if it is time."""
        if found_inf:
            self._growth_tracker = 0
            self._hysteresis_tracker -= 1
            if self._hysteresis_tracker <= 0:
                self._scale = (self._scale * self.backoff_factor).clamp(min=self.min_scale)
            return
        self._growth_tracker += 1
        if self._growth_tracker == self.growth_interval:
            self._growth_tracker = 0
            self._hysteresis_tracker = self.hysteresis
            self._scale = self._scale * self.growth_factor

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": self._scale,
            "growth_tracker": self._growth_tracker,
            "hysteresis_tracker": self._hysteresis_tracker,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._scale = state_dict["scale"].to(self._scale.device)
        self._growth_tracker = state_dict["growth_tracker"]
        self._hysteresis_tracker = state_dict["hysteresis_tracker"]
