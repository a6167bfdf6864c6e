"""The Triton kernels against the reference, byte by byte: interpreted everywhere, compiled on a GPU.

Run as a script, this file runs its cases interpreted: see :mod:`tests.interpreted`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.core.quantization import format as mx
from megatron.core.quantization.kernels import (
    Storage,
    empty_storage,
    quantize_many,
    quantize_reference,
)
from tests.interpreted import needs_triton, report, run_interpreted

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DIRECTIONS = ((True, True), (True, False), (False, True))
NAN, INF = float("nan"), float("inf")


def random_bits(shape: tuple[int, int], seed: int) -> torch.Tensor:
    """FP32 numbers of every exponent, NaNs, infinities and subnormals among them."""
    bits = torch.randint(-(2**31), 2**31, shape, generator=torch.Generator().manual_seed(seed))
    return bits.to(torch.int32).view(torch.float32)


def spread(shape: tuple[int, int], seed: int, sigma: float = 4.0) -> torch.Tensor:
    """Finite values of exponents that differ within a block, so that some become subnormal."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randn(shape, generator=generator) * sigma
    return torch.randn(shape, generator=generator) * 2.0**exponents


def filled(shape: tuple[int, int], device: str, directions: tuple[bool, bool], is_2d: bool):
    """Storage whose every byte is wrong for most sources, so that what is not written shows."""
    storage = empty_storage(shape, device, *directions, is_2d)
    for tensor in storage.tensors():
        tensor.fill_(0xA5)
    return storage


def assert_equal(
    sources: list[torch.Tensor],
    device: str,
    directions: tuple[tuple[bool, bool], ...] = DIRECTIONS,
    scalings: tuple[bool, ...] = (False, True),
    tile: tuple[int, int, int] | None = None,
) -> None:
    """All sources in all given ways in one call, against the reference."""
    from megatron.core.quantization.triton_kernels import Tile, quantize_many_triton

    jobs = [(s.to(device), d, is_2d) for s in sources for d in directions for is_2d in scalings]
    results = [filled(tuple(s.shape), device, d, is_2d) for s, d, is_2d in jobs]
    quantize_many_triton([s for s, _, _ in jobs], results, Tile(*tile) if tile else None)
    for (source, direction, is_2d), result in zip(jobs, results, strict=True):
        expected = filled(tuple(source.shape), "cpu", direction, is_2d)
        # The CPU is the judge: a GPU's own reference could share what is wrong with the kernel.
        quantize_reference(source.cpu(), expected)
        for name, value in vars(expected).items():
            if isinstance(value, torch.Tensor):
                got = getattr(result, name).cpu()
                where = (got != value).nonzero()
                assert torch.equal(got, value), (
                    f"{name} of {source.dtype} {tuple(source.shape)}, {direction=}, {is_2d=}: "
                    f"{len(where)} bytes differ, first at {where[0].tolist()}: "
                    f"{int(got[tuple(where[0])])}, not {int(value[tuple(where[0])])}"
                )


def many_shapes_in_one_call(device: str) -> None:
    shapes = [(32, 32), (64, 128), (96, 160), (32, 288), (224, 32), (160, 96)]
    assert_equal([spread(s, i).to(DTYPES[i % 3]) for i, s in enumerate(shapes)], device)


def every_tile_gives_the_same_bytes(device: str) -> None:
    for tile in ((32, 64, 1), (32, 256, 4), (128, 64, 4), (64, 64, 8)):
        assert_equal([spread((96, 160), 7)], device, ((True, True),), tile=tile)


def random_bit_patterns(device: str) -> None:
    wild = random_bits((128, 128), 0)
    half = wild.view(torch.int32).to(torch.int16)
    # Most blocks of random bits hold a NaN; one exponent bit less and none does.
    tame = (wild.view(torch.int32) & ~0x40000000).view(torch.float32)
    sources = [wild, tame, half.view(torch.bfloat16), half.view(torch.float16)]
    assert_equal(sources, device, directions=((True, True),))


def every_bf16_value_in_a_block_of_its_own(device: str) -> None:
    """Column ``j`` of a 32-row group is zero but for one value, at a row that varies."""
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    matrix = torch.zeros(64, 32, 1024, dtype=torch.bfloat16)
    matrix.scatter_(1, (torch.arange(65536) % 32).view(64, 1, 1024), values.view(64, 1, 1024))
    columnwise = ((False, True),)
    assert_equal([matrix.view(2048, 1024)], device, columnwise, (False,), tile=(128, 256, 8))


def scales_beside_every_power_of_two(device: str) -> None:
    """Magnitudes around ``448 * 2**k``, where scales step, for every ``k``; and subnormal ones."""
    steps = torch.arange(-3, 5, dtype=torch.int32)
    bits = (torch.arange(255, dtype=torch.int32)[:, None] << 23 | 0x600000) + steps
    edges = torch.cat([bits.flatten(), torch.arange(8), torch.tensor([0x7FFFFF, 0x800000])])
    edges = torch.nn.functional.pad(edges.to(torch.int32), (0, -len(edges) % 32))
    matrix = torch.zeros(32, len(edges))
    matrix[5] = edges.view(torch.float32)
    assert_equal([matrix], device, ((False, True),), (False,), tile=(32, 512, 4))
    assert_equal([matrix.T.contiguous()], device, ((True, False),), (False,), tile=(512, 32, 4))


def elements_at_ties_and_beside_them(device: str) -> None:
    """Each E4M3 value, each midpoint and its neighbours, signs both, at scales small and large."""
    e4m3 = mx.decode_elements(torch.arange(127, dtype=torch.uint8))
    points = torch.cat([e4m3, (e4m3[1:] + e4m3[:-1]) / 2])
    points = torch.cat([points, torch.tensor([2.0**-10, 2.0**-11, 464.0, 1e-30])])
    up, down = torch.tensor(INF), torch.tensor(-INF)
    points = torch.cat([points, torch.nextafter(points, up), torch.nextafter(points, down)])
    points = points.clamp(max=448.0)
    points = torch.cat([points, -points])
    points = torch.nn.functional.pad(points, (0, -len(points) % 31)).view(-1, 31)
    # The largest element of each row fixes its scale to one.
    rows = torch.nn.functional.pad(points, (1, 0), value=448.0)
    rows = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % 32))
    # 2**-127 is the smallest scale: below it elements lose bits as the reference's do.
    sources = [rows * 2.0**k for k in (0, 119, -119, -126, -127, -130, -135)]
    assert_equal(sources, device, ((True, False),), (False,))
    assert_equal([s.T.contiguous() for s in sources], device, ((False, True),), (False,))


def nan_infinity_and_zero(device: str) -> None:
    source = spread((96, 128), 3)
    source[3, 5], source[40, 70], source[41, 71], source[42, 100] = NAN, INF, -INF, -NAN
    source[70, 3], source[70, 4] = INF, NAN
    source[64:96, 96:128] = -0.0
    # Elements of an infinite block are scaled by the subnormal 2**-127, from both ends.
    source[40, 64:70] = torch.tensor([3.4e38, -3.4e38, 1e37, 2.0**118, 2.0**117, 1e-40])
    signalling = torch.tensor([0x7F800001, -0x7FFFFF, -1], dtype=torch.int32).view(torch.float32)
    source[90, :3] = signalling
    assert_equal([source, source.bfloat16(), source.half()], device)
    for value in (0.0, -0.0, INF, -INF, NAN, 2.0**-149, -(2.0**-149), 2.0**-126, 3.4e38):
        assert_equal([torch.full((32, 32), value)], device, ((True, True),))


def subnormal_blocks(device: str) -> None:
    source = spread((64, 128), 5) * 2.0**-126
    assert_equal([source, source * 2.0**-10, source * 2.0**8, source.bfloat16()], device)
    assert_equal([(spread((64, 64), 6) * 2.0**-18).half()], device)


def strided_and_unaligned_sources(device: str) -> None:
    from megatron.core.quantization.triton_kernels import quantize_many_triton

    wide = spread((64, 256), 8).to(device)
    flat = spread((64, 128), 9).flatten().to(device)
    sources = [wide[:, :128], wide[:, 3:67], wide.T, flat[1 : 1 + 64 * 96].view(64, 96)]
    results = [filled(tuple(s.shape), device, (True, True), False) for s in sources]
    quantize_many_triton(sources, results)
    for source, result in zip(sources, results, strict=True):
        expected = filled(tuple(source.shape), "cpu", (True, True), False)
        quantize_reference(source.cpu(), expected)
        pairs = zip(result.tensors(), expected.tensors(), strict=True)
        assert all(torch.equal(got.cpu(), value) for got, value in pairs)


def two_copies_of_2d_data_are_both_written(device: str) -> None:
    from megatron.core.quantization.triton_kernels import quantize_many_triton

    source = spread((64, 64), 10).to(device)
    one, other = (filled((64, 64), device, (True, True), True) for _ in range(2))
    split = Storage(
        one.rowwise_data, one.rowwise_scale, other.rowwise_data, one.columnwise_scale, True
    )
    quantize_many_triton([source], [split])
    expected = mx.quantize_2d(source.cpu())[0]
    assert torch.equal(one.rowwise_data.cpu(), expected)
    assert torch.equal(other.rowwise_data.cpu(), expected)


def tables_are_made_once(device: str) -> None:
    from megatron.core.quantization import triton_kernels

    sources = [spread((64, 64), i).to(device) for i in range(3)]
    results = [filled((64, 64), device, (True, True), False) for _ in sources]
    triton_kernels.quantize_many_triton(sources, results)
    before = triton_kernels._tables.cache_info()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            triton_kernels.quantize_many_triton(sources, results)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    after = triton_kernels._tables.cache_info()
    assert (after.misses, after.hits) == (before.misses, before.hits + 3)
    assert after.maxsize == 64


def what_does_not_fit_is_refused(device: str) -> None:
    from megatron.core.quantization.triton_kernels import quantize_many_triton

    storage = filled((64, 64), device, (True, True), False)
    for source, message in (
        (torch.zeros(64, 64, dtype=torch.float64), "float64"),
        (torch.zeros(64, 33), "multiples of 32"),
        (torch.zeros(64, 96), r"\(64, 96\)"),
    ):
        with pytest.raises(ValueError, match=message):
            quantize_many_triton([source.to(device)], [storage])
    transposed = Storage(
        torch.zeros(64, 32, dtype=torch.uint8).T, storage.rowwise_scale, None, None
    )
    with pytest.raises(ValueError, match="contiguous"):
        quantize_many_triton([torch.zeros(32, 64)], [transposed])
    quantize_many_triton([], [])


CASES: dict[str, Callable[[str], None]] = {
    case.__name__: case
    for case in (
        many_shapes_in_one_call,
        every_tile_gives_the_same_bytes,
        random_bit_patterns,
        every_bf16_value_in_a_block_of_its_own,
        scales_beside_every_power_of_two,
        elements_at_ties_and_beside_them,
        nan_infinity_and_zero,
        subnormal_blocks,
        strided_and_unaligned_sources,
        two_copies_of_2d_data_are_both_written,
        tables_are_made_once,
        what_does_not_fit_is_refused,
    )
}


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    return run_interpreted(__file__)


@needs_triton
@pytest.mark.parametrize("name", CASES)
def test_interpreted(interpreted, name):
    assert not interpreted[name], interpreted[name]


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name):
    CASES[name]("cuda")


@needs_triton
@pytest.mark.gpu
def test_the_door_leads_to_the_kernels_on_a_gpu(monkeypatch):
    from megatron.core.quantization import triton_kernels

    calls = []
    monkeypatch.setattr(triton_kernels, "quantize_many_triton", lambda *args: calls.append(args))
    source = spread((32, 32), 0)
    quantize_many([source.cuda()], [empty_storage((32, 32), "cuda", True, True, False)])
    assert len(calls) == 1
    # A source still on the CPU is the reference's to bring over.
    storage = empty_storage((32, 32), "cuda", True, True, False)
    quantize_many([source], [storage])
    assert len(calls) == 1
    assert torch.equal(storage.rowwise_data.cpu(), mx.quantize_rowwise(source)[0])


def test_quantization_imports_without_triton():
    script = (
        "import sys; sys.modules['triton'] = None; import torch;"
        "from megatron.core.quantization import MXFP8Quantizer;"
        "MXFP8Quantizer().quantize(torch.ones(32, 32))"
    )
    root = Path(__file__).resolve().parents[3]
    environment = os.environ | {"PYTHONPATH": str(root)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=120)


if __name__ == "__main__":
    report(CASES)
