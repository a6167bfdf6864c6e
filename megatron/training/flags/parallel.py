"""Flags of parallel sizes and of data-parallel communication."""

from __future__ import annotations

from .flag import Flag, whole

PARALLEL = (
    Flag(
        "--tensor-model-parallel-size", "Ranks that a layer's work is cut over (TP).", whole(1), 1
    ),
    Flag(
        "--tensor-parallel-num-weight-shards",
        "Ranks that a layer's weights are cut over: TP x GTP; the same as TP by default.",
        whole(1),
    ),
    Flag("--expert-model-parallel-size", "Ranks that experts are spread over (EP).", whole(1), 1),
    Flag(
        "--expert-tensor-parallel-size", "TP of the experts; that of the rest by default.", whole(1)
    ),
    Flag(
        "--expert-tensor-parallel-num-weight-shards",
        "Ranks that an expert's weights are cut over.",
        whole(1),
    ),
    Flag(
        "--sequence-parallel",
        "Cut activations between TP layers along the sequence; needs TP above 1.",
    ),
    Flag(
        "--num-distributed-optimizer-instances",
        "Replicas of the sharded optimizer state; needs --use-distributed-optimizer.",
        whole(1),
        1,
    ),
    Flag(
        "--distributed-backend",
        "nccl where there is CUDA, otherwise gloo, by default.",
        str,
        None,
        ("nccl", "gloo"),
    ),
    Flag("--distributed-timeout-minutes", "After which a collective fails.", whole(1), 10),
)

DDP = (
    Flag(
        "--use-distributed-optimizer",
        "Each optimizer state on one data-parallel rank only; "
        "with muon this is the layer-wise optimizer.",
    ),
    Flag("--overlap-grad-reduce", "Reduce gradients during the backward pass."),
    Flag(
        "--overlap-param-gather",
        "Gather parameters during the forward pass; needs --use-distributed-optimizer.",
    ),
    Flag(
        "--align-param-gather",
        "Start all parameter gathers together, at the start of the "
        "iteration (Megatron: on, with interleaved pipelines only).",
        paired=True,
    ),
    Flag(
        "--ddp-bucket-size",
        "Elements at which a bucket closes; max(40e6, 1e6 x ranks) by "
        "default, and one bucket without --overlap-grad-reduce.",
        whole(1),
    ),
    Flag("--ddp-num-buckets", "Buckets to aim for, instead of --ddp-bucket-size.", whole(1)),
    Flag("--ddp-pad-buckets-for-high-nccl-busbw", "Make bucket sizes multiples of 65536."),
    Flag("--ddp-average-in-collective", "Average in the collective instead of before it."),
    Flag(
        "--ddp-reduce-scatter-with-fp32-accumulation",
        "Send gradients as they are and sum them in FP32; needs --use-distributed-optimizer.",
    ),
    Flag("--accumulate-allreduce-grads-in-fp32", "FP32 gradients; on with --bf16."),
    Flag("--grad-reduce-in-bf16", "BF16 gradients; needs --bf16."),
    Flag(
        "--check-for-nan-in-loss-and-grad",
        "Stop, naming parameter and rank, at a NaN or Inf.",
        default=True,
        paired=True,
    ),
)
