"""Rules of parallel sizes, number formats, optimizers and communication."""

from __future__ import annotations

import argparse

import torch

from .check import flag_name, require, warn_once

_MXFP8_BLOCK = 32


def check_parallel(args: argparse.Namespace) -> None:
    """Parallel sizes divide the ranks, heads and experts; fills in what is left open."""
    tensor, world = args.tensor_model_parallel_size, args.world_size
    if args.tensor_parallel_num_weight_shards is None:
        args.tensor_parallel_num_weight_shards = tensor
    shards = args.tensor_parallel_num_weight_shards
    require(
        shards % tensor == 0,
        f"--tensor-parallel-num-weight-shards {shards} is not a multiple of "
        f"--tensor-model-parallel-size {tensor}; it is TP x GTP",
    )
    args.gtp_weight_remat_size = shards // tensor
    require(
        world % shards == 0,
        f"{world} ranks are not divisible by TP x GTP = {tensor} x {args.gtp_weight_remat_size} = "
        f"{shards} (--tensor-model-parallel-size, --tensor-parallel-num-weight-shards)",
    )
    # With experts every MLP is made of them.
    width = "ffn_hidden_size" if args.num_experts is None else "moe_ffn_hidden_size"
    for dest in ("num_attention_heads", width):
        size = getattr(args, dest)
        require(
            size is None or size % tensor == 0,
            f"{flag_name(dest)} {size} is not divisible by --tensor-model-parallel-size {tensor}",
        )
    groups = args.num_query_groups
    require(
        groups is None or groups % tensor == 0 or tensor % groups == 0,
        f"--num-query-groups {groups} neither divides --tensor-model-parallel-size {tensor} nor is "
        "divided by it",
    )
    rows = (args.num_attention_heads + 2 * (groups or args.num_attention_heads)) * args.kv_channels
    require(
        rows % tensor == 0,
        f"the {rows} rows of Q, K and V (--num-attention-heads and twice --num-query-groups, times "
        f"--kv-channels {args.kv_channels}) are not divisible by --tensor-model-parallel-size {tensor}",
    )
    require(
        tensor == 1 or (args.hidden_dropout == 0 and args.attention_dropout == 0),
        "--hidden-dropout and --attention-dropout need --tensor-model-parallel-size 1: ranks would "
        "drop other elements of what they share",
    )
    if args.expert_tensor_parallel_size is None:
        args.expert_tensor_parallel_size = tensor
    if args.expert_tensor_parallel_num_weight_shards is None:
        args.expert_tensor_parallel_num_weight_shards = args.expert_tensor_parallel_size
    expert_shards = args.expert_tensor_parallel_num_weight_shards
    expert_tensor, experts = args.expert_tensor_parallel_size, args.expert_model_parallel_size
    require(
        expert_shards % expert_tensor == 0,
        f"--expert-tensor-parallel-num-weight-shards {expert_shards} is not a multiple of "
        f"--expert-tensor-parallel-size {expert_tensor}",
    )
    args.expert_gtp_weight_remat_size = expert_shards // expert_tensor
    if args.num_experts is None:
        require(experts == 1, f"--expert-model-parallel-size {experts} needs --num-experts")
        require(
            expert_tensor == tensor,
            f"--expert-tensor-parallel-size {expert_tensor} needs --num-experts",
        )
        require(
            args.expert_gtp_weight_remat_size == 1,
            f"--expert-tensor-parallel-num-weight-shards {expert_shards} needs --num-experts",
        )
    else:
        require(
            expert_tensor == tensor,
            f"--expert-tensor-parallel-size {expert_tensor} is not --tensor-model-parallel-size "
            f"{tensor}: experts are cut over as many ranks as the rest",
        )
        require(
            args.num_experts % experts == 0,
            f"--num-experts {args.num_experts} is not divisible by --expert-model-parallel-size "
            f"{experts}",
        )
        require(
            world % (experts * expert_shards) == 0,
            f"{world} ranks are not divisible by EP x expert weight shards = {experts} x "
            f"{expert_shards} = {experts * expert_shards}",
        )
    require(
        not args.sequence_parallel or tensor > 1,
        "--sequence-parallel needs --tensor-model-parallel-size above 1",
    )
    if args.sequence_parallel:
        require(
            args.seq_length % tensor == 0,
            f"--sequence-parallel needs a --seq-length divisible by TP, got {args.seq_length} and "
            f"{tensor}",
        )
    if args.distributed_backend is None:
        args.distributed_backend = "nccl" if torch.cuda.is_available() else "gloo"
    require(
        args.distributed_backend != "nccl" or torch.cuda.is_available(),
        "--distributed-backend nccl needs a CUDA device, and there is none; use gloo",
    )


def check_precision(args: argparse.Namespace) -> None:
    """One low-precision format, with the flags it needs; fills in the dtype of weights."""
    require(not (args.bf16 and args.fp16), "--bf16 and --fp16 exclude each other; give one")
    args.params_dtype = torch.float32
    if args.bf16:
        args.params_dtype = torch.bfloat16
    elif args.fp16:
        args.params_dtype = torch.float16
    require(not args.grad_reduce_in_bf16 or args.bf16, "--grad-reduce-in-bf16 needs --bf16")
    require(
        not (args.grad_reduce_in_bf16 and args.accumulate_allreduce_grads_in_fp32),
        "--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 exclude each other",
    )
    if args.bf16 and not args.grad_reduce_in_bf16:
        args.accumulate_allreduce_grads_in_fp32 = True
    if args.fp16 and args.loss_scale is None:
        # Overflows are how a dynamic loss scale finds its level: the step is skipped, not the job.
        args.check_for_nan_in_loss_and_grad = False
    mxfp8 = args.fp8_format is not None
    require(
        not args.fp8_param_gather or mxfp8,
        "--fp8-param-gather needs --fp8-format e4m3 (with --fp8-recipe mxfp8)",
    )
    require(
        not args.reuse_grad_buf_for_mxfp8_param_ag or args.fp8_param_gather,
        "--reuse-grad-buf-for-mxfp8-param-ag needs --fp8-param-gather and --fp8-recipe mxfp8",
    )
    if not mxfp8:
        args.fp8_recipe = None
        return
    require(args.bf16, f"--fp8-format {args.fp8_format} needs --bf16")
    if args.gtp_weight_remat_size > 1 or args.expert_gtp_weight_remat_size > 1:
        _check_mxfp8_under_gtp(args)
    _check_mxfp8_shapes(args)


def _check_mxfp8_under_gtp(args: argparse.Namespace) -> None:
    """MXFP8 weights whole, or BF16 weights that are quantised at each use as the reference for them."""
    require(
        args.reuse_grad_buf_for_mxfp8_param_ag or not args.fp8_param_gather,
        f"--fp8-param-gather under GTP ({_weight_shards(args)}) needs "
        "--reuse-grad-buf-for-mxfp8-param-ag; or leave both out, and BF16 weights are gathered",
    )
    if not args.fp8_param_gather:
        warn_once(
            f"--fp8-format {args.fp8_format} under GTP gathers BF16 weights and quantises them at "
            "every use; with --fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag they are stored "
            "and gathered in MXFP8, with the same results"
        )


def _weight_shards(args: argparse.Namespace) -> str:
    """The flag that asks for GTP, with its value."""
    expert = "" if args.gtp_weight_remat_size > 1 else "expert_"
    dest = f"{expert}tensor_parallel_num_weight_shards"
    return f"{flag_name(dest)} {getattr(args, dest)}"


def _check_mxfp8_shapes(args: argparse.Namespace) -> None:
    tensor = args.tensor_model_parallel_size
    query_groups = args.num_query_groups or args.num_attention_heads
    query_rows = args.num_attention_heads * args.kv_channels
    sizes = {
        "--hidden-size": args.hidden_size,
        "heads x --kv-channels / TP": query_rows // tensor,
        "rows of Q, K and V / TP": (query_rows + 2 * query_groups * args.kv_channels) // tensor,
        "--micro-batch-size x --seq-length": args.micro_batch_size * args.seq_length,
    }
    if args.num_experts is None:
        sizes["--ffn-hidden-size / TP"] = args.ffn_hidden_size // tensor
    else:
        sizes["--moe-ffn-hidden-size / TP"] = args.moe_ffn_hidden_size // tensor
    if args.sequence_parallel:
        sizes["--micro-batch-size x --seq-length / TP"] = (
            args.micro_batch_size * args.seq_length // tensor
        )
    for what, size in sizes.items():
        require(
            size % _MXFP8_BLOCK == 0,
            f"--fp8-recipe mxfp8 needs {what} to be a multiple of {_MXFP8_BLOCK}, got {size}",
        )


def check_optimizer(args: argparse.Namespace) -> None:
    """Which of the two distributed optimizers is meant, and with which layout."""
    if args.optimizer == "dist_muon":
        warn_once(
            "--optimizer dist_muon is an old name of --optimizer muon --use-distributed-optimizer"
        )
        args.optimizer = "muon"
        args.use_distributed_optimizer = True
    require(
        args.optimizer != "muon" or not args.fp16,
        "--optimizer muon works with --bf16 or in FP32, not with --fp16",
    )
    require(
        args.muon_split_qkv or not args.muon_split_qkv_per_head,
        "--muon-split-qkv-per-head and --muon-no-split-qkv exclude each other; give one",
    )
    if args.optimizer_cuda_graph:
        _check_optimizer_cuda_graph(args)
    layer_wise = args.optimizer == "muon" and args.use_distributed_optimizer
    chosen = args.layer_wise_param_layout
    if not args.use_layer_wise_param_layout:
        require(
            chosen in (None, "legacy"),
            "--no-use-layer-wise-param-layout means --layer-wise-param-layout legacy, got "
            f"{chosen}",
        )
        chosen = "legacy"
    require(
        chosen is None or layer_wise,
        f"--layer-wise-param-layout {chosen} needs --optimizer muon and "
        "--use-distributed-optimizer",
    )
    args.layer_wise_param_layout = chosen or "padded"
    args.use_layer_wise_param_layout = args.layer_wise_param_layout != "legacy"
    # Megatron's split of the one flag: which of the two distributed optimizers it means.
    args.has_distributed_optimizer = args.use_distributed_optimizer
    args.use_layer_wise_distributed_optimizer = layer_wise
    args.use_distributed_optimizer = args.use_distributed_optimizer and not layer_wise


def _check_optimizer_cuda_graph(args: argparse.Namespace) -> None:
    name = "--optimizer-cuda-graph"
    require(torch.cuda.is_available(), f"{name} needs a CUDA device, and there is none here")
    require(
        not args.grad_reduce_in_bf16,
        f"{name} needs gradients in FP32, where they stay; leave out --grad-reduce-in-bf16",
    )
    require(
        args.optimizer in ("adam", "muon"),
        f"{name} works with --optimizer adam and muon, got {args.optimizer}",
    )
    if args.optimizer == "muon":
        require(
            args.muon_scalar_optimizer == "adam",
            f"{name} needs --muon-scalar-optimizer adam, got {args.muon_scalar_optimizer}",
        )
        require(
            args.muon_fp32_matmul_prec == "medium",
            f"{name} needs --muon-fp32-matmul-prec medium, got {args.muon_fp32_matmul_prec}",
        )
        require(
            args.tensor_parallel_num_weight_shards == 1
            and args.expert_tensor_parallel_num_weight_shards == 1,
            f"{name} with muon needs whole matrices: --tensor-parallel-num-weight-shards 1, and "
            "--expert-tensor-parallel-num-weight-shards 1",
        )


def check_ddp(args: argparse.Namespace) -> None:
    """Options of buckets and reductions that go together."""
    distributed = args.has_distributed_optimizer
    require(
        not args.overlap_param_gather or distributed,
        "--overlap-param-gather needs --use-distributed-optimizer: without it there is nothing to "
        "gather",
    )
    require(
        not args.align_param_gather or args.overlap_param_gather,
        "--align-param-gather needs --overlap-param-gather",
    )
    require(
        args.ddp_bucket_size is None or args.ddp_num_buckets is None,
        f"--ddp-bucket-size {args.ddp_bucket_size} and --ddp-num-buckets {args.ddp_num_buckets} "
        "exclude each other; give one",
    )
    has_gtp = args.gtp_weight_remat_size > 1 or args.expert_gtp_weight_remat_size > 1
    require(
        not (args.ddp_average_in_collective and has_gtp),
        f"--ddp-average-in-collective excludes GTP ({_weight_shards(args)} with TP "
        f"{args.tensor_model_parallel_size})",
    )
    require(
        not (args.ddp_average_in_collective and args.calculate_per_token_loss),
        "--ddp-average-in-collective excludes --calculate-per-token-loss, which sums gradients",
    )
    legacy = args.use_layer_wise_distributed_optimizer and not args.use_layer_wise_param_layout
    scatters = distributed and not legacy
    if args.ddp_reduce_scatter_with_fp32_accumulation:
        name = "--ddp-reduce-scatter-with-fp32-accumulation"
        require(
            scatters,
            f"{name} needs --use-distributed-optimizer"
            + (", and a layout other than legacy, which all-reduces" if legacy else ""),
        )
        require(
            not args.ddp_average_in_collective,
            f"{name} and --ddp-average-in-collective exclude each other",
        )
    instances = args.num_distributed_optimizer_instances
    if instances > 1:
        name = f"--num-distributed-optimizer-instances {instances}"
        require(
            not args.use_layer_wise_distributed_optimizer,
            f"{name} excludes --optimizer muon, whose matrices are shared out over all data-parallel "
            "ranks",
        )
        require(distributed, f"{name} needs --use-distributed-optimizer")
        ranks = args.world_size // args.tensor_parallel_num_weight_shards
        require(ranks % instances == 0, f"{name} does not divide the {ranks} data-parallel rank(s)")
        if args.num_experts is not None:
            shards = args.expert_tensor_parallel_num_weight_shards
            ranks = args.world_size // (args.expert_model_parallel_size * shards)
            require(
                ranks % instances == 0,
                f"{name} does not divide the {ranks} data-parallel rank(s) of the experts "
                f"(--expert-model-parallel-size {args.expert_model_parallel_size})",
            )
        require(
            not args.ddp_reduce_scatter_with_fp32_accumulation,
            f"{name} and --ddp-reduce-scatter-with-fp32-accumulation exclude each other",
        )
