"""Newton-Schulz iterations: the nearest orthogonal matrix by matrix products alone.

All functions are pure and take ``[..., rows, columns]``. Scaling the input by a power of two leaves
the output unchanged bit for bit (law L12), and a zero matrix stays zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any, Literal, get_args

import torch

from megatron.core.cpu_bf16 import is_emulated

Coefficients = tuple[float, float, float]
Precision = Literal["medium", "high", "highest"]
ScaleMode = Literal["spectral", "unit_rms_norm", "shape_scaling"]


@dataclass(frozen=True)
class CoefficientSet:
    """Coefficients ``(a, b, c)`` step by step.

    Attributes:
        steps: Those of the first steps.
        repeat: What follows them: the same again from the start, or the last one for ever.
    """

    steps: tuple[Coefficients, ...]
    repeat: Literal["all", "last"]

    def first(self, count: int) -> list[Coefficients]:
        """The coefficients of ``count`` steps."""
        rest = repeat(self.steps) if self.repeat == "all" else repeat(self.steps[-1:])
        return list(islice(chain(self.steps, chain.from_iterable(rest)), count))


_SIMPLE = (3.4445, -4.7750, 2.0315)

COEFFICIENT_SETS: dict[str, CoefficientSet] = {
    # Keller Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024.
    "simple": CoefficientSet((_SIMPLE,), "all"),
    # You Jiacheng's step-dependent coefficients, as in NVIDIA's Emerging-Optimizers.
    "quintic": CoefficientSet(
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        "all",
    ),
    # Amsel, Persson, Musco, Gower, "The Polar Express", arXiv 2505.16932, safety factor 1.01 included.
    "polar_express": CoefficientSet(
        (
            (8.2051, -22.9019, 16.4607),
            (4.0664, -2.8612, 0.5184),
            (3.9096, -2.8234, 0.5250),
            (3.2856, -2.4153, 0.4853),
            (2.2779, -1.6198, 0.3985),
            (1.8726, -1.2307, 0.3585),
            (1.8564, -1.2132, 0.3568),
            (1.8750, -1.2500, 0.3750),
        ),
        "last",
    ),
    # Grishina, Smirnov, Rakhuba, "Accelerating Newton-Schulz by Chebyshev-type polynomials",
    # arXiv 2506.10935.
    "cans": CoefficientSet(
        (
            (8.4703, -25.1081, 18.6293),
            (4.1828, -3.1087, 0.5806),
            (3.9619, -2.9541, 0.5630),
            (3.2866, -2.4647, 0.5074),
            (2.2737, -1.6447, 0.4162),
        ),
        "last",
    ),
    # Boissin et al., "Turbo-Muon", arXiv 2512.04632, for preconditioned inputs. The first step turns
    # singular values above 0.884 of the norm around: never again after the others, and unfit for
    # gradients of nearly rank one.
    "aol": CoefficientSet(
        (
            (4.0098, -7.0585, 2.4635),
            (3.4585, -5.5479, 2.5959),
            (2.7573, -3.2939, 1.4254),
            (2.7215, -3.0494, 1.3169),
        ),
        "last",
    ),
    # DeepSeek-V4's schedule: eight fast steps and two that settle at one.
    "deepseekv4": CoefficientSet((*[_SIMPLE] * 8, (2.0, -1.5, 0.5), (2.0, -1.5, 0.5)), "last"),
}


def get_coefficients(
    coefficient_type: str | Sequence[Coefficients], steps: int
) -> list[Coefficients]:
    """Coefficients of ``steps`` steps, from a named set or a list that is repeated from its start.

    Raises:
        ValueError: If the name is unknown, the list is empty or ``steps`` is below 1.
    """
    if steps < 1:
        raise ValueError(f"the number of Newton-Schulz steps must be at least 1, got {steps}")
    if not isinstance(coefficient_type, str):
        if not coefficient_type:
            raise ValueError("a list of Newton-Schulz coefficients needs at least one (a, b, c)")
        return CoefficientSet(tuple(coefficient_type), "all").first(steps)
    if coefficient_type not in COEFFICIENT_SETS:
        raise ValueError(
            f"coefficient_type must be one of {', '.join(COEFFICIENT_SETS)}, got {coefficient_type!r}"
        )
    return COEFFICIENT_SETS[coefficient_type].first(steps)


def get_muon_scale_factor(rows: int, columns: int, mode: str = "spectral") -> float:
    """Factor of an orthogonalised update of a ``[rows, columns]`` (out, in) weight.

    Returns:
        ``spectral``: sqrt(max(rows, columns)); ``unit_rms_norm``: sqrt(rows / columns);
        ``shape_scaling``: sqrt(max(1, rows / columns)).

    Raises:
        ValueError: If ``mode`` is none of these.
    """
    if mode == "spectral":
        return max(rows, columns) ** 0.5
    if mode == "unit_rms_norm":
        return (rows / columns) ** 0.5
    if mode == "shape_scaling":
        return max(1.0, rows / columns) ** 0.5
    raise ValueError(f"scale_mode must be one of {', '.join(get_args(ScaleMode))}, got {mode!r}")


def check_precision(precision: str) -> None:
    """Raises :class:`ValueError` unless ``precision`` is one of those of :func:`newton_schulz`."""
    if precision not in get_args(Precision):
        raise ValueError(
            f"fp32_matmul_prec must be one of {', '.join(get_args(Precision))}, got {precision!r}"
        )


def normalized(x: torch.Tensor) -> torch.Tensor:
    """``x`` over its Frobenius norm, FP32; zero stays zero, NaN and Inf become NaN.

    An exact power of two first brings the largest element into [1/2, 1), so the norm neither
    overflows nor underflows and no floor is needed.
    """
    x = x.float()
    largest = x.abs().amax(dim=(-2, -1), keepdim=True)
    exponent = torch.frexp(largest).exponent
    half = torch.div(exponent, 2, rounding_mode="floor")
    # In two factors, since one alone may be beyond FP32 for subnormal inputs.
    one = torch.ones_like(largest)
    scaled = x * torch.ldexp(one, -half) * torch.ldexp(one, half - exponent)
    # On CPUs a vector_norm of millions of elements is off by up to a percent; sums go pairwise.
    norm = scaled.square().sum(dim=(-2, -1), keepdim=True).sqrt()
    return scaled.div_(torch.where(norm == 0, one, norm))


@contextmanager
def _matmul_precision(precision: str, device: torch.device) -> Iterator[None]:
    """TF32 (on CUDA) or full FP32 products for a while, whatever the process has set.

    CPUs need it too: with the process's precision lowered they multiply FP32 in BF16 where they can.
    The backend's own setting is changed, since ``get_float32_matmul_precision`` raises in a process
    that uses such settings itself.
    """
    if precision == "medium":
        yield
        return
    on_cuda = device.type == "cuda"
    setting: Any = (torch.backends.cuda if on_cuda else torch.backends.mkldnn).matmul  # type: ignore[attr-defined]
    before = setting.fp32_precision
    setting.fp32_precision = "tf32" if on_cuda and precision == "high" else "ieee"
    try:
        yield
    finally:
        setting.fp32_precision = before


def _fused_product(
    base: torch.Tensor, left: torch.Tensor, right: torch.Tensor, beta: float, alpha: float
) -> torch.Tensor:
    """``beta * base + alpha * left @ right``, for matrices or batches of them."""
    if base.dim() == 2:
        return torch.addmm(base, left, right, beta=beta, alpha=alpha)
    return torch.baddbmm(base, left, right, beta=beta, alpha=alpha)


def iterate(x: torch.Tensor, coefficients: Sequence[Coefficients]) -> torch.Tensor:
    """``X <- aX + (bA + cA^2)X`` with ``A = XX^T``, step by step, in ``x``'s dtype.

    Args:
        x: ``[rows, columns]`` or ``[batch, rows, columns]``, rows at most columns, norm at most 1.
        coefficients: One ``(a, b, c)`` a step.
    """
    rounded = _round_to_bf16 if is_emulated(x) else _unchanged
    dtype, x = x.dtype, x.float() if is_emulated(x) else x
    for a, b, c in coefficients:
        gram = rounded(x @ x.mT)
        polynomial = rounded(_fused_product(gram, gram, gram, beta=b, alpha=c))
        x = rounded(_fused_product(x, polynomial, x, beta=a, alpha=1.0))
    return x.to(dtype)


def _round_to_bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def _unchanged(x: torch.Tensor) -> torch.Tensor:
    return x


def iterate_gram(
    x: torch.Tensor, coefficients: Sequence[Coefficients], restart_after: int = 2
) -> torch.Tensor:
    """The same as :func:`iterate` up to rounding, on the small Gram matrix.

    ``Q`` collects the polynomials, ``R`` stays ``(QX)(QX)^T``, and ``X`` is multiplied at restarts and
    at the end only (Zhang, Amsel, Chen, Dao, "Gram Newton-Schulz", 2026). With many more columns than
    rows that is far less work. Restarting after the first steps keeps low precision stable.

    Args:
        x: As for :func:`iterate`.
        coefficients: One ``(a, b, c)`` a step.
        restart_after: Steps until ``X`` is multiplied and ``R`` computed anew; 0 for never.
    """
    gram = x @ x.mT
    collected: torch.Tensor | None = None
    for number, (a, b, c) in enumerate(coefficients):
        if restart_after and number == restart_after and collected is not None:
            x = collected @ x
            gram, collected = x @ x.mT, None
        polynomial = _fused_product(gram, gram, gram, beta=b, alpha=c)
        identity = torch.eye(gram.size(-1), dtype=gram.dtype, device=gram.device)
        factor = polynomial + a * identity
        collected = factor if collected is None else collected @ factor
        if number + 1 == len(coefficients):
            break
        # R <- (aI + Z) R (aI + Z)
        half = _fused_product(gram, polynomial, gram, beta=a, alpha=1.0)
        gram = _fused_product(half, half, polynomial, beta=a, alpha=1.0)
    return x if collected is None else collected @ x


def newton_schulz(
    x: torch.Tensor,
    steps: int = 5,
    coefficient_type: str | Sequence[Coefficients] = "quintic",
    precision: str = "medium",
    use_gram: bool = False,
) -> torch.Tensor:
    """``x`` with its singular values brought near 1.

    Args:
        x: ``[rows, columns]`` or ``[batch, rows, columns]``, any floating dtype.
        steps: Number of iterations.
        coefficient_type: A name in :data:`COEFFICIENT_SETS`, or coefficients.
        precision: ``medium`` iterates in BF16, ``high`` in TF32 (FP32 on CPUs), ``highest`` in FP32.
        use_gram: Iterate on the Gram matrix.

    Returns:
        The same shape, in the dtype of the iteration. NaN or Inf anywhere makes that matrix NaN.

    Raises:
        ValueError: If ``x`` is not a matrix or a batch of them, or an option is unknown.
    """
    if x.dim() not in (2, 3):
        raise ValueError(
            f"Newton-Schulz takes [rows, columns] or a batch of them, got {tuple(x.shape)}"
        )
    check_precision(precision)
    coefficients = get_coefficients(coefficient_type, steps)
    transposed = x.size(-2) > x.size(-1)
    x = normalized(x.mT if transposed else x)
    if precision == "medium":
        x = x.bfloat16()
    with _matmul_precision(precision, x.device):
        x = iterate_gram(x, coefficients) if use_gram else iterate(x, coefficients)
    return x.mT if transposed else x
