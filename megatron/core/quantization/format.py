"""The MXFP8 format on plain tensors, exact to the bit: blocks of 32, E8M0 scales, E4M3 elements.

OCP Microscaling Formats (MX) Specification v1.0; scales are rounded up as Transformer Engine does it.
Everything here is the reference that faster kernels must equal.
"""

from __future__ import annotations

import torch

BLOCK = 32
E4M3_MAX = 448.0
SCALE_NAN = 255
SCALE_MAX = 254
ELEMENT_NAN = 0x7F

# Half of the smallest normal FP32 number, 2**-127: what exponent byte 0 stands for.
_TWO_TO_MINUS_127 = 0x00400000
_NAN_BITS = 0x7FC00000


def check_divisible(shape: torch.Size | tuple[int, ...]) -> None:
    """Raises :class:`ValueError` unless ``shape`` is a matrix whose sides are multiples of 32."""
    if len(shape) != 2 or shape[0] % BLOCK or shape[1] % BLOCK:
        raise ValueError(
            f"MXFP8 needs a matrix with both sides multiples of {BLOCK}, got shape {tuple(shape)}"
        )


def scale_values(scales: torch.Tensor) -> torch.Tensor:
    """FP32 values ``2**(e - 127)`` of E8M0 bytes; NaN for 255."""
    exponents = scales.to(torch.int32)
    bits = torch.where(exponents == 0, _TWO_TO_MINUS_127, exponents << 23)
    bits = torch.where(exponents == SCALE_NAN, _NAN_BITS, bits)
    return bits.view(torch.float32)


def inverse_scale_values(scales: torch.Tensor) -> torch.Tensor:
    """FP32 values ``2**(127 - e)`` of E8M0 bytes; NaN for 255."""
    inverse = SCALE_MAX - scales.to(torch.int32)
    return scale_values(torch.where(inverse < 0, SCALE_NAN, inverse))


def scales_from_amax(amax: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes for blocks whose largest magnitude is ``amax`` (FP32): amax / 448, rounded up.

    NaN gives 255 and Inf 254; zero gives 0.
    """
    bits = (amax * torch.tensor(1.0 / E4M3_MAX, dtype=torch.float32)).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # The scale 2**-127 is a subnormal number: what is below half of it above it rounds down to it.
    round_up = torch.where(exponent == 0, mantissa > _TWO_TO_MINUS_127, mantissa > 0)
    scales = (exponent + round_up).clamp(max=SCALE_MAX)
    return torch.where(amax.isnan(), SCALE_NAN, scales).to(torch.uint8)


def encode_elements(scaled: torch.Tensor) -> torch.Tensor:
    """E4M3 bytes of FP32 values: nearest, ties to even, at most 448; any NaN becomes 0x7F."""
    # The cast itself would turn what is beyond 448 into NaN.
    data = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(scaled.isnan(), ELEMENT_NAN, data)


def decode_elements(data: torch.Tensor) -> torch.Tensor:
    """FP32 values of E4M3 bytes."""
    return data.view(torch.float8_e4m3fn).float()


def quantize_rowwise(source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks along the last dimension: data ``[M, K]`` and scales ``[M, K/32]``, both uint8."""
    rows, columns = source.shape
    blocks = source.float().reshape(rows, columns // BLOCK, BLOCK)
    scales = scales_from_amax(blocks.abs().amax(dim=2))
    data = encode_elements(blocks * inverse_scale_values(scales).unsqueeze(2))
    return data.reshape(rows, columns), scales


def quantize_columnwise(source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks along the first dimension: data ``[M, K]`` and scales ``[M/32, K]``, both uint8."""
    rows, columns = source.shape
    blocks = source.float().reshape(rows // BLOCK, BLOCK, columns)
    scales = scales_from_amax(blocks.abs().amax(dim=1))
    data = encode_elements(blocks * inverse_scale_values(scales).unsqueeze(1))
    return data.reshape(rows, columns), scales


def quantize_2d(source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One scale for each 32 x 32 block: data ``[M, K]``, its rowwise and its columnwise scales.

    The data serves both directions, since each block's rows and columns share the scale.
    """
    rows, columns = source.shape
    blocks = source.float().reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scales = scales_from_amax(blocks.abs().amax(dim=(1, 3)))
    factors = inverse_scale_values(scales)[:, None, :, None]
    data = encode_elements(blocks * factors).reshape(rows, columns)
    return data, scales.repeat_interleave(BLOCK, dim=0), scales.repeat_interleave(BLOCK, dim=1)


def dequantize_rowwise(
    data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Values of a rowwise copy in ``dtype``; exact in BF16 and FP32 within their exponent range."""
    rows, columns = data.shape
    blocks = decode_elements(data).view(rows, columns // BLOCK, BLOCK)
    return (blocks * scale_values(scales).unsqueeze(2)).view(rows, columns).to(dtype)


def dequantize_columnwise(
    data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Values of a columnwise copy in ``dtype``; exact in BF16 and FP32 within their exponent range."""
    rows, columns = data.shape
    blocks = decode_elements(data).view(rows // BLOCK, BLOCK, columns)
    return (blocks * scale_values(scales).unsqueeze(1)).view(rows, columns).to(dtype)


def padded_scales(scales: torch.Tensor, rowwise: bool) -> torch.Tensor:
    """Scales zero-padded to the multiples in which Transformer Engine stores them.

    Rowwise ``[M, K/32]`` to multiples of ``[128, 4]``, columnwise ``[M/32, K]`` to ``[4, 128]``.
    """
    sides = (128, 4) if rowwise else (4, 128)
    missing = [-size % side for size, side in zip(scales.shape, sides, strict=True)]
    return torch.nn.functional.pad(scales, (0, missing[1], 0, missing[0]))
