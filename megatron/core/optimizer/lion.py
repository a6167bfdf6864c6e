"""Lion: the sign of an interpolated momentum (Chen et al., arXiv 2302.06675)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim.optimizer import ParamsT


class Lion(torch.optim.Optimizer):
    """``p <- (1 - lr*wd) p - lr * sign(lerp(m, grad, 1 - beta1))``, then ``m <- lerp(m, grad, 1 - beta2)``.

    Args:
        params: Tensors, or groups of them.
        lr: Learning rate.
        betas: Interpolation of the update, and decay of the momentum.
        weight_decay: Per unit of learning rate.

    Raises:
        ValueError: If an option is out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        if lr < 0:
            raise ValueError(f"lr must be at least 0, got {lr}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be at least 0 and below 1, got {betas}")
        if weight_decay < 0:
            raise ValueError(f"weight_decay must be at least 0, got {weight_decay}")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            grads = [param.grad for param in params]
            for param in params:
                if "exp_avg" not in self.state[param]:
                    self.state[param]["exp_avg"] = torch.zeros_like(param)
            momenta = [self.state[param]["exp_avg"] for param in params]
            beta1, beta2 = group["betas"]
            updates = list(torch._foreach_lerp(momenta, grads, 1 - beta1))
            # The sign of NaN is 0: a bad gradient would stop its weights for good and not show.
            updates = [torch.where(u.isnan(), u, u.sign()) for u in updates]
            if group["weight_decay"]:
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, updates, alpha=-group["lr"])
            torch._foreach_lerp_(momenta, grads, 1 - beta2)
        return loss
