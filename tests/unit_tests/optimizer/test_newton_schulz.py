"""Newton-Schulz: the coefficients, what they promise, and independence of scale (law L12)."""

import math

import pytest
import torch

from megatron.core.optimizer.newton_schulz import (
    COEFFICIENT_SETS,
    get_coefficients,
    get_muon_scale_factor,
    iterate,
    iterate_gram,
    newton_schulz,
    normalized,
)

SHAPES = [(32, 96), (96, 32), (48, 48), (3, 16, 40)]


def matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_coefficients_repeat_as_their_papers_say():
    quintic = get_coefficients("quintic", 7)
    assert quintic[0] == quintic[5] == (4.0848, -6.8946, 2.9270) and quintic[6] == quintic[1]
    assert get_coefficients("simple", 3) == [(3.4445, -4.7750, 2.0315)] * 3
    polar = get_coefficients("polar_express", 12)
    assert polar[7] == polar[11] == (1.8750, -1.2500, 0.3750)
    assert get_coefficients("cans", 9)[8] == (2.2737, -1.6447, 0.4162)
    assert get_coefficients("aol", 5)[4] == (2.7215, -3.0494, 1.3169)
    assert get_coefficients("deepseekv4", 10)[7:] == [
        (3.4445, -4.7750, 2.0315),
        (2.0, -1.5, 0.5),
        (2.0, -1.5, 0.5),
    ]
    assert get_coefficients([(1.0, 2.0, 3.0)], 2) == [(1.0, 2.0, 3.0)] * 2


@pytest.mark.parametrize("name", COEFFICIENT_SETS)
def test_singular_values_become_what_the_polynomials_make_of_them(name):
    """Of a diagonal matrix the iteration is the polynomial of each entry."""
    steps = 10 if name == "deepseekv4" else 5
    diagonal = torch.linspace(0.01, 0.4, 16, dtype=torch.float64)
    expected = diagonal.clone()
    for a, b, c in get_coefficients(name, steps):
        expected = a * expected + b * expected**3 + c * expected**5
    got = iterate(torch.diag(diagonal), get_coefficients(name, steps)).diagonal()
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    well_conditioned = expected[diagonal > 0.05]
    assert well_conditioned.min() > 0.6 and well_conditioned.max() < 1.3


@pytest.mark.parametrize("shape", SHAPES)
def test_result_has_the_singular_vectors_of_the_input(shape):
    x = matrix(*shape)
    u, _, vh = torch.linalg.svd(x.double(), full_matrices=False)
    polar = u @ vh
    got = newton_schulz(x, 8, "polar_express", "highest").double()
    assert got.shape == x.shape
    assert (got - polar).abs().max() < 0.02


@pytest.mark.parametrize("restart", [0, 2])
@pytest.mark.parametrize("shape", [(16, 64), (24, 24), (3, 8, 40)])
@pytest.mark.parametrize("name", COEFFICIENT_SETS)
def test_gram_form_is_the_plain_form(name, shape, restart):
    x = normalized(matrix(*shape)).double()
    coefficients = get_coefficients(name, 5)
    difference = iterate_gram(x, coefficients, restart) - iterate(x, coefficients)
    assert difference.abs().max() < 1e-10


def test_gram_form_is_reached_by_its_option():
    x = matrix(16, 64)
    plain = newton_schulz(x, precision="highest")
    gram = newton_schulz(x, precision="highest", use_gram=True)
    assert not torch.equal(plain, gram)
    torch.testing.assert_close(gram, plain, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("precision", ["medium", "high", "highest"])
@pytest.mark.parametrize("shape", SHAPES)
def test_powers_of_two_leave_no_trace(shape, precision):
    x = matrix(*shape)
    expected = newton_schulz(x, precision=precision)
    for exponent in (-100, -77, -31, -1, 1, 30, 64, 99, 100):
        assert torch.equal(newton_schulz(x * 2.0**exponent, precision=precision), expected)


@pytest.mark.parametrize("precision", ["medium", "highest"])
def test_zero_stays_zero_and_nan_stays_in_its_matrix(precision):
    assert not newton_schulz(torch.zeros(8, 16), precision=precision).any()
    batch = matrix(3, 8, 16)
    clean = newton_schulz(batch, precision=precision)
    for bad in (math.nan, math.inf):
        batch[1, 2, 3] = bad
        result = newton_schulz(batch, precision=precision)
        assert result[1].isnan().all()
        assert torch.equal(result[0], clean[0]) and torch.equal(result[2], clean[2])


def test_subnormal_and_huge_inputs_are_normalised():
    x = matrix(8, 16)
    for scale in (2.0**-130, 2.0**120):
        assert normalized(x * scale).norm() == pytest.approx(1.0, rel=1e-3)


def test_medium_is_as_near_as_bf16_and_highest_as_fp32():
    x = matrix(64, 160)
    exact = iterate(normalized(x).double(), get_coefficients("quintic", 5))
    highest = newton_schulz(x, precision="highest").double()
    medium = newton_schulz(x, precision="medium")
    assert (highest - exact).abs().max() < 1e-5
    assert medium.dtype == torch.bfloat16
    assert 1e-4 < (medium.double() - exact).norm() / exact.norm() < 3e-2


def test_scale_factors():
    assert get_muon_scale_factor(64, 16, "spectral") == 8
    assert get_muon_scale_factor(64, 16, "unit_rms_norm") == 2
    assert get_muon_scale_factor(16, 64, "unit_rms_norm") == 0.5
    assert get_muon_scale_factor(64, 16, "shape_scaling") == 2
    assert get_muon_scale_factor(16, 64, "shape_scaling") == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: newton_schulz(torch.zeros(4)), "rows, columns"),
        (lambda: newton_schulz(torch.zeros(4, 4), 0), "at least 1"),
        (lambda: newton_schulz(torch.zeros(4, 4), 5, "cubic"), "quintic"),
        (lambda: newton_schulz(torch.zeros(4, 4), 5, []), "at least one"),
        (lambda: newton_schulz(torch.zeros(4, 4), precision="low"), "medium"),
        (lambda: get_muon_scale_factor(1, 1, "rms"), "spectral"),
    ],
)
def test_bad_options_are_refused_with_the_choices(call, message):
    with pytest.raises(ValueError, match=message):
        call()
