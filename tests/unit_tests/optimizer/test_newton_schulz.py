"""Newton-Schulz: the coefficients, what they promise, and independence of scale (law L12)."""

import math

import pytest
import torch

from megatron.core.optimizer import newton_schulz as module
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

# As published, written down a second time: coefficients, and those of the steps that follow them.
SIMPLE = (3.4445, -4.7750, 2.0315)
PUBLISHED = {
    "simple": [SIMPLE, SIMPLE],
    "quintic": [
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
    ],
    "polar_express": [
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
        (1.8750, -1.2500, 0.3750),
        (1.8750, -1.2500, 0.3750),
    ],
    "cans": [
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
        (2.2737, -1.6447, 0.4162),
        (2.2737, -1.6447, 0.4162),
    ],
    "aol": [
        (4.0098, -7.0585, 2.4635),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
        (2.7215, -3.0494, 1.3169),
        (2.7215, -3.0494, 1.3169),
    ],
    "deepseekv4": [SIMPLE] * 8 + [(2.0, -1.5, 0.5)] * 4,
}

# Steps, and singular values (over the Frobenius norm) that those steps bring into a range.
PROMISES = {
    "simple": (5, (0.01, 1.0), (0.68, 1.14)),
    "quintic": (5, (0.01, 1.0), (0.97, 1.04)),
    "polar_express": (8, (0.001, 1.0), (0.999, 1.001)),
    "cans": (5, (0.001, 1.0), (0.88, 1.12)),
    "aol": (4, (0.01, 0.85), (0.6, 1.09)),
    "deepseekv4": (10, (0.001, 1.0), (0.999, 1.001)),
}


def matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def polynomials(values: torch.Tensor, name: str, steps: int) -> torch.Tensor:
    for a, b, c in get_coefficients(name, steps):
        values = a * values + b * values**3 + c * values**5
    return values


def test_no_set_is_missing_or_more():
    assert set(COEFFICIENT_SETS) == set(PUBLISHED) == set(PROMISES)


@pytest.mark.parametrize("name", PUBLISHED)
def test_coefficients_and_their_repetition_are_the_published_ones(name):
    for steps in range(1, len(PUBLISHED[name]) + 1):
        assert get_coefficients(name, steps) == PUBLISHED[name][:steps]


def test_coefficients_of_ones_own_repeat_from_their_start():
    own = [(1.0, 2.0, 3.0), (4.0, 5.0, 6.0)]
    assert get_coefficients(own, 3) == [*own, own[0]]


@pytest.mark.parametrize("name", PROMISES)
def test_singular_values_end_in_the_range_that_the_coefficients_promise(name):
    steps, (low, high), (least, most) = PROMISES[name]
    ends = polynomials(torch.linspace(low, high, 100_001, dtype=torch.float64), name, steps)
    assert least < ends.min() and ends.max() < most
    # And of a matrix with such singular values, the iteration makes what the polynomials say.
    start = torch.logspace(math.log10(low), math.log10(high), 16, dtype=torch.float64)
    left = torch.linalg.qr(matrix(16, 16).double()).Q
    right = torch.linalg.qr(matrix(40, 16, seed=1).double()).Q
    x = left * start @ right.mT
    got = left.mT @ iterate(x, get_coefficients(name, steps)) @ right
    expected = torch.diag(polynomials(start, name, steps))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["polar_express", "cans", "aol", "deepseekv4"])
def test_more_steps_than_a_set_has_stay_in_its_range(name):
    """Which is why these repeat their last step: their first ones are for small values only."""
    steps, (low, high), (least, most) = PROMISES[name]
    values = torch.linspace(low, high, 10_001, dtype=torch.float64)
    for more in range(1, 8):
        ends = polynomials(values, name, steps + more)
        assert least < ends.min() and ends.max() < most


def test_aol_turns_a_direction_that_holds_nearly_all_of_a_matrix_around():
    """Its first polynomial is negative from 0.884 on: a gradient of rank one would be climbed."""
    values = torch.tensor([0.88, 0.89, 1.0], dtype=torch.float64)
    ends = polynomials(values, "aol", 4)
    assert ends[0] > 0 and (ends[1:] < 0).all()
    for name in set(PROMISES) - {"aol"}:
        assert (polynomials(values, name, PROMISES[name][0]) > 0.6).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_result_has_the_singular_vectors_of_the_input(shape):
    x = matrix(*shape)
    u, _, vh = torch.linalg.svd(x.double(), full_matrices=False)
    polar = u @ vh
    got = newton_schulz(x, 8, "polar_express", "highest").double()
    assert got.shape == x.shape
    assert (got - polar).abs().max() < 0.02


@pytest.mark.parametrize("restart", [0, 1, 2])
@pytest.mark.parametrize("shape", [(16, 64), (40, 16), (24, 24), (3, 8, 40), (3, 40, 8)])
@pytest.mark.parametrize("name", COEFFICIENT_SETS)
def test_gram_form_is_the_plain_form(name, shape, restart):
    x = normalized(matrix(*shape)).double()
    for steps in (1, 2, 3, 5):
        coefficients = get_coefficients(name, steps)
        difference = iterate_gram(x, coefficients, restart) - iterate(x, coefficients)
        assert difference.abs().max() < 1e-10


def test_gram_form_restarts_after_as_many_steps_as_it_is_told():
    x = normalized(matrix(16, 64))
    coefficients = get_coefficients("quintic", 5)
    for after in (1, 2, 4):
        restarted = iterate_gram(iterate_gram(x, coefficients[:after], 0), coefficients[after:], 0)
        assert torch.equal(iterate_gram(x, coefficients, after), restarted)


def test_gram_form_is_reached_by_its_option_and_restarts(monkeypatch):
    x = matrix(16, 64)
    plain = newton_schulz(x, precision="highest")
    gram = newton_schulz(x, precision="highest", use_gram=True)
    assert not torch.equal(plain, gram)
    torch.testing.assert_close(gram, plain, rtol=1e-3, atol=1e-4)
    coefficients = get_coefficients("quintic", 5)
    once = normalized(x)
    assert torch.equal(gram, iterate_gram(once, coefficients, 2))
    assert not torch.equal(gram, iterate_gram(once, coefficients, 0))


@pytest.mark.parametrize("use_gram", [False, True])
@pytest.mark.parametrize("precision", ["medium", "high", "highest"])
@pytest.mark.parametrize("shape", SHAPES)
def test_powers_of_two_leave_no_trace(shape, precision, use_gram):
    x = matrix(*shape)
    expected = newton_schulz(x, precision=precision, use_gram=use_gram)
    for exponent in range(-100, 101, 1 if shape == SHAPES[0] else 7):
        got = newton_schulz(x * 2.0**exponent, precision=precision, use_gram=use_gram)
        assert torch.equal(got, expected), exponent


@pytest.mark.parametrize("shape", [(8, 16), (16, 8), (3, 8, 16)])
@pytest.mark.parametrize("precision", ["medium", "high", "highest"])
@pytest.mark.parametrize("use_gram", [False, True])
def test_zero_stays_zero(shape, precision, use_gram):
    result = newton_schulz(torch.zeros(shape), precision=precision, use_gram=use_gram)
    assert torch.equal(result, torch.zeros_like(result))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("precision", ["medium", "highest"])
def test_nan_and_inf_fill_their_matrix_and_no_other(precision, bad):
    batch = matrix(3, 8, 16)
    batch[2] = 0.0
    clean = newton_schulz(batch, precision=precision)
    batch[1, 2, 3] = bad
    result = newton_schulz(batch, precision=precision)
    assert result[1].isnan().all()
    assert torch.equal(result[0], clean[0]) and torch.equal(result[2], clean[2])


def test_matrices_of_a_batch_have_scales_of_their_own():
    batch = matrix(3, 8, 16)
    expected = newton_schulz(batch)
    scales = torch.tensor([2.0**100, 1.0, 2.0**-100]).view(3, 1, 1)
    assert torch.equal(newton_schulz(batch * scales), expected)


def test_subnormal_and_huge_inputs_are_normalised():
    x = matrix(8, 16)
    for scale in (2.0**-130, 2.0**120):
        assert normalized(x * scale).norm() == pytest.approx(1.0, rel=1e-3)
    for least in (2.0**-149, -(2.0**-149)):
        assert normalized(torch.tensor([[0.0, least]])).abs().max() == 1.0


@pytest.mark.parametrize("x", [torch.full((2048, 2048), 0.7), matrix(1024, 4096)])
def test_norm_of_a_large_matrix_is_exact_to_six_digits(x):
    """Adding millions of squares one after another loses up to a percent."""
    assert float(normalized(x).double().norm()) == pytest.approx(1.0, abs=1e-6)
    assert float(normalized(x.mT).double().norm()) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_medium_is_as_near_as_bf16_and_highest_as_fp32(shape):
    x = matrix(*shape)
    tall = x.size(-2) > x.size(-1)
    start = normalized(x).double()
    exact = iterate(start.mT if tall else start, get_coefficients("quintic", 5))
    exact = exact.mT if tall else exact
    highest = newton_schulz(x, precision="highest")
    medium = newton_schulz(x, precision="medium")
    assert highest.dtype == torch.float32
    assert torch.equal(newton_schulz(x, precision="high"), highest)
    assert (highest.double() - exact).abs().max() < 1e-5
    assert medium.dtype == torch.bfloat16
    assert 1e-4 < (medium.double() - exact).norm() / exact.norm() < 3e-2


def test_input_is_left_alone():
    x = matrix(16, 8)
    before = x.clone()
    newton_schulz(x, precision="highest")
    assert torch.equal(x, before)


@pytest.fixture
def precision_settings():
    """The backends' settings of FP32 products, put back after the test."""
    settings = {"cuda": torch.backends.cuda.matmul, "cpu": torch.backends.mkldnn.matmul}
    before = {device: setting.fp32_precision for device, setting in settings.items()}
    yield settings
    for device, setting in settings.items():
        setting.fp32_precision = before[device]


@pytest.mark.parametrize(
    ("device", "precision", "inside"),
    [
        ("cuda", "medium", "tf32"),
        ("cuda", "high", "tf32"),
        ("cuda", "highest", "ieee"),
        ("cpu", "medium", "tf32"),
        ("cpu", "high", "ieee"),
        ("cpu", "highest", "ieee"),
    ],
)
def test_precision_of_products_is_set_for_a_while(precision_settings, device, precision, inside):
    setting = precision_settings[device]
    setting.fp32_precision = "tf32"
    with module._matmul_precision(precision, torch.device(device)):
        assert setting.fp32_precision == inside
    assert setting.fp32_precision == "tf32"


@pytest.mark.parametrize(
    ("device", "before", "precision"),
    [("cuda", "tf32", "highest"), ("cuda", "ieee", "high"), ("cpu", "bf16", "highest")],
)
def test_precision_of_products_comes_back_after_an_error(
    precision_settings, device, before, precision
):
    setting = precision_settings[device]
    setting.fp32_precision = before
    with (
        pytest.raises(RuntimeError, match="out of memory"),
        module._matmul_precision(precision, torch.device(device)),
    ):
        raise RuntimeError("out of memory")
    assert setting.fp32_precision == before


def test_iteration_runs_under_the_precision_and_leaves_none_behind(precision_settings, monkeypatch):
    setting = precision_settings["cpu"]
    setting.fp32_precision = "bf16"
    seen = []

    def fails(x, coefficients):
        seen.append(setting.fp32_precision)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(module, "iterate", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        newton_schulz(matrix(4, 8), precision="highest")
    assert seen == ["ieee"] and setting.fp32_precision == "bf16"


def test_settings_of_one_backend_alone_are_no_error(precision_settings):
    """``torch.get_float32_matmul_precision`` raises in such a process."""
    precision_settings["cuda"].fp32_precision = "tf32"
    expected = newton_schulz(matrix(4, 8), precision="highest")
    with module._matmul_precision("highest", torch.device("cuda")):
        assert torch.equal(newton_schulz(matrix(4, 8), precision="highest"), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_laws_hold_on_cuda():
    x = matrix(256, 640)
    exact = iterate(normalized(x).double(), get_coefficients("quintic", 5))
    errors = {}
    for precision in ("medium", "high", "highest"):
        expected = newton_schulz(x.cuda(), precision=precision)
        errors[precision] = float((expected.cpu().double() - exact).abs().max())
        for exponent in (-100, -33, 1, 64, 100):
            got = newton_schulz(x.cuda() * 2.0**exponent, precision=precision)
            assert torch.equal(got, expected), (precision, exponent)
        assert not newton_schulz(torch.zeros(8, 16).cuda(), precision=precision).any()
        for bad in (math.nan, math.inf):
            batch = matrix(3, 8, 16).cuda()
            batch[1, 2, 3] = bad
            result = newton_schulz(batch, precision=precision)
            assert result[1].isnan().all() and not result[::2].isnan().any()
    assert errors["highest"] < 1e-5 < errors["high"] < errors["medium"]


def test_scale_factors():
    assert get_muon_scale_factor(64, 16) == 8
    assert get_muon_scale_factor(16, 64, "spectral") == 8
    assert get_muon_scale_factor(64, 16, "unit_rms_norm") == 2
    assert get_muon_scale_factor(16, 64, "unit_rms_norm") == 0.5
    assert get_muon_scale_factor(64, 16, "shape_scaling") == 2
    assert get_muon_scale_factor(16, 64, "shape_scaling") == 1


SETS = "simple, quintic, polar_express, cans, aol, deepseekv4, got 'cubic'"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: newton_schulz(torch.zeros(4)), r"rows, columns.*\(4,\)"),
        (lambda: newton_schulz(torch.zeros(2, 3, 4, 5)), r"\(2, 3, 4, 5\)"),
        (lambda: newton_schulz(torch.zeros(4, 4), 0), "at least 1, got 0"),
        (lambda: newton_schulz(torch.zeros(4, 4), 5, "cubic"), SETS),
        (lambda: newton_schulz(torch.zeros(4, 4), 5, []), "at least one"),
        (
            lambda: newton_schulz(torch.zeros(4, 4), precision="low"),
            "medium, high, highest, got 'low'",
        ),
        (
            lambda: get_muon_scale_factor(1, 1, "rms"),
            "spectral, unit_rms_norm, shape_scaling, got 'rms'",
        ),
    ],
)
def test_bad_options_are_refused_with_the_choices(call, message):
    with pytest.raises(ValueError, match=message):
        call()
