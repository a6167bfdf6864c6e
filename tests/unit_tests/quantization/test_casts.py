"""Casts of many tensors at once have torch's bits: interpreted everywhere, compiled on a GPU.

Run as a script, this file runs its cases interpreted: see :mod:`tests.interpreted`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron.core.quantization.casts import cast_many
from tests.interpreted import needs_triton, report, run_interpreted

SIZES = [1, 3, 4095, 4096, 4097, 3 * 4096 + 5, 0, 64]


def bits(numel: int, seed: int, device: str) -> torch.Tensor:
    """FP32 numbers of every exponent; where Triton interprets, only those that BF16 has too."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(-(2**31), 2**31, (numel,), generator=generator).to(torch.int32)
    if device == "cpu":
        # The interpreter's cast cuts digits off and loses subnormal numbers.
        found &= ~0xFFFF
        found[(found & 0x7F800000) == 0] = 0
    return found.view(torch.float32)


def beside_ties() -> torch.Tensor:
    """Numbers half-way between two BF16 numbers, and their neighbours."""
    upper = torch.arange(0x3F00, 0x4100, dtype=torch.int32) << 16
    return torch.cat([upper + 0x7FFF, upper + 0x8000, upper + 0x8001]).view(torch.float32)


def assert_cast(sources: list[torch.Tensor], device: str) -> None:
    from megatron.core.quantization.triton_casts import cast_fp32_to_bf16

    sources = [source.to(device) for source in sources]
    # One after the other in one memory, so that a write too far shows.
    memory = torch.full((sum(s.numel() for s in sources) + 1,), 7.0, device=device).bfloat16()
    slots = list(memory[:-1].split([s.numel() for s in sources]))
    cast_fp32_to_bf16(slots, sources)
    for slot, source in zip(slots, sources, strict=True):
        expected = source.cpu().bfloat16()
        same = slot.cpu().view(torch.int16) == expected.view(torch.int16)
        assert (same | (slot.cpu().isnan() & expected.isnan())).all()
    assert memory[-1] == 7


def every_size_is_cast_whole(device: str) -> None:
    assert_cast([bits(numel, seed, device) for seed, numel in enumerate(SIZES)], device)
    assert_cast([bits(4096 * 4, 1, device), bits(64, 2, device)], device)


def parts_that_begin_anywhere_are_cast(device: str) -> None:
    whole = bits(10_000, 3, device)
    assert_cast([whole[1:5000], whole[5003:]], device)


def other_numbers_of_elements_are_refused(device: str) -> None:
    from megatron.core.quantization.triton_casts import cast_fp32_to_bf16

    slot = torch.zeros(4, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="cannot cast 5 elements into 4"):
        cast_fp32_to_bf16([slot], [torch.zeros(5, device=device)])


CASES: dict[str, Callable[[str], None]] = {
    case.__name__: case
    for case in (
        every_size_is_cast_whole,
        parts_that_begin_anywhere_are_cast,
        other_numbers_of_elements_are_refused,
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
def test_ties_go_to_even():
    assert_cast([beside_ties(), -beside_ties()], "cuda")


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], ids=["cpu", "cuda"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_door_takes_any_dtype_and_layout(dtype, device):
    sources = [torch.randn(5, 7, device=device), torch.randn(8, 3, device=device).mT]
    destinations = [torch.zeros(n, dtype=dtype, device=device) for n in (35, 24)]
    cast_many(destinations, sources)
    cast_many([], [])
    for destination, source in zip(destinations, sources, strict=True):
        assert torch.equal(destination, source.flatten().to(dtype))


if __name__ == "__main__":
    report(CASES)
