"""The main job, several times in one world: what tests of parallel axes compare."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import pretrain_gpt
from megatron.core import parallel_state
from megatron.training.arguments import parse_and_validate_args
from megatron.training.training import pretrain
from tests.ranks import run_ranks

Lines = list[dict[str, Any]]


def jobs_here(runs: list[list[str]]) -> list[Lines]:
    """Trains with the flags of each run on the ranks of the current world; rank 0 returns metrics."""
    results = []
    for flags in runs:
        with tempfile.TemporaryDirectory() as folder:
            metrics = Path(folder) / "metrics.jsonl"
            try:
                argv = [*flags, "--distributed-backend", dist.get_backend()]
                pretrain(
                    parse_and_validate_args(argv=[*argv, "--metrics-jsonl", str(metrics)]),
                    pretrain_gpt.data_iterators_provider,
                    pretrain_gpt.model_provider,
                    pretrain_gpt.forward_step,
                )
            finally:
                torch.use_deterministic_algorithms(False)
                parallel_state.destroy_model_parallel()
            results.append(_lines(metrics) if os.environ["RANK"] == "0" else [])
    return results


def _lines(metrics: Path) -> Lines:
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return [{k: v for k, v in line.items() if k != "elapsed_ms"} for line in lines]


def run_jobs(ranks: int, *runs: list[str]) -> list[Lines]:
    """The metrics of each run on that many ranks, without times."""
    return run_ranks(jobs_here, ranks, list(runs), timeout_s=300.0)[0]


def losses_of(lines: Lines) -> list[float]:
    """The loss of every step."""
    return [line["lm_loss"] for line in lines if "lm_loss" in line]


def norms_of(lines: Lines) -> list[float]:
    """The gradient norm of every step."""
    return [line["grad_norm"] for line in lines if "grad_norm" in line]
