"""The reference format against an independent reading of the specification, corner by corner."""

import math
import struct

import pytest
import torch

from megatron.core.quantization import format as mx

NAN, INF = float("nan"), float("inf")


def all_bf16() -> torch.Tensor:
    """Every BF16 value, NaNs and infinities included, as FP32 ``[65536]``."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()


def e4m3_values() -> list[float]:
    """Value of each byte, by the definition: sign, 4 exponent bits of bias 7, 3 mantissa bits."""
    values = []
    for byte in range(256):
        sign = -1.0 if byte & 0x80 else 1.0
        exponent, mantissa = byte >> 3 & 0xF, byte & 7
        if exponent == 0xF and mantissa == 7:
            values.append(NAN)
        elif exponent == 0:
            values.append(sign * mantissa / 8 * 2.0**-6)
        else:
            values.append(sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return values


def nearest_e4m3(x: float) -> int:
    """Byte of the nearest E4M3 value, ties to the even mantissa, saturating; by search."""
    values = e4m3_values()
    candidates = [b for b in range(0x7F)]
    magnitude = min(abs(x), 448.0)
    best = min(candidates, key=lambda b: (abs(values[b] - magnitude), b & 1))
    return best | (0x80 if math.copysign(1.0, x) < 0 else 0)


def scale_byte(amax: float) -> int:
    """E8M0 byte for a block's largest magnitude, from the bits of amax * float32(1/448)."""
    if math.isnan(amax):
        return 255
    if math.isinf(amax):
        return 254
    product = torch.tensor(amax, dtype=torch.float32) * torch.tensor(1 / 448, dtype=torch.float32)
    bits = struct.unpack("<I", struct.pack("<f", float(product)))[0]
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    if exponent == 254:
        return 254
    if exponent == 0:
        return 1 if mantissa > 0x400000 else 0
    return exponent + (1 if mantissa else 0)


def test_decoding_is_the_definition():
    decoded = mx.decode_elements(torch.arange(256, dtype=torch.uint8))
    for byte, value in enumerate(e4m3_values()):
        got = float(decoded[byte])
        assert math.isnan(got) if math.isnan(value) else got == value


def test_encoding_rounds_to_nearest_even_and_saturates():
    values = torch.tensor([v for v in e4m3_values() if not math.isnan(v)])
    between = torch.cat([(values[:-1] + values[1:]) / 2, values, values * 1.03, values * 0.97])
    cases = torch.cat(
        [between, torch.tensor([449.0, 464.0, 480.0, 1e30, -1e30, INF, -INF, -0.0, 1e-9])]
    )
    encoded = mx.encode_elements(cases)
    expected = [nearest_e4m3(float(x)) for x in cases]
    assert encoded.tolist() == expected
    assert mx.encode_elements(torch.tensor([NAN, -NAN])).tolist() == [0x7F, 0x7F]


def test_scales_of_every_bf16_magnitude():
    amax = all_bf16().abs()
    got = mx.scales_from_amax(amax).tolist()
    assert got == [scale_byte(float(x)) for x in amax]


@pytest.mark.parametrize(
    ("amax", "byte"),
    [
        (0.0, 0),
        (448.0, 127),
        (math.nextafter(448.0, 500), 127),  # rounds to 448 in FP32
        (448.0001, 128),
        (2.0**-127 * 448, 0),
        (2.0**-126 * 448, 1),
        (2.0**-149, 0),
        (INF, 254),
        (NAN, 255),
        (3.4e38, 247),
    ],
)
def test_scale_corners(amax, byte):
    assert int(mx.scales_from_amax(torch.tensor([amax]))[0]) == byte


def test_scale_values_are_powers_of_two_and_nan():
    scales = torch.arange(256, dtype=torch.uint8)
    values = mx.scale_values(scales).double()
    assert torch.equal(values[:255], 2.0 ** (torch.arange(255).double() - 127))
    assert values[255].isnan()
    inverse = mx.inverse_scale_values(scales).double()
    assert torch.equal(inverse[:255], 2.0 ** (127 - torch.arange(255).double()))
    assert inverse[255].isnan()


def block_with(value: float, other: float = 0.0) -> torch.Tensor:
    source = torch.full((32, 32), other)
    source[0, 0] = value
    return source


def test_a_nan_block_is_nan_and_its_neighbours_are_not():
    source = torch.ones(32, 64)
    source[3, 5] = NAN
    data, scales = mx.quantize_rowwise(source)
    values = mx.dequantize_rowwise(data, scales, torch.float32)
    assert scales[3, 0] == 255 and values[3, :32].isnan().all()
    assert not values[3, 32:].isnan().any() and not values[4].isnan().any()


def test_an_infinity_saturates_and_the_rest_of_its_block_vanishes():
    data, scales = mx.quantize_rowwise(block_with(-INF, 1.0))
    assert scales[0, 0] == 254 and data[0].tolist() == [0xFE] + [0] * 31


def test_a_zero_block_is_zero_with_scale_zero_and_keeps_signs():
    data, scales = mx.quantize_rowwise(torch.full((32, 32), -0.0))
    assert (scales == 0).all() and (data == 0x80).all()


def reference_rowwise(source: torch.Tensor) -> tuple[list[list[int]], list[list[int]]]:
    """Element by element, from the definitions above."""
    data, scales = [], []
    for row in source.float().tolist():
        row_data, row_scales = [], []
        for start in range(0, len(row), 32):
            block = row[start : start + 32]
            byte = scale_byte(NAN if any(map(math.isnan, block)) else max(map(abs, block)))
            row_scales.append(byte)
            for x in block:
                scaled = float(torch.tensor(x) * torch.tensor(2.0 ** (127 - byte)))
                row_data.append(nearest_e4m3(scaled))
        data.append(row_data)
        scales.append(row_scales)
    return data, scales


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("spread", [0.0, 6.0])
def test_matrices_quantise_as_the_specification_says(dtype, spread):
    generator = torch.Generator().manual_seed(3)
    exponents = torch.randn(32, 64, generator=generator) * spread
    source = (torch.randn(32, 64, generator=generator) * 2.0**exponents).to(dtype)
    source = source.clamp(-6e4, 6e4)
    data, scales = mx.quantize_rowwise(source)
    assert (data.tolist(), scales.tolist()) == reference_rowwise(source)
    column_data, column_scales = mx.quantize_columnwise(source.T.contiguous())
    assert torch.equal(column_data, data.T) and torch.equal(column_scales, scales.T)


def test_2d_scaling_has_one_scale_a_block_and_one_copy_for_both_directions():
    source = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    data, rows, columns = mx.quantize_2d(source)
    by_block = rows.view(2, 32, 3)
    assert (by_block == by_block[:, :1]).all()
    assert torch.equal(rows[::32].repeat_interleave(32, 1)[:, : columns.size(1)], columns)
    row_values = mx.dequantize_rowwise(data, rows, torch.float32)
    assert torch.equal(row_values, mx.dequantize_columnwise(data, columns, torch.float32))
    expected = [
        [scale_byte(float(b.abs().max())) for b in r.split(32, 1)] for r in source.split(32, 0)
    ]
    assert rows[::32].tolist() == expected


def test_dequantised_values_are_exact_in_bf16():
    source = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)) * 5
    data, scales = mx.quantize_rowwise(source)
    exact = mx.dequantize_rowwise(data, scales, torch.float32)
    assert torch.equal(mx.dequantize_rowwise(data, scales, torch.bfloat16).float(), exact)


def test_quantising_again_changes_nothing():
    """A value that travels in BF16 after quantisation gives the same bytes."""
    source = torch.randn(64, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    data, scales = mx.quantize_rowwise(source)
    again = mx.quantize_rowwise(mx.dequantize_rowwise(data, scales, torch.bfloat16))
    first_values = mx.dequantize_rowwise(data, scales, torch.float32)
    assert torch.equal(mx.dequantize_rowwise(*again, torch.float32), first_values)


@pytest.mark.parametrize("shape", [(31, 32), (32, 33), (32,), (2, 32, 32)])
def test_other_shapes_are_refused(shape):
    with pytest.raises(ValueError, match=r"multiples of 32.*\(" + str(shape[0])):
        mx.check_divisible(shape)


def test_scales_pad_to_transformer_engines_sizes():
    rows = mx.padded_scales(torch.ones(130, 5, dtype=torch.uint8), rowwise=True)
    columns = mx.padded_scales(torch.ones(5, 130, dtype=torch.uint8), rowwise=False)
    assert rows.shape == (256, 8) and columns.shape == (8, 256)
    assert rows[:130, :5].all() and rows.sum() == 650 and columns.sum() == 650


def test_equal_to_torchao_where_it_has_the_same_mode():
    torchao = pytest.importorskip(
        "torchao.prototype.mx_formats.mx_tensor", reason="torchao (RCEIL mode) is not installed"
    )
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    generator = torch.Generator().manual_seed(4)
    source = torch.randn(64, 128, generator=generator) * 2.0 ** torch.randint(
        -20, 20, (64, 1), generator=generator
    )
    scale, data = torchao.to_mx(
        source.bfloat16(), torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL
    )
    ours, our_scale = mx.quantize_rowwise(source.bfloat16())
    assert torch.equal(our_scale, scale.view(torch.uint8).view(our_scale.shape))
    assert torch.equal(ours, data.view(torch.uint8).view(ours.shape))
