"""A step of Muon on one GPU against its peers, and how well each one orthogonalises.

    python -m benchmarks.muon_step            three tables: dense models, experts, accuracy
    python -m benchmarks.muon_step --tune     times of the symmetric product for tile sizes

Times are medians over CUDA events, all in one run. The floor is the FLOPs of the plain dense iteration at
the BF16 rate of an 8192^3 product. Peers are ``torch.optim.Muon`` and, where it is installed,
Emerging-Optimizers; every side takes 5 steps in 16 bits on the same FP32 weights and gradients.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from importlib.util import find_spec
from itertools import product

import torch

STEPS = 5
ROUNDS = 10
SIMPLE = "simple"
GRAPH = "ours, CUDA graph"

# Llama-3-1B: hidden 2048, 32 heads and 8 key-value heads of 64, MLP 8192 gated.
LLAMA_LAYER = [(2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (16384, 2048), (2048, 8192)]
# Qwen3-30B-A3B: 128 experts a layer, hidden 2048, inner 768, gated.
EXPERT_LAYER = [(1536, 2048), (2048, 768)] * 128


def milliseconds(function: Callable[[], object], rounds: int = ROUNDS) -> float:
    """The median time of a call, on the device."""
    for _ in range(3):
        function()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def matrices(shapes: list[tuple[int, int]]) -> list[torch.nn.Parameter]:
    """FP32 weights with gradients."""
    generator = torch.Generator("cuda").manual_seed(1)
    params = []
    for shape in shapes:
        param = torch.nn.Parameter(torch.randn(shape, device="cuda", generator=generator) * 0.02)
        param.grad = torch.randn(shape, device="cuda", generator=generator)
        params.append(param)
    return params


def peers(params: list[torch.nn.Parameter]) -> dict[str, torch.optim.Optimizer]:
    """The optimizers that are compared."""
    from megatron.core.optimizer.muon import TensorParallelMuon

    found: dict[str, torch.optim.Optimizer] = {
        "torch.optim.Muon": torch.optim.Muon(
            params, lr=1e-3, weight_decay=0.1, momentum=0.95, ns_steps=STEPS
        ),
        "ours": TensorParallelMuon(
            params, lr=1e-3, weight_decay=0.1, momentum=0.95, coefficient_type=SIMPLE
        ),
        GRAPH: TensorParallelMuon(
            params, lr=1e-3, weight_decay=0.1, momentum=0.95, coefficient_type=SIMPLE
        ),
        "ours, quintic": TensorParallelMuon(params, lr=1e-3, weight_decay=0.1, momentum=0.95),
    }
    if find_spec("emerging_optimizers") is not None:
        from emerging_optimizers.orthogonalized_optimizers import Muon

        found["Emerging-Optimizers"] = Muon(
            params, lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=True, num_ns_steps=STEPS
        )
    return found


def dense_flops(shapes: list[tuple[int, int]]) -> float:
    """Of the plain iteration: Gram matrix, its square, and their product with the matrix."""
    total = 0.0
    for shape in shapes:
        n, k = sorted(shape)
        total += STEPS * (4.0 * n * n * k + 2.0 * n**3)
    return total


def bf16_rate() -> float:
    """FLOP/s of a large product."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / (milliseconds(lambda: a @ a) * 1e-3)


def print_times(title: str, shapes: list[tuple[int, int]], rate: float) -> None:
    """One table of step times and memory."""
    from megatron.core.optimizer.step_graph import StepGraph

    params = matrices(shapes)
    numel = sum(p.numel() for p in params)
    largest = max(p.numel() for p in params) * 4
    floor = dense_flops(shapes) / rate * 1e3
    print(f"\n{title}: {len(params)} matrices, {numel / 1e6:.0f} M elements")
    print(f"{'':<22}{'ms':>8}{'/ torch':>9}{'/ floor':>9}{'extra memory / largest matrix':>31}")
    reference = None
    for name, optimizer in peers(params).items():
        try:
            step = optimizer.step if name != GRAPH else StepGraph(optimizer).step
            time = milliseconds(step)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            step()
            torch.cuda.synchronize()
            # A replay works in memory of the graph's, which nothing counts.
            extra = torch.cuda.max_memory_allocated() - before if name != GRAPH else float("nan")
        except (RuntimeError, TypeError) as error:
            print(f"{name:<22}failed: {str(error).splitlines()[0][:80]}")
            continue
        reference = reference or time
        print(
            f"{name:<22}{time:>8.2f}{time / reference:>9.3f}{time / floor:>9.2f}{extra / largest:>31.1f}"
        )
        del step
        optimizer.state.clear()
    print(f"{'floor (dense FLOPs)':<22}{floor:>8.2f}")


def exact(x: torch.Tensor, coefficients: list[tuple[float, float, float]]) -> torch.Tensor:
    """The iteration in FP64."""
    from megatron.core.optimizer.newton_schulz import iterate

    tall = x.size(0) > x.size(1)
    x = (x.mT if tall else x).double()
    result = iterate(x / x.norm(), coefficients)
    return result.mT if tall else result


def ours(x: torch.Tensor, name: str) -> torch.Tensor:
    """The orthogonalised matrix by way of an optimizer step."""
    from megatron.core.optimizer.muon import TensorParallelMuon

    param = torch.nn.Parameter(torch.zeros_like(x))
    param.grad = x
    TensorParallelMuon(
        [param],
        lr=1.0,
        weight_decay=0.0,
        momentum=0.0,
        nesterov=False,
        coefficient_type=name,
        scale_mode="shape_scaling",
    ).step()
    rows, columns = x.shape
    return -param.detach() / max(1.0, rows / columns) ** 0.5


def ill_conditioned(rows: int, columns: int) -> torch.Tensor:
    """Singular values from 1 down to 1e-5, evenly in their logarithms."""
    n = min(rows, columns)
    left = torch.linalg.qr(torch.randn(rows, n, device="cuda"))[0]
    right = torch.linalg.qr(torch.randn(columns, n, device="cuda"))[0]
    return (left * torch.logspace(0, -5, n, device="cuda")) @ right.mT


def print_accuracy() -> None:
    """Distance from the FP64 iteration, and the spread of singular values, ours beside plain BF16."""
    from megatron.core.optimizer.newton_schulz import (
        COEFFICIENT_SETS,
        get_coefficients,
        newton_schulz,
    )

    torch.manual_seed(0)
    inputs = {
        "2048 x 2048": torch.randn(2048, 2048, device="cuda"),
        "3072 x 2048": torch.randn(3072, 2048, device="cuda"),
        "16384 x 2048": torch.randn(16384, 2048, device="cuda"),
        "1536 x 2048": torch.randn(1536, 2048, device="cuda"),
        "512 x 2048": torch.randn(512, 2048, device="cuda"),
        "ill-conditioned": ill_conditioned(2048, 4096),
    }
    print(f"\nAfter {STEPS} steps: relative distance from FP64, least and greatest singular value")
    print(f"{'':<30}{'ours':>10}{'plain BF16':>12}{'ours':>18}{'plain BF16':>18}{'FP64':>18}")
    for label, x in inputs.items():
        for name in COEFFICIENT_SETS:
            wanted = exact(x, get_coefficients(name, STEPS))
            plain = newton_schulz(x, STEPS, name, "medium")
            columns, spreads = [], []
            for found in (ours(x, name), plain, wanted):
                columns.append(float((found.double() - wanted).norm() / wanted.norm()))
                values = torch.linalg.svdvals(found.float())
                spreads.append(f"{float(values.min()):.3f} {float(values.max()):.3f}")
            print(
                f"{label + ', ' + name:<30}{columns[0]:>10.1e}{columns[1]:>12.1e}"
                + "".join(f"{spread:>18}" for spread in spreads),
                flush=True,
            )


def device_time(function: Callable[[], object], calls: int = 30) -> float:
    """Milliseconds of a call without what its launch takes: many follow each other."""

    def many() -> None:
        for _ in range(calls):
            function()

    return milliseconds(many, 3) / calls


def tune() -> None:
    """Times of symmetric products for tile sizes, in TFLOP/s of the full product."""
    from megatron.core.optimizer.symmetric_products import Tiling, symmetric_product

    def matrices_of(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").half()

    cases = {
        "8 x 2048 x 2048": matrices_of(8, 2048, 2048),
        "4 x (16384 x 2048)^T": matrices_of(4, 16384, 2048).mT,
        "24 x 1536 x 2048": matrices_of(24, 1536, 2048),
        "24 x 1536 x 1536": matrices_of(24, 1536, 1536),
        "45 x (2048 x 768)^T": matrices_of(45, 2048, 768).mT,
        "45 x 768 x 768": matrices_of(45, 768, 768),
        "8 x 512 x 2048": matrices_of(8, 512, 2048),
    }
    choices = [
        *product((128,), (1,), (64,), (4, 8), (3, 4)),
        *product((128,), (2,), (64,), (8,), (3, 4)),
        *product((64,), (1, 2), (64,), (4,), (4,)),
    ]
    for name, x in cases.items():
        flops = 2.0 * x.size(0) * x.size(1) ** 2 * x.size(2)
        cublas = flops / device_time(lambda x=x: torch.bmm(x, x.mT)) / 1e9  # type: ignore[misc]
        print(f"{name}: cuBLAS {cublas:.0f}")
        found = []
        for choice in choices:
            tiling = Tiling(*choice)
            try:
                time = device_time(lambda x=x, t=tiling: symmetric_product(x, x, tiling=t))  # type: ignore[misc]
            except Exception as error:
                if "out of resource" not in str(error):
                    print("  ", *choice, str(error).splitlines()[0][:60])
                continue
            found.append((flops / time / 1e9, choice))
        for rate, choice in sorted(found, reverse=True)[:4]:
            print(f"  {rate:>6.0f}  " + " ".join(str(value) for value in choice))


def main() -> int:
    """Prints the tables; returns the exit code."""
    if not torch.cuda.is_available():
        print("muon_step measures on a CUDA device, and there is none", file=sys.stderr)
        return 1
    if "--tune" in sys.argv[1:]:
        tune()
        return 0
    rate = bf16_rate()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, BF16 {rate / 1e12:.0f} TFLOP/s"
    )
    print_times("Llama-3-1B shapes, 4 layers", LLAMA_LAYER * 4, rate)
    print_times("Qwen3-30B-A3B experts, 1 layer", EXPERT_LAYER, rate)
    print_accuracy()
    return 0


if __name__ == "__main__":
    sys.exit(main())
