"""Flags: every illegal combination is one sentence and exit code 2, before any group exists."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path

import pytest
import torch

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.arguments import (
    add_megatron_arguments,
    core_transformer_config_from_args,
    get_megatron_ddp_config,
    get_megatron_optimizer_config,
)
from megatron.training.flags import GROUPS
from megatron.training.flags.__main__ import flags_table
from megatron.training.flags.refused import ABSENT, NEEDLESS, NOT_YET

from .command_line import parse

MUON = ("--optimizer", "muon", "--use-distributed-optimizer")

# What is changed about a good command line, ranks, and what the error must name.
REFUSALS: list[tuple[tuple[str, ...], int, tuple[str, ...]]] = [
    (("-num-layers", "-lr"), 1, ("--num-layers", "--lr")),
    (("--num-layers", "0"), 1, ("--num-layers", "'0'", "at least 1")),
    (("--lr", "-1"), 1, ("--lr", "'-1'")),
    (("--lr", "nan"), 1, ("--lr", "'nan'")),
    (("--optimizer", "adagrad"), 1, ("--optimizer", "adagrad", "muon")),
    (("--hidden-sise", "64"), 1, ("--hidden-sise", "did you mean --hidden-size")),
    (("--hidden-size", "66"), 1, ("--hidden-size 66", "--num-attention-heads 4", "--kv-channels")),
    (("--num-query-groups", "2"), 1, ("--num-query-groups 2", "--group-query-attention")),
    (("--group-query-attention",), 1, ("--group-query-attention", "--num-query-groups")),
    (("--group-query-attention", "--num-query-groups", "3"), 1, ("4", "--num-query-groups 3")),
    (("-max-position-embeddings",), 1, ("learned_absolute", "--max-position-embeddings")),
    (("--max-position-embeddings", "16"), 1, ("--max-position-embeddings 16", "32")),
    (("--position-embedding-type", "rope", "--kv-channels", "15"), 1, ("rope", "15")),
    (("--global-batch-size", "6"), 2, ("--global-batch-size 6", "2", "multiple of 4")),
    (("--moe-ffn-hidden-size", "64"), 1, ("--moe-ffn-hidden-size 64", "--num-experts")),
    (("--expert-model-parallel-size", "2"), 2, ("--expert-model-parallel-size 2",)),
    (("--sequence-parallel",), 1, ("--sequence-parallel", "--tensor-model-parallel-size")),
    (("--min-lr", "1"), 1, ("--min-lr 1", "--lr 0.001")),
    (("--lr-warmup-init", "1"), 1, ("--lr-warmup-init 1", "--lr 0.001")),
    (("--lr-warmup-iters", "3"), 1, ("--lr-warmup-iters 3", "--lr-decay-iters 3")),
    (
        ("--lr-warmup-iters", "1", "--lr-warmup-fraction", "0.1"),
        1,
        ("--lr-warmup-iters 1", "--lr-warmup-fraction 0.1"),
    ),
    (("--lr-decay-style", "WSD"), 1, ("WSD", "--lr-wsd-decay-iters")),
    (("--lr-wsd-decay-iters", "2"), 1, ("--lr-wsd-decay-iters 2", "WSD", "linear")),
    (
        ("--lr-decay-style", "WSD", "--lr-wsd-decay-iters", "9"),
        1,
        ("--lr-wsd-decay-iters 9", "--lr-decay-iters 3"),
    ),
    (("--start-weight-decay", "0"), 1, ("--start-weight-decay", "--weight-decay-incr-style")),
    (("--weight-decay-incr-style", "linear"), 1, ("linear", "--end-weight-decay")),
    (
        (
            *("--weight-decay-incr-style", "linear"),
            *("--start-weight-decay", "0.2", "--end-weight-decay", "0.1"),
        ),
        1,
        ("--start-weight-decay 0.2", "--end-weight-decay 0.1"),
    ),
    (("--bf16", "--fp16"), 1, ("--bf16", "--fp16")),
    (("--grad-reduce-in-bf16",), 1, ("--grad-reduce-in-bf16", "--bf16")),
    (
        ("--bf16", "--grad-reduce-in-bf16", "--accumulate-allreduce-grads-in-fp32"),
        1,
        ("--grad-reduce-in-bf16", "--accumulate-allreduce-grads-in-fp32"),
    ),
    (("--fp8-format", "hybrid"), 1, ("--fp8-format", "hybrid", "e4m3")),
    (("--fp8-recipe", "delayed"), 1, ("--fp8-recipe", "delayed", "mxfp8")),
    (("--fp8-param-gather",), 1, ("--fp8-param-gather", "--fp8-format")),
    (
        ("--reuse-grad-buf-for-mxfp8-param-ag",),
        1,
        ("--reuse-grad-buf-for-mxfp8-param-ag", "--fp8-param-gather"),
    ),
    (("--optimizer", "muon", "--fp16"), 1, ("--optimizer muon", "--fp16")),
    (("--layer-wise-param-layout", "padded"), 1, ("padded", "--optimizer muon")),
    (
        (*MUON, "--no-use-layer-wise-param-layout", "--layer-wise-param-layout", "padded"),
        1,
        ("--no-use-layer-wise-param-layout", "legacy", "padded"),
    ),
    (("--overlap-param-gather",), 1, ("--overlap-param-gather", "--use-distributed-optimizer")),
    (("--align-param-gather",), 1, ("--align-param-gather", "--overlap-param-gather")),
    (
        ("--ddp-bucket-size", "100", "--ddp-num-buckets", "2"),
        1,
        ("--ddp-bucket-size 100", "--ddp-num-buckets 2"),
    ),
    (
        ("--ddp-average-in-collective", "--calculate-per-token-loss"),
        1,
        ("--ddp-average-in-collective", "--calculate-per-token-loss"),
    ),
    (
        ("--ddp-reduce-scatter-with-fp32-accumulation",),
        1,
        ("--ddp-reduce-scatter-with-fp32-accumulation", "--use-distributed-optimizer"),
    ),
    (
        (*MUON, "--ddp-reduce-scatter-with-fp32-accumulation", "--ddp-average-in-collective"),
        1,
        ("--ddp-reduce-scatter-with-fp32-accumulation", "--ddp-average-in-collective"),
    ),
    (
        ("--num-distributed-optimizer-instances", "2"),
        2,
        ("--num-distributed-optimizer-instances 2", "--use-distributed-optimizer"),
    ),
    (
        ("--num-distributed-optimizer-instances", "2", "--use-distributed-optimizer"),
        1,
        ("--num-distributed-optimizer-instances 2", "1 data-parallel rank"),
    ),
    (
        ("--num-distributed-optimizer-instances", "2", *MUON),
        2,
        ("--num-distributed-optimizer-instances 2", "--optimizer muon"),
    ),
    (
        ("--tensor-model-parallel-size", "2", "--tensor-parallel-num-weight-shards", "3"),
        6,
        ("--tensor-parallel-num-weight-shards 3", "--tensor-model-parallel-size 2"),
    ),
    (
        ("--tensor-model-parallel-size", "2", "--tensor-parallel-num-weight-shards", "4"),
        6,
        ("6 ranks", "TP x GTP = 2 x 2 = 4"),
    ),
    (
        (
            *("--tensor-model-parallel-size", "4", "--group-query-attention"),
            *("--num-query-groups", "3", "--num-attention-heads", "12", "--kv-channels", "8"),
        ),
        4,
        ("--num-query-groups 3", "--tensor-model-parallel-size 4"),
    ),
    (
        ("--tensor-model-parallel-size", "2", "--hidden-dropout", "0.1"),
        2,
        ("--hidden-dropout", "--tensor-model-parallel-size 1"),
    ),
    (("--sequence-parallel",), 1, ("--sequence-parallel", "--tensor-model-parallel-size")),
    (("--expert-model-parallel-size", "2"), 2, ("--expert-model-parallel-size 2", "--num-experts")),
    (
        ("--expert-tensor-parallel-num-weight-shards", "2"),
        2,
        ("--expert-tensor-parallel-num-weight-shards 2", "--num-experts"),
    ),
    (
        ("--num-experts", "4", "--expert-tensor-parallel-size", "2"),
        2,
        ("--expert-tensor-parallel-size 2", "--tensor-model-parallel-size 1"),
    ),
    (
        ("--num-experts", "3", "--expert-model-parallel-size", "2"),
        2,
        ("--num-experts 3", "--expert-model-parallel-size 2"),
    ),
    (
        (
            *("--num-experts", "4", "--expert-model-parallel-size", "2"),
            *("--expert-tensor-parallel-num-weight-shards", "2"),
        ),
        2,
        ("2 ranks", "2 x 2 = 4"),
    ),
    (
        ("--num-experts", "4", "--moe-router-topk", "1"),
        1,
        ("--moe-router-topk 1", "--moe-router-pre-softmax"),
    ),
    (("--moe-router-pre-softmax",), 1, ("--moe-router-pre-softmax", "--num-experts")),
    (
        (
            *(*MUON, "--bf16", "--fp8-format", "e4m3", "--fp8-param-gather"),
            *("--tensor-parallel-num-weight-shards", "2"),
        ),
        2,
        ("--fp8-param-gather", "--reuse-grad-buf-for-mxfp8-param-ag", "GTP"),
    ),
    (
        (
            *(*MUON, "--bf16", "--fp8-format", "e4m3", "--fp8-param-gather", "--num-experts", "4"),
            *("--expert-tensor-parallel-num-weight-shards", "2"),
        ),
        2,
        ("--expert-tensor-parallel-num-weight-shards 2", "--reuse-grad-buf-for-mxfp8-param-ag"),
    ),
    (
        (
            *("--group-query-attention", "--num-query-groups", "1", "--kv-channels", "15"),
            *("--tensor-model-parallel-size", "4"),
        ),
        4,
        ("90 rows", "--kv-channels 15", "--tensor-model-parallel-size 4"),
    ),
    (
        (
            *("--num-experts", "4", "--expert-tensor-parallel-num-weight-shards", "2"),
            *("--ddp-average-in-collective",),
        ),
        2,
        ("--ddp-average-in-collective", "--expert-tensor-parallel-num-weight-shards 2"),
    ),
    (
        (
            *("--num-distributed-optimizer-instances", "2", "--use-distributed-optimizer"),
            *("--num-experts", "4", "--expert-model-parallel-size", "4"),
        ),
        4,
        ("--num-distributed-optimizer-instances 2", "the 1 data-parallel", "experts"),
    ),
    (("--moe-router-topk", "3"), 1, ("--moe-router-topk 3", "--num-experts")),
    (
        (*MUON, "--ddp-average-in-collective", "--tensor-parallel-num-weight-shards", "2"),
        2,
        ("--ddp-average-in-collective", "GTP"),
    ),
    (
        (*MUON, "--muon-no-split-qkv", "--muon-split-qkv-per-head"),
        1,
        ("--muon-split-qkv-per-head", "--muon-no-split-qkv"),
    ),
    (("--recompute-method", "block"), 1, ("--recompute-method block", "--recompute-granularity")),
    (("--recompute-granularity", "full"), 1, ("--recompute-method", "--recompute-num-layers")),
    (("--mock-data", "--data-path", "x"), 1, ("--mock-data", "--data-path")),
    (("--tokenizer-type", "HuggingFaceTokenizer"), 1, ("--tokenizer-model",)),
    (("--tokenizer-type", "NullTokenizer"), 1, ("NullTokenizer", "--vocab-size")),
    (("--tokenizer-model", "t.json"), 1, ("--tokenizer-model t.json", "--tokenizer-type")),
    (("--split", "a,b"), 1, ("--split", "'a,b'")),
    (("--split", "0,1,1"), 1, ("--split", "nothing to train on")),
    (("--split", "1,0,0", "--eval-interval", "2"), 1, ("--eval-interval 2", "'1,0,0'")),
    (("--metrics-jsonl", "/no/such/folder/m.jsonl"), 1, ("--metrics-jsonl", "/no/such/folder")),
    (("--distributed-backend", "mpi"), 1, ("--distributed-backend", "mpi", "gloo")),
]


def refusal(
    changes: tuple[str, ...],
    ranks: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with pytest.raises(SystemExit) as exit_:
        parse(*changes)
    assert exit_.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1, "an error is one line, without usage or traceback"
    assert not torch.distributed.is_initialized()
    return message


@pytest.mark.parametrize(
    ("changes", "ranks", "named"), REFUSALS, ids=[" ".join(case[0]) for case in REFUSALS]
)
def test_illegal_combinations_are_refused_by_name(
    changes: tuple[str, ...],
    ranks: int,
    named: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    message = refusal(changes, ranks, capsys, monkeypatch)
    for text in named:
        assert text in message


@pytest.mark.parametrize("entry", ABSENT, ids=lambda entry: entry.name)
def test_flags_of_absent_features_are_refused(
    entry: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    message = refusal((entry.name, "7"), 1, capsys, monkeypatch)
    assert f"{entry.name} 7: this project has no {entry.feature}; leave it out" in message


@pytest.mark.parametrize("entry", NOT_YET, ids=lambda entry: entry.name)
def test_flags_of_planned_features_are_refused(
    entry: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"--fp8-format": "e4m3", "--layer-wise-param-layout": "uneven"}
    message = refusal((entry.name, values.get(entry.name, "2")), 1, capsys, monkeypatch)
    assert entry.name in message and "not available yet" in message


def test_values_that_leave_an_absent_feature_off_are_accepted() -> None:
    harmless = [word for e in ABSENT if e.harmless for word in (e.name, e.harmless[0])]
    assert harmless
    parse(*harmless, *NEEDLESS)


def test_other_ranks_leave_the_error_to_the_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr("megatron.training.arguments.time.sleep", waited.append)
    monkeypatch.setenv("RANK", "1")
    refusal(("--num-layers", "0"), 2, capsys, monkeypatch)
    assert sum(waited) >= 1


def test_defaults_are_megatrons() -> None:
    args = parse()
    expected = {
        "ffn_hidden_size": 256,
        "seed": 1234,
        "lr_decay_style": "linear",
        "weight_decay": 0.01,
        "clip_grad": 1.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_eps": 1e-8,
        "init_method_std": 0.02,
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "muon_momentum": 0.9,
        "muon_scale_mode": "spectral",
        "muon_coefficient_type": "quintic",
        "muon_num_ns_steps": 5,
        "muon_tp_mode": "duplicated",
        "muon_fp32_matmul_prec": "medium",
        "muon_split_qkv": True,
        "split": "969,30,1",
        "ckpt_format": "torch_dist",
        "add_bias_linear": True,
        "check_for_nan_in_loss_and_grad": True,
        "global_batch_size": 8,
        "params_dtype": torch.float32,
    }
    assert {name: getattr(args, name) for name in expected} == expected


def test_muon_with_the_distributed_optimizer_means_layer_wise() -> None:
    args = parse(*MUON)
    assert args.use_layer_wise_distributed_optimizer and not args.use_distributed_optimizer
    assert args.layer_wise_param_layout == "padded" and args.use_layer_wise_param_layout
    args = parse("--optimizer", "muon")
    assert not args.use_layer_wise_distributed_optimizer and not args.use_distributed_optimizer
    args = parse("--use-distributed-optimizer")
    assert args.use_distributed_optimizer and not args.use_layer_wise_distributed_optimizer


def test_dist_muon_is_an_old_name(capsys: pytest.CaptureFixture[str]) -> None:
    args = parse("--optimizer", "dist_muon")
    assert args.optimizer == "muon" and args.use_layer_wise_distributed_optimizer
    assert "dist_muon" in capsys.readouterr().err


def test_fp32_gradients_follow_bf16_unless_told_otherwise() -> None:
    assert parse("--bf16").accumulate_allreduce_grads_in_fp32
    assert not parse("--bf16", "--grad-reduce-in-bf16").accumulate_allreduce_grads_in_fp32


def test_dynamic_loss_scaling_needs_overflows_to_pass() -> None:
    assert not parse("--fp16").check_for_nan_in_loss_and_grad
    assert parse("--fp16", "--loss-scale", "128").check_for_nan_in_loss_and_grad


def test_the_global_batch_is_cut_into_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    args = parse("--global-batch-size", "24")
    assert (args.data_parallel_size, args.num_microbatches) == (2, 6)


def test_gated_mlps_are_as_large_as_ungated_ones() -> None:
    assert parse("--swiglu", "--hidden-size", "768").ffn_hidden_size == 2048


def test_configurations_follow_the_flags() -> None:
    args = parse(
        *MUON,
        "--bf16",
        *("--group-query-attention", "--num-query-groups", "2"),
        *("--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
        *("--muon-momentum", "0.8", "--muon-no-split-qkv", "--clip-grad", "0.5"),
        *("--ddp-bucket-size", "1000", "--overlap-grad-reduce", "--overlap-param-gather"),
    )
    model = core_transformer_config_from_args(args)
    assert (model.num_query_groups, model.normalization) == (2, "RMSNorm")
    assert model.gated_linear_unit and not model.add_bias_linear
    assert model.params_dtype == torch.bfloat16
    optimizer = get_megatron_optimizer_config(args)
    assert (optimizer.muon_momentum, optimizer.muon_split_qkv, optimizer.clip_grad) == (
        *(0.8, False),
        0.5,
    )
    assert optimizer.muon_tp_mode == "duplicated" and optimizer.bf16
    assert optimizer.use_layer_wise_distributed_optimizer and optimizer.overlap_param_gather
    ddp = get_megatron_ddp_config(args)
    assert (ddp.bucket_size, ddp.grad_reduce_in_fp32) == (1000, True)
    assert ddp.overlap_grad_reduce and ddp.overlap_param_gather and ddp.check_for_nan_in_grad


def test_gradients_of_muons_matrices_are_scattered_but_in_the_legacy_layout() -> None:
    flags = (*MUON, "--bf16")
    assert get_megatron_ddp_config(parse(*flags)).use_distributed_optimizer
    accumulated = parse(*flags, "--ddp-reduce-scatter-with-fp32-accumulation")
    assert get_megatron_ddp_config(accumulated).reduce_scatter_with_fp32_accumulation
    legacy = parse(*flags, "--layer-wise-param-layout", "legacy")
    assert not get_megatron_ddp_config(legacy).use_distributed_optimizer


def test_the_width_of_a_dense_mlp_does_not_matter_where_all_are_experts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    experts = ("--num-experts", "4", "--ffn-hidden-size", "101", "--moe-ffn-hidden-size", "64")
    mxfp8 = (*MUON, "--bf16", "--fp8-format", "e4m3")
    args = parse(*experts, *mxfp8, "--tensor-model-parallel-size", "2")
    assert args.moe_ffn_hidden_size == 64


def test_help_says_of_no_switch_that_it_is_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    start = text.index("--disable-bias-linear ", text.index("options:"))
    assert "(default" not in text[start : text.index("--add-qkv-bias ", start)]
    assert "Weight decay of matrices. (default: 0.01)" in text


def test_flags_are_declared_once_and_explained() -> None:
    flags = [flag for group in GROUPS.values() for flag in group]
    names = [flag.name for flag in flags] + [entry.name for entry in ABSENT] + list(NEEDLESS)
    assert len(names) == len(set(names))
    assert all(flag.help.endswith(".") for flag in flags)
    assert {entry.name for entry in NOT_YET} <= {flag.name for flag in flags}


def test_no_flag_is_ignored() -> None:
    configs = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
    read = {field.name for config in configs for field in dataclasses.fields(config)}
    root = Path(__file__).parents[3]
    sources = [root / "pretrain_gpt.py", *(root / "megatron" / "training").glob("*.py")]
    for source in sources:
        read |= set(re.findall(r"args\.(\w+)", source.read_text(encoding="utf-8")))
    planned = {entry.dest for entry in NOT_YET} | {"ckpt_format"}
    parser = add_megatron_arguments(argparse.ArgumentParser())
    ignored = {action.dest for action in parser._actions} - read - planned
    # These two decide about others while the flags are checked.
    settled = {"group_query_attention", "grad_reduce_in_bf16"}
    assert ignored == {"help", argparse.SUPPRESS} | settled


def test_the_readme_has_the_table_of_flags() -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    assert flags_table() in readme, "paste the output of python -m megatron.training.flags"


def test_callers_may_add_flags_of_their_own() -> None:
    from megatron.training.arguments import parse_args

    def provider(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--shade", default="dark")

    assert parse_args(provider, argv=["--shade", "light"]).shade == "light"
