"""Several GPUs of one host: laws bit for bit, then time, communication and memory of a step.

    torchrun --nproc-per-node 4 -m benchmarks.nccl_scaling [--raw FILE] [--steps N] [--small]
        [--distributed-backend nccl|gloo]

Laws, for every way to share out the ranks, precision and layout, on a small model: L1 (weights stored in
MXFP8 change no bit), L2 (an audit after every step: each rank holds what the owners computed), L8 (every
rank computed one layout: a job does not start otherwise), L9 (overlap changes no bit).

Speed, on a larger model: a step with overlap on and off, the share of it in which NCCL runs and nothing
else does (from a profiler's trace), bytes a second of gathers and reductions against NCCL's own
collectives over the same bytes, a plain loop (DDP, autocast, ``torch.optim.Muon``) and memory held
between steps against the layout's prediction. MXFP8 products are emulated on GPUs before Blackwell, so
there its step times say nothing about Blackwell. ``--small`` is for trying the script out.

Tables come last; ``--raw`` also writes all numbers as JSON. The exit code is 1 if a law does not hold.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.profiler import ProfilerActivity, profile

import pretrain_gpt
from benchmarks.trace import device_intervals, exposed, length
from benchmarks.train_step import PlainLoop
from megatron.core import parallel_state
from megatron.core.collectives import all_gather_into_tensor, reduce_scatter_tensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.quantization import MXFP8Tensor
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.failure import one_error_per_job
from megatron.training.initialize import initialize_megatron
from megatron.training.training import (
    disable_forward_pre_hook,
    enable_forward_pre_hook,
    setup_model_and_optimizer,
    train_step,
)
from tests.functional_tests.jobs import jobs_here

LAYOUTS = ("padded", "legacy")
PRECISIONS = {
    "BF16": (),
    "MXFP8": ("--fp8-format", "e4m3", "--fp8-param-gather", "--reuse-grad-buf-for-mxfp8-param-ag"),
}
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
AUDIT = ("--check-param-sync-interval", "1")
MUON = (
    *("--optimizer", "muon", "--use-distributed-optimizer", "--bf16", "--mock-data"),
    *("--lr", "1e-3", "--clip-grad", "1.0", "--log-interval", "1000"),
)
TINY = (
    *("--num-layers", "2", "--hidden-size", "256", "--num-attention-heads", "4"),
    *("--seq-length", "64", "--max-position-embeddings", "64", "--micro-batch-size", "1"),
    *("--global-batch-size", "8", "--train-iters", "5"),
)
# Llama-3-1B, with 8 of its 16 layers.
LARGE = (
    *("--num-layers", "8", "--hidden-size", "2048", "--num-attention-heads", "32"),
    *(
        "--group-query-attention",
        "--num-query-groups",
        "8",
        "--ffn-hidden-size",
        "8192",
        "--swiglu",
    ),
    *("--normalization", "RMSNorm", "--disable-bias-linear", "--position-embedding-type", "rope"),
    *("--seq-length", "2048", "--max-position-embeddings", "2048", "--micro-batch-size", "2"),
    *("--train-iters", "1000", "--no-check-for-nan-in-loss-and-grad", "--vocab-size", "32000"),
    *("--tokenizer-type", "NullTokenizer"),
)


def ways(ranks: int) -> dict[str, tuple[str, ...]]:
    """Flags of each way to share out the ranks."""
    found = {f"DP {ranks}": (1, 1)}
    if ranks % 2 == 0:
        found |= {f"DP {ranks // 2} x GTP 2": (1, 2), f"TP 2 x GTP {ranks // 2}": (2, ranks // 2)}
    return {
        name: (
            *("--tensor-model-parallel-size", str(tp)),
            *("--tensor-parallel-num-weight-shards", str(tp * gtp)),
            *(("--sequence-parallel",) if tp > 1 else ()),
        )
        for name, (tp, gtp) in found.items()
    }


def laws(way: tuple[str, ...], precision: str, layout: str) -> dict[str, bool]:
    """Which laws hold; rank 0's answer. A failed audit or start-up comparison is raised instead."""
    job = [*MUON, *TINY, *way, "--layer-wise-param-layout", layout, "--ddp-bucket-size", "100000"]
    stored = [*job, *PRECISIONS[precision]]
    runs = [[*stored, *AUDIT], [*stored, *OVERLAP]]
    if precision == "MXFP8":
        runs.append([*job, "--fp8-format", "e4m3"])
    plain, overlapped, *off = jobs_here(runs)
    found = {"L2": True, "L8": True, "L9": plain == overlapped}
    return found | ({"L1": off[0] == plain} if off else {})


class Job:
    """A job that can be stepped: hooks go on after the first update, as in the training loop."""

    def __init__(self, flags: list[str]) -> None:
        self.args = args = parse_and_validate_args(argv=flags)
        initialize_megatron(args)
        self.data = pretrain_gpt.data_iterators_provider(args).train
        gc.collect()
        before = allocated()
        self.model: Sequence[Any]
        self.model, self.optimizer, self.scheduler = setup_model_and_optimizer(
            args, pretrain_gpt.model_provider
        )
        if args.overlap_param_gather:
            disable_forward_pre_hook(self.model, param_sync=False)
        self.step()
        if args.overlap_param_gather:
            enable_forward_pre_hook(self.model)
        self.step()
        gc.collect()
        self.held = allocated() - before

    def step(self) -> None:
        """One iteration."""
        train_step(
            self.args,
            pretrain_gpt.forward_step,
            self.data,
            self.model,
            self.optimizer,
            self.scheduler,
        )

    def predicted(self) -> int:
        """Bytes of weights, gradients, masters, optimizer state and gathered GTP weights on this rank."""
        (chunk,) = self.model
        total = 0
        for buffer in chunk.all_buffers:
            for bucket in buffer.buckets:
                total += bucket.grad_data.nbytes
                params = bucket.params_list
                quantized = [param for param in params if isinstance(param, MXFP8Tensor)]
                if not quantized:
                    total += sum(bucket.grad_data.numel() * p.element_size() for p in params[:1])
                for param in quantized:
                    total += sum(piece.nbytes for piece in param.storage_bytes.tensors())
                owned = sum(shard.end - shard.start for shard in bucket.param_shards())
                # A master and one momentum, or a master and two moments, in FP32.
                total += owned * (8 if bucket.is_managed_by_layer_wise_optimizer else 12)
        chain = getattr(chunk.module, "gtp_chain", None)
        return total + (chain.memory.held_bytes if chain is not None else 0)

    def close(self) -> None:
        """Finishes gathers that are under way and lets go of everything."""
        if self.args.overlap_param_gather:
            disable_forward_pre_hook(self.model, param_sync=True)
        self.__dict__.clear()
        gc.collect()
        torch.use_deterministic_algorithms(False)
        parallel_state.destroy_model_parallel()


def allocated() -> int:
    """Bytes of tensors on the GPU; 0 on CPUs, where torch does not count."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def synchronize() -> None:
    """Waits for the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def milliseconds(function: Callable[[], object], rounds: int) -> float:
    """The median time of a call, of the slowest rank."""
    times = []
    for _ in range(rounds + 1):
        dist.barrier()
        synchronize()
        started = time.perf_counter()
        function()
        synchronize()
        times.append((time.perf_counter() - started) * 1e3)
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    slowest = torch.tensor(statistics.median(times[1:]), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def share_exposed(step: Callable[[], object], rounds: int = 3) -> float | None:
    """Share of the time on this GPU in which NCCL runs and nothing else; None without NCCL."""
    if dist.get_backend() != "nccl":
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(rounds):
            step()
        synchronize()
    communication, computation = device_intervals(trace.events())
    everything = [*communication, *computation]
    if not everything:
        return None
    span = max(end for _, end in everything) - min(start for start, _ in everything)
    assert length(everything) <= span
    return exposed(communication, computation) / span


def rates(job: Job, rounds: int) -> dict[str, float]:
    """GB/s of all gathers and all reductions, ours and the backend's own over the same bytes."""
    (chunk,) = job.model
    pairs = [
        (bucket, group.collective_group)
        for group in chunk.all_bucket_groups
        for bucket in group.buckets
        if dist.get_world_size(group.collective_group) > 1
    ]
    if not pairs:
        return {}
    gathered = [(torch.empty_like(bucket.param_data), group) for bucket, group in pairs]
    reduced = [(torch.zeros_like(bucket.grad_data), group) for bucket, group in pairs]

    def shard(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return whole.chunk(dist.get_world_size(group))[dist.get_rank(group)]

    def gather() -> None:
        for whole, group in gathered:
            all_gather_into_tensor(whole, shard(whole, group), group)

    def reduce() -> None:
        for whole, group in reduced:
            reduce_scatter_tensor(shard(whole, group), whole, group)

    nbytes = {
        "gather": sum(whole.nbytes for whole, _ in gathered),
        "reduce": sum(whole.nbytes for whole, _ in reduced),
    }
    times = {
        "gather": milliseconds(lambda: chunk.start_param_sync(force_sync=True), rounds),
        "gather, backend": milliseconds(gather, rounds),
        "reduce": milliseconds(chunk.finish_grad_sync, rounds),
        "reduce, backend": milliseconds(reduce, rounds),
    }
    return {name: nbytes[name.split(",")[0]] / ms / 1e6 for name, ms in times.items()}


def plain_milliseconds(flags: list[str], rounds: int) -> float:
    """A step of DDP and torch.optim.Muon over FP32 weights, computed in BF16 under autocast."""
    args = parse_and_validate_args(argv=flags)
    initialize_megatron(args)
    data = pretrain_gpt.data_iterators_provider(args).train
    with args.device:
        model = pretrain_gpt.model_provider(
            args,
            core_transformer_config_from_args(args),
            ProcessGroupCollection.use_mpu_process_groups(),
        )
    device_ids = [args.device.index] if args.device.type == "cuda" else None
    loop = PlainLoop(args, TorchDDP(model.float(), device_ids=device_ids))

    result = milliseconds(functools.partial(_step_in_bf16, loop, data), rounds)
    del loop, model
    gc.collect()
    torch.use_deterministic_algorithms(False)
    parallel_state.destroy_model_parallel()
    return result


def _step_in_bf16(loop: PlainLoop, data: Iterator[Any]) -> None:
    with torch.autocast(loop.args.device.type, torch.bfloat16):
        loop.step(data)


def speed(way: tuple[str, ...], precision: str, model: list[str], rounds: int) -> dict[str, Any]:
    """The numbers of one row."""
    found: dict[str, Any] = {}
    for overlap in (False, True):
        job = Job([*MUON, *model, *way, *PRECISIONS[precision], *(OVERLAP if overlap else ())])
        key = "overlap" if overlap else "no overlap"
        found[f"ms, {key}"] = milliseconds(job.step, rounds)
        found[f"exposed, {key}"] = share_exposed(job.step)
        if not overlap:
            found |= {f"GB/s, {name}": rate for name, rate in rates(job, rounds).items()}
            found["predicted bytes"] = job.predicted()
            found["held bytes"] = job.held
        job.close()
    return found


def cell(value: float | None, form: str) -> str:
    """A number, or a dash for one that was not measured."""
    return "-" if value is None else format(value, form)


def ratio(row: dict[str, Any], above: str, below: str) -> float | None:
    """Of two numbers, if both were measured."""
    return row[above] / row[below] if row.get(below) else None


def print_tables(results: dict[str, Any]) -> None:
    """What was found, laws first."""
    print(f"\n{results['machine']}\n\n{'':<20}{'':<8}{'':<8}{'L1':>5}{'L2':>5}{'L8':>5}{'L9':>5}")
    for (way, precision, layout), found in results["laws"].items():
        marks = [{True: "yes", False: "NO"}.get(found.get(law), "-") for law in LAWS]  # type: ignore[arg-type]
        print(f"{way:<20}{precision:<8}{layout:<8}" + "".join(f"{mark:>5}" for mark in marks))
    heads = ("ms", "overlap", "/ plain", "exposed", "gather", "/ own", "reduce", "/ own", "memory")
    print(f"\n{'':<20}{'':<8}" + "".join(f"{head:>9}" for head in heads))
    for (way, precision), row in results["speed"].items():
        plain = results["plain ms"]
        values = [
            cell(row["ms, no overlap"], ".1f"),
            cell(row["ms, overlap"], ".1f"),
            cell(row["ms, overlap"] / plain, ".3f"),
            cell(row["exposed, overlap"], ".1%"),
            cell(row.get("GB/s, gather"), ".1f"),
            cell(ratio(row, "GB/s, gather", "GB/s, gather, backend"), ".2f"),
            cell(row.get("GB/s, reduce"), ".1f"),
            cell(ratio(row, "GB/s, reduce", "GB/s, reduce, backend"), ".2f"),
            cell(ratio(row, "predicted bytes", "held bytes"), ".3f"),
        ]
        print(f"{way:<20}{precision:<8}" + "".join(f"{value:>9}" for value in values))
    print(f"plain: {results['plain ms']:.1f} ms, DDP over all ranks with torch.optim.Muon")
    print("exposed: share of a step with overlap in which only NCCL runs")
    print("gather, reduce: GB/s, and over those of the backend's own collectives")
    print("memory: predicted / held between steps")


LAWS = ("L1", "L2", "L8", "L9")


def join(backend: str) -> None:
    """Joins the world that all parts run in."""
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    if os.environ["WORLD_SIZE"] == "1":
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(backend)


def main() -> int:
    """Runs everything; rank 0 prints."""
    parser = argparse.ArgumentParser(description="Laws, overlap, rates and memory on several GPUs.")
    parser.add_argument("--raw", type=Path, help="file for all numbers, JSON")
    parser.add_argument("--steps", type=int, default=10, help="steps measured of each kind")
    parser.add_argument("--small", action="store_true", help="a tiny model for the speeds too")
    default = "nccl" if torch.cuda.is_available() else "gloo"
    parser.add_argument("--distributed-backend", choices=["nccl", "gloo"], default=default)
    options = parser.parse_args()
    join(options.distributed_backend)
    ranks, backend = dist.get_world_size(), ["--distributed-backend", options.distributed_backend]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    results: dict[str, Any] = {
        "machine": f"{ranks} rank(s), {device}, torch {torch.__version__}, {options.distributed_backend}",
        "laws": {},
        "speed": {},
    }
    for name, way in ways(ranks).items():
        for precision in PRECISIONS:
            for layout in LAYOUTS:
                results["laws"][name, precision, layout] = laws(way, precision, layout)
    batch = 2 * ranks if options.small else 4 * ranks
    model = [*(TINY if options.small else LARGE), "--global-batch-size", str(batch), *backend]
    results["plain ms"] = plain_milliseconds([*MUON, *model], options.steps)
    for name, way in ways(ranks).items():
        for precision in PRECISIONS:
            results["speed"][name, precision] = speed(way, precision, model, options.steps)
    holds = all(all(found.values()) for found in results["laws"].values())
    if dist.get_rank() == 0:
        print_tables(results)
        if options.raw is not None:
            raw = {
                name: value
                if not isinstance(value, dict)
                else {", ".join(key): row for key, row in value.items()}
                for name, value in results.items()
            }
            options.raw.write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    verdict = [holds]
    dist.broadcast_object_list(verdict, 0)
    dist.destroy_process_group()
    return 0 if verdict[0] else 1


if __name__ == "__main__":
    with one_error_per_job():
        sys.exit(main())
