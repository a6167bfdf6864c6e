"""What Megatron-core imports of the package ``emerging_optimizers``, as far as Muon needs it.

The formulas are Muon's public ones: momentum as an exponential average, Nesterov's look-ahead,
decoupled weight decay, a quintic Newton-Schulz iteration (coefficients of the set named
``quintic``), and a scale by the shape of the matrix. Both sides of the proof use them, so their
only duty is to be deterministic.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any, Literal

import torch

from tests.functional_tests.backport.cuda_names import install_module

NSCoeffT = Literal["quintic"]
_QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
_VERSION = "0.2.0"


def newton_schulz(matrix: torch.Tensor, steps: int = 5, **_: Any) -> torch.Tensor:
    """The orthogonal factor of ``matrix``, roughly, in FP32."""
    tall = matrix.size(-2) > matrix.size(-1)
    x = matrix.mT if tall else matrix
    x = x / x.norm().clamp_min(1e-7)
    for step in range(steps):
        a, b, c = _QUINTIC[step % len(_QUINTIC)]
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def muon_scale(rows: int, columns: int, mode: str = "spectral") -> float:
    """Scale of an update by the shape of its matrix."""
    if mode != "spectral":
        raise ValueError(f"the stand-in knows the scale mode 'spectral' only, got {mode!r}")
    return float(max(rows, columns)) ** 0.5


class OrthogonalizedOptimizer(torch.optim.Optimizer):
    """Base class of Megatron's ``TensorParallelMuon``."""

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float,
        *,
        weight_decay: float,
        scaled_orthogonalize_fn: Callable[..., torch.Tensor],
        nesterov: bool = False,
        use_nesterov: bool = False,
        **_: Any,
    ) -> None:
        self.nesterov = nesterov or use_nesterov
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self.scaled_orthogonalize_fn = scaled_orthogonalize_fn

    def orthogonalize(self, p: torch.Tensor, grad: torch.Tensor, **_: Any) -> torch.Tensor:
        """Overridden by Megatron."""
        return self.scaled_orthogonalize_fn(grad)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                average = state.setdefault("momentum_buffer", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                average.lerp_(p.grad, 1 - group["momentum"])
                moved = p.grad.lerp(average, group["momentum"]) if self.nesterov else average
                p.sub_(self.orthogonalize(p, moved), alpha=group["lr"])


def install() -> None:
    """Registers the modules, for the rest of this process."""
    registry: dict[str, type] = {}
    install_module(
        "emerging_optimizers",
        __version__=_VERSION,
        registry=type("Registry", (), {"get_optimizer_name_list": staticmethod(lambda: [])}),
    )
    install_module("emerging_optimizers.registry", get_optimizer_name_list=lambda: list(registry))
    install_module(
        "emerging_optimizers.orthogonalized_optimizers",
        OrthogonalizedOptimizer=OrthogonalizedOptimizer,
        AdaptiveMuon=type("AdaptiveMuon", (OrthogonalizedOptimizer,), {}),
        get_muon_scale_factor=muon_scale,
    )
    install_module(
        "emerging_optimizers.orthogonalized_optimizers.muon_utils",
        NSCoeffT=NSCoeffT,
        newton_schulz_tp=newton_schulz,
    )
    install_module("emerging_optimizers.scalar_optimizers", Lion=torch.optim.SGD)
    install_module("emerging_optimizers.soap", SOAP=torch.optim.SGD)

    installed_version = importlib.metadata.version

    def version(distribution_name: str) -> str:
        if distribution_name == "emerging-optimizers":
            return _VERSION
        return installed_version(distribution_name)

    # Releases before 0.18 ask the installed distribution for its version.
    importlib.metadata.version = version
