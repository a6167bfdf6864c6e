"""Rules of the model, its batches, rates, data and outputs."""

from __future__ import annotations

import argparse
import os

from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator

from .check import FlagError, require


def check_model(args: argparse.Namespace) -> None:
    """Model sizes fit together; fills in head width, MLP width and table of positions."""
    heads, hidden = args.num_attention_heads, args.hidden_size
    if args.kv_channels is None:
        require(
            hidden % heads == 0,
            f"--hidden-size {hidden} is not divisible by --num-attention-heads {heads}; change "
            "one, or set --kv-channels",
        )
        args.kv_channels = hidden // heads
    if args.group_query_attention:
        require(
            args.num_query_groups is not None,
            "--group-query-attention needs --num-query-groups",
        )
        require(
            heads % args.num_query_groups == 0,
            f"--num-attention-heads {heads} is not divisible by --num-query-groups "
            f"{args.num_query_groups}",
        )
    else:
        require(
            args.num_query_groups is None,
            f"--num-query-groups {args.num_query_groups} needs --group-query-attention",
        )
    if args.ffn_hidden_size is None:
        # A gated MLP has three matrices, so two thirds of the width give it the size of an ungated
        # one; Megatron rounds that down to a multiple of 64.
        args.ffn_hidden_size = max(8 * hidden // 3 // 64 * 64, 64) if args.swiglu else 4 * hidden
    if args.position_embedding_type == "learned_absolute":
        require(
            args.max_position_embeddings is not None,
            "--position-embedding-type learned_absolute needs --max-position-embeddings, at least "
            f"--seq-length {args.seq_length}",
        )
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length
    require(
        args.max_position_embeddings >= args.seq_length,
        f"--max-position-embeddings {args.max_position_embeddings} is below --seq-length "
        f"{args.seq_length}",
    )
    if args.position_embedding_type == "rope":
        require(
            args.kv_channels % 2 == 0,
            f"--position-embedding-type rope needs an even head width, got {args.kv_channels}",
        )
    if args.num_experts is None:
        require(
            args.moe_router_topk is None,
            f"--moe-router-topk {args.moe_router_topk} needs --num-experts",
        )
    if args.moe_router_topk is None:
        args.moe_router_topk = 2
    if args.num_experts is not None:
        require(
            args.moe_router_topk <= args.num_experts,
            f"--moe-router-topk {args.moe_router_topk} is above --num-experts {args.num_experts}",
        )
        require(
            args.moe_router_topk > 1 or args.moe_router_pre_softmax,
            "--moe-router-topk 1 needs --moe-router-pre-softmax: a softmax over one chosen expert is "
            "always 1, and the router would learn nothing",
        )
        if args.moe_ffn_hidden_size is None:
            args.moe_ffn_hidden_size = args.ffn_hidden_size
    else:
        require(
            args.moe_ffn_hidden_size is None,
            f"--moe-ffn-hidden-size {args.moe_ffn_hidden_size} needs --num-experts",
        )
        require(not args.moe_router_pre_softmax, "--moe-router-pre-softmax needs --num-experts")
    _check_recomputation(args)


def _check_recomputation(args: argparse.Namespace) -> None:
    method, layers = args.recompute_method, args.recompute_num_layers
    if args.recompute_granularity is None:
        require(method is None, f"--recompute-method {method} needs --recompute-granularity full")
        require(
            layers is None, f"--recompute-num-layers {layers} needs --recompute-granularity full"
        )
        return
    require(
        method is not None and layers is not None,
        "--recompute-granularity full needs --recompute-method uniform or block, and "
        "--recompute-num-layers",
    )


def check_batch(args: argparse.Namespace) -> None:
    """The global batch divides; fills in data-parallel size and number of microbatches."""
    # GTP peers read batches of their own, so they count as data parallel here.
    args.data_parallel_size = args.world_size // args.tensor_model_parallel_size
    if args.global_batch_size is None:
        args.global_batch_size = args.micro_batch_size * args.data_parallel_size
    try:
        calculator = ConstantNumMicroBatchesCalculator(
            args.global_batch_size, args.micro_batch_size, args.data_parallel_size
        )
    except ValueError:
        unit = args.micro_batch_size * args.data_parallel_size
        raise FlagError(
            f"--global-batch-size {args.global_batch_size} is not divisible by --micro-batch-size "
            f"{args.micro_batch_size} x {args.data_parallel_size} data-parallel ranks = {unit}; "
            f"use a multiple of {unit}"
        ) from None
    args.num_microbatches = calculator.get()


def check_schedule(args: argparse.Namespace) -> None:
    """Warm-up, decay and weight decay fit together; fills in their ends."""
    if args.lr_decay_iters is None:
        args.lr_decay_iters = max(args.train_iters, 1)
    require(args.min_lr <= args.lr, f"--min-lr {args.min_lr:g} is above --lr {args.lr:g}")
    require(
        args.lr_warmup_init <= args.lr,
        f"--lr-warmup-init {args.lr_warmup_init:g} is above --lr {args.lr:g}",
    )
    require(
        args.lr_warmup_fraction is None or args.lr_warmup_iters == 0,
        f"--lr-warmup-fraction {args.lr_warmup_fraction} and --lr-warmup-iters "
        f"{args.lr_warmup_iters} exclude each other; give one",
    )
    require(
        args.lr_warmup_iters < args.lr_decay_iters,
        f"--lr-warmup-iters {args.lr_warmup_iters} is not below --lr-decay-iters "
        f"{args.lr_decay_iters} (which is --train-iters by default)",
    )
    if args.lr_decay_style == "WSD":
        require(
            args.lr_wsd_decay_iters is not None,
            "--lr-decay-style WSD needs --lr-wsd-decay-iters, the length of its last phase",
        )
        require(
            args.lr_wsd_decay_iters <= args.lr_decay_iters,
            f"--lr-wsd-decay-iters {args.lr_wsd_decay_iters} is above --lr-decay-iters "
            f"{args.lr_decay_iters}",
        )
    else:
        require(
            args.lr_wsd_decay_iters is None,
            f"--lr-wsd-decay-iters {args.lr_wsd_decay_iters} needs --lr-decay-style WSD, got "
            f"{args.lr_decay_style}",
        )
    ends = (args.start_weight_decay, args.end_weight_decay)
    if args.weight_decay_incr_style == "constant":
        require(
            ends == (None, None),
            "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or "
            "cosine",
        )
        args.start_weight_decay = args.end_weight_decay = args.weight_decay
    else:
        if args.start_weight_decay is None or args.end_weight_decay is None:
            raise FlagError(
                f"--weight-decay-incr-style {args.weight_decay_incr_style} needs both "
                "--start-weight-decay and --end-weight-decay"
            )
        require(
            args.start_weight_decay <= args.end_weight_decay,
            f"--start-weight-decay {args.start_weight_decay:g} is above --end-weight-decay "
            f"{args.end_weight_decay:g}",
        )


def check_data(args: argparse.Namespace) -> None:
    """One source of data, a tokenizer that has what it needs, and shares that are shares."""
    require(
        not (args.mock_data and args.data_path),
        "--mock-data and --data-path exclude each other; give one",
    )
    if args.tokenizer_type == "HuggingFaceTokenizer":
        require(
            args.tokenizer_model is not None,
            "--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model, a tokenizer.json",
        )
    elif args.tokenizer_type == "NullTokenizer":
        require(
            args.vocab_size is not None,
            "--tokenizer-type NullTokenizer needs --vocab-size, the largest token id plus one",
        )
    require(
        args.tokenizer_model is None or args.tokenizer_type == "HuggingFaceTokenizer",
        f"--tokenizer-model {args.tokenizer_model} needs --tokenizer-type HuggingFaceTokenizer",
    )
    try:
        shares = [float(share) for share in args.split.replace("/", ",").split(",")]
    except ValueError:
        shares = []
    require(
        1 <= len(shares) <= 3 and all(share >= 0 for share in shares) and sum(shares) > 0,
        f"--split {args.split!r} is not one to three shares, such as 969,30,1",
    )
    require(shares[0] > 0, f"--split {args.split!r} leaves nothing to train on")
    evaluates = args.eval_interval is not None and args.eval_iters > 0
    require(
        not evaluates or sum(shares[1:]) > 0,
        f"--eval-interval {args.eval_interval} finds nothing to evaluate on in --split "
        f"{args.split!r}",
    )


def check_output(args: argparse.Namespace) -> None:
    """What is to be written has a place."""
    if args.metrics_jsonl is not None:
        folder = os.path.dirname(os.path.abspath(args.metrics_jsonl))
        require(os.path.isdir(folder), f"--metrics-jsonl {args.metrics_jsonl}: no folder {folder}")
    require(
        args.save_interval is None or args.save is not None,
        f"--save-interval {args.save_interval} needs --save",
    )
