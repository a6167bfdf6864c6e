"""What installing MXFP8 weights costs on a GPU, against the time in which its bytes can be moved.

    python benchmarks/mxfp8_install.py [--layers N] [--repeats N] [--sweep]

After a parameter gather each rank quantises BF16 weights into its MXFP8 parameters; before it, owners
cast FP32 masters to the BF16 transport. Both only move bytes, so the floor is bytes read and written
over the rate of a large copy, measured in the same run. Shapes are those of Llama-3-1B. ``--sweep``
times the kernel with other tile sizes too.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

if __name__ == "__main__":
    # Run as a file, without the project being installed.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core.fp8_utils import copy_tensors_to_quantized_params
from megatron.core.quantization import MXFP8Quantizer, MXFP8Tensor, Storage
from megatron.core.quantization import format as reference
from megatron.core.quantization.casts import cast_many
from megatron.core.quantization.kernels import quantize_reference

LAYER = {
    "qkv": (3072, 2048),
    "proj": (2048, 2048),
    "fc1 (gate and up)": (16384, 2048),
    "fc2": (2048, 8192),
}
WARMUP = 5
COPY_BYTES = 2**30
TILES = [
    (rows, columns, warps)
    for rows, columns in (
        (32, 128),
        (32, 256),
        (32, 512),
        (64, 64),
        (64, 128),
        (64, 256),
        (128, 64),
    )
    for warps in (2, 4, 8)
]


class Times(NamedTuple):
    """Milliseconds of one call: on the device, and until the host is free again."""

    device: float
    host: float


def measure(call: Callable[[], object], repeats: int) -> Times:
    """Medians over calls in a row, so that a host slower than the device shows in both."""
    for _ in range(WARMUP):
        call()
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    host = []
    events[0].record()
    for event in events[1:]:
        started = time.perf_counter()
        call()
        host.append((time.perf_counter() - started) * 1000)
        event.record()
    torch.cuda.synchronize()
    device = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return Times(statistics.median(device), statistics.median(host))


def copy_rate(repeats: int) -> float:
    """Bytes a millisecond, read and written, of a large copy."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / measure(lambda: target.copy_(source), repeats).device


def print_row(name: str, times: Times, moved: int, rate: float) -> None:
    """One line of the table; ``moved`` is in bytes, ``rate`` in bytes a millisecond."""
    floor = moved / rate
    print(
        f"{name:44}{times.device:11.3f}{times.host:10.3f}{floor:10.3f}{times.device / floor:9.2f}",
        flush=True,
    )


def installed_bytes(params: list[MXFP8Tensor], sources: list[torch.Tensor]) -> int:
    """Bytes that have to move: each source read once, each stored byte written once."""
    tensors = [*sources, *(t for param in params for t in param.storage_bytes.tensors())]
    return sum(t.numel() * t.element_size() for t in tensors)


def compiled_reference() -> Callable[[torch.Tensor, Storage], None]:
    """The reference for both directions through ``torch.compile``, writing where the kernel writes."""

    @torch.compile(dynamic=False)
    def write(
        source: torch.Tensor,
        row_data: torch.Tensor,
        row_scale: torch.Tensor,
        column_data: torch.Tensor,
        column_scale: torch.Tensor,
    ) -> None:
        data, scale = reference.quantize_rowwise(source)
        row_data.copy_(data)
        row_scale.copy_(scale)
        data, scale = reference.quantize_columnwise(source)
        column_data.copy_(data)
        column_scale.copy_(scale)

    def quantize(source: torch.Tensor, storage: Storage) -> None:
        write(source, *storage.tensors())

    return quantize


def report_install(sources: list[torch.Tensor], rate: float, repeats: int) -> None:
    """Rows for every way of quantising the sources, and whether their bytes agree."""

    def make(is_2d: bool) -> list[MXFP8Tensor]:
        quantizer = MXFP8Quantizer(with_2d_quantization=is_2d)
        return [quantizer.make_empty(source.shape, "cuda") for source in sources]

    def one_by_one(
        quantize: Callable[[torch.Tensor, Storage], None], params: list[MXFP8Tensor]
    ) -> None:
        for source, param in zip(sources, params, strict=True):
            quantize(source, param.storage_bytes)

    ours, plain, square = make(False), make(False), make(True)
    moved = installed_bytes(ours, sources)
    times = measure(lambda: copy_tensors_to_quantized_params(ours, sources), repeats)
    print_row("install, kernel", times, moved, rate)
    times = measure(lambda: copy_tensors_to_quantized_params(square, sources), repeats)
    print_row("install, kernel, 2-D scaling", times, installed_bytes(square, sources), rate)
    times = measure(lambda: one_by_one(quantize_reference, plain), max(repeats // 4, 3))
    print_row("install, reference in plain PyTorch", times, moved, rate)

    def agree(others: list[MXFP8Tensor]) -> bool:
        return all(a.has_same_bytes(b) for a, b in zip(others, plain, strict=True))

    kernel_agrees = agree(ours)
    compiled = compiled_reference()
    times = measure(lambda: one_by_one(compiled, ours), repeats)
    print_row("install, reference in torch.compile", times, moved, rate)
    print(f"bytes equal to the reference's: kernel {kernel_agrees}, torch.compile {agree(ours)}")


def report_staging(shapes: list[tuple[int, int]], rate: float, repeats: int) -> None:
    """The row for FP32 masters cast into one BF16 transport."""
    masters = [torch.randn(shape, device="cuda") for shape in shapes]
    sizes = [master.numel() for master in masters]
    transport = torch.empty(sum(sizes), dtype=torch.bfloat16, device="cuda")
    slots = [slot.view(s) for slot, s in zip(transport.split(sizes), shapes, strict=True)]
    times = measure(lambda: torch._foreach_copy_(slots, masters), repeats)
    print_row("staging, torch._foreach_copy_ FP32 to BF16", times, 6 * sum(sizes), rate)
    wanted = transport.clone()
    times = measure(lambda: cast_many(slots, masters), repeats)
    print_row("staging, kernel", times, 6 * sum(sizes), rate)
    print(f"bits equal to torch's: {torch.equal(transport, wanted)}")


def report_tiles(sources: list[torch.Tensor], rate: float, repeats: int) -> None:
    """Rows for the kernel with other tile sizes."""
    from megatron.core.quantization.triton_kernels import DEFAULT_TILE, Tile, quantize_many_triton

    params = [MXFP8Quantizer().make_empty(source.shape, "cuda") for source in sources]
    storages = [param.storage_bytes for param in params]
    moved = installed_bytes(params, sources)
    print(f"\ntiles; the kernel uses {tuple(DEFAULT_TILE)}")
    for tile in TILES:
        times = measure(
            functools.partial(quantize_many_triton, sources, storages, Tile(*tile)), repeats
        )
        print_row(f"rows {tile[0]}, columns {tile[1]}, warps {tile[2]}", times, moved, rate)


def main() -> int:
    """Prints the table; returns 1 where there is no CUDA device."""
    parser = argparse.ArgumentParser(description="Measures the installation of MXFP8 weights.")
    parser.add_argument("--layers", type=int, default=4, help="layers of Llama-3-1B shapes")
    parser.add_argument("--repeats", type=int, default=20, help="calls measured of each kind")
    parser.add_argument("--sweep", action="store_true", help="time other tile sizes too")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA device, and torch.cuda.is_available() is False.")
        return 1
    torch.manual_seed(0)
    shapes = list(LAYER.values()) * options.layers
    sources = [torch.randn(s, device="cuda").mul_(0.02).bfloat16() for s in shapes]
    elements = sum(source.numel() for source in sources)
    rate = copy_rate(options.repeats)
    capability = torch.cuda.get_device_capability()
    print(
        f"{torch.cuda.get_device_name()}, compute capability {capability[0]}.{capability[1]}, torch "
        f"{torch.__version__}; {len(shapes)} matrices, {elements / 1e6:.1f} M elements; copy rate "
        f"{rate / 1e6:.0f} GB/s read and written"
    )
    if capability < (10, 0):
        print(
            "This GPU has no MXFP8 tensor cores (they come with compute capability 10.0; Hopper is "
            "9.0), so of MXFP8 only quantisation runs on it."
        )
    print(f"{'':44}{'device, ms':>11}{'host, ms':>10}{'floor, ms':>10}{'ratio':>9}")
    report_staging(shapes, rate, options.repeats)
    report_install(sources, rate, options.repeats)
    if options.sweep:
        report_tiles(sources, rate, options.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
