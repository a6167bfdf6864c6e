"""Flags of learning rates, optimizers and number formats."""

from __future__ import annotations

from .flag import Flag, real, whole

RATE = (
    Flag("--lr", "Learning rate at the end of warm-up.", real(0.0)),
    Flag("--min-lr", "Learning rate below which no decay goes.", real(0.0), 0.0),
    Flag(
        "--lr-decay-style",
        "Shape of the decay.",
        str,
        "linear",
        ("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    ),
    Flag("--lr-decay-iters", "Iterations until --min-lr; --train-iters by default.", whole(1)),
    Flag("--lr-warmup-iters", "Iterations of linear warm-up.", whole(0), 0),
    Flag("--lr-warmup-fraction", "Warm-up as a share of --lr-decay-iters.", real(0.0, 1.0)),
    Flag("--lr-warmup-init", "Learning rate at the start of warm-up.", real(0.0), 0.0),
    Flag(
        "--lr-wsd-decay-style",
        "Shape of the last phase of WSD.",
        str,
        "exponential",
        ("exponential", "linear", "cosine", "minus_sqrt"),
    ),
    Flag("--lr-wsd-decay-iters", "Iterations of the last phase of WSD.", whole(1)),
    Flag("--weight-decay", "Weight decay of matrices.", real(0.0), 0.01),
    Flag("--start-weight-decay", "Weight decay at the start.", real(0.0)),
    Flag("--end-weight-decay", "Weight decay at the end.", real(0.0)),
    Flag(
        "--weight-decay-incr-style",
        "How weight decay goes from start to end.",
        str,
        "constant",
        ("constant", "linear", "cosine"),
    ),
    Flag("--clip-grad", "Largest global gradient norm; 0 for no clipping.", real(0.0), 1.0),
)

OPTIMIZER = (
    Flag(
        "--optimizer",
        "Optimizer of the matrices; embeddings, norms and biases under muon go to "
        "--muon-scalar-optimizer. dist_muon is an old name of muon --use-distributed-optimizer.",
        str,
        "adam",
        ("adam", "sgd", "lion", "muon", "dist_muon"),
    ),
    Flag("--adam-beta1", "Decay of Adam's first moment.", real(0.0, 1.0), 0.9),
    Flag("--adam-beta2", "Decay of Adam's second moment.", real(0.0, 1.0), 0.999),
    Flag("--adam-eps", "Added to Adam's denominator.", real(0.0), 1e-8),
    Flag("--sgd-momentum", "Momentum of SGD.", real(0.0, 1.0), 0.9),
    Flag("--muon-momentum", "Decay of Muon's momentum.", real(0.0, 1.0), 0.9),
    Flag("--muon-nesterov", "Orthogonalise the Nesterov momentum."),
    Flag(
        "--muon-scale-mode",
        "Scale of an update by the matrix's shape.",
        str,
        "spectral",
        ("spectral", "unit_rms_norm", "shape_scaling"),
    ),
    Flag(
        "--muon-coefficient-type",
        "Coefficients of the Newton-Schulz iteration.",
        str,
        "quintic",
        ("simple", "quintic", "polar_express", "cans", "aol", "deepseekv4"),
    ),
    Flag("--muon-num-ns-steps", "Newton-Schulz steps.", whole(1), 5),
    Flag(
        "--muon-tp-mode",
        "How a matrix cut over ranks is orthogonalised (Megatron: blockwise).",
        str,
        "duplicated",
        ("duplicated", "distributed", "blockwise", "layer_sharded"),
    ),
    Flag(
        "--muon-extra-scale-factor",
        "Times the scale of every Muon update.",
        real(0.0, above=True),
        1.0,
    ),
    Flag(
        "--muon-no-split-qkv",
        "Orthogonalise Q, K and V as the one matrix they are stored in.",
        dest="muon_split_qkv",
        default=True,
    ),
    Flag(
        "--muon-split-qkv-per-head",
        "Orthogonalise every head of Q, K and V as a matrix of its own.",
    ),
    Flag(
        "--muon-fp32-matmul-prec",
        "Newton-Schulz in BF16 (medium), TF32 (high) or FP32 (highest).",
        str,
        "medium",
        ("medium", "high", "highest"),
    ),
    Flag(
        "--muon-scalar-optimizer",
        "Optimizer of what Muon does not own.",
        str,
        "adam",
        ("adam", "lion"),
    ),
    Flag(
        "--optimizer-cuda-graph",
        "Record the update as a CUDA graph; needs a GPU, FP32 gradients, adam or muon (medium).",
    ),
    Flag(
        "--layer-wise-param-layout",
        "Where Muon's matrices lie in the buffers; needs muon and --use-distributed-optimizer.",
        str,
        None,
        ("padded", "decoupled", "legacy", "uneven"),
    ),
    Flag(
        "--no-use-layer-wise-param-layout",
        "The same as --layer-wise-param-layout legacy.",
        dest="use_layer_wise_param_layout",
        default=True,
    ),
)

PRECISION = (
    Flag("--bf16", "BF16 weights with FP32 masters."),
    Flag("--fp16", "FP16 weights with FP32 masters, and loss scaling."),
    Flag(
        "--loss-scale", "Fixed loss scale; dynamic under --fp16 by default.", real(0.0, above=True)
    ),
    Flag(
        "--initial-loss-scale",
        "Where the dynamic loss scale starts.",
        real(0.0, above=True),
        2.0**32,
    ),
    Flag("--min-loss-scale", "Least dynamic loss scale.", real(0.0, above=True), 1.0),
    Flag("--loss-scale-window", "Good iterations before the loss scale doubles.", whole(1), 1000),
    Flag("--hysteresis", "Bad iterations before the loss scale halves.", whole(1), 2),
    Flag("--fp8-format", "8-bit format of the linear layers.", str, None, ("e4m3",)),
    Flag(
        "--fp8-recipe", "How 8-bit scales are chosen (Megatron: delayed).", str, "mxfp8", ("mxfp8",)
    ),
    Flag(
        "--fp8-param-gather",
        "Keep linear weights in MXFP8; needs --fp8-format.",
        dest="fp8_param_gather",
    ),
    Flag(
        "--reuse-grad-buf-for-mxfp8-param-ag",
        "Gather MXFP8 weights through gradient memory; needs --fp8-param-gather.",
    ),
)
