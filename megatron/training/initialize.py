"""From a started process to a rank of a job: process group, device, seeds, model-parallel groups."""

from __future__ import annotations

import argparse
import gc
import os
import random
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from megatron.core import parallel_state

from .failure import PlainError


def initialize_megatron(args: argparse.Namespace) -> None:
    """Joins the job, under ``torchrun`` or alone, and makes its model-parallel groups.

    A world that is there already is used as it is.

    Args:
        args: Checked arguments; gets ``rank``, ``local_rank`` and ``device``.

    Raises:
        PlainError: If the ranks outnumber the GPUs of this host under NCCL.
    """
    args.rank = int(os.environ.get("RANK", "0"))
    args.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    args.device = _choose_device(args)
    make_deterministic()
    _join_world(args)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        gtp_remat_size=args.gtp_weight_remat_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        expert_gtp_remat_size=args.expert_gtp_weight_remat_size,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
    )
    set_random_seed(args.seed)


def leave_job() -> None:
    """Takes the process groups down; for the good end of a job.

    A thread of gloo that lets go of a tensor while the interpreter ends aborts the process. Groups that
    nothing refers to any more wait for their threads, so models and optimizers are to be gone by now.
    """
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


def _choose_device(args: argparse.Namespace) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if args.local_rank >= count and args.distributed_backend == "nccl":
        raise PlainError(
            f"local rank {args.local_rank} has no GPU of its own: this host has {count}; start at "
            f"most {count} ranks on it, or use --distributed-backend gloo, which can share GPUs"
        )
    device = torch.device("cuda", args.local_rank % count)
    torch.cuda.set_device(device)
    return device


def make_deterministic() -> None:
    """Makes runs with the same seed, flags and ranks agree bit for bit, on CUDA too."""
    # Read by cuBLAS when it is first used; without it cuBLAS may split sums differently every run.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling what torch.empty returns would cost time and could only hide a missing write.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def set_random_seed(seed: int) -> None:
    """Seeds the generators of Python, NumPy and torch, alike on every rank."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _join_world(args: argparse.Namespace) -> None:
    if dist.is_initialized():
        return
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    device_id = args.device if args.distributed_backend == "nccl" else None
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(args.distributed_backend, timeout=timeout, device_id=device_id)
        return
    # Alone, without a launcher: nobody to meet, so no port to meet at.
    dist.init_process_group(
        args.distributed_backend,
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        timeout=timeout,
        device_id=device_id,
    )
