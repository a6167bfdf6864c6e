"""Pretrains a GPT, alone or under ``torchrun``; ``--help`` lists the flags."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron.core.models.gpt import GPTModel, pad_vocab_size
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tokenizers import build_tokenizer
from megatron.core.transformer import TransformerConfig
from megatron.training.arguments import parse_and_validate_args
from megatron.training.datasets.data_samplers import build_pretraining_data_loader
from megatron.training.datasets.gpt_datasets import build_train_valid_test_datasets
from megatron.training.failure import one_error_per_job
from megatron.training.losses import SampleLosses
from megatron.training.step import LossFunc, batch_group
from megatron.training.training import DataIterators, pretrain


def data_iterators_provider(args: argparse.Namespace) -> DataIterators:
    """This rank's microbatches of each split; sets ``args.padded_vocab_size``."""
    tokenizer = build_tokenizer(args.tokenizer_type, args.tokenizer_model, args.vocab_size)
    args.padded_vocab_size = pad_vocab_size(
        tokenizer.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size
    )
    datasets = build_train_valid_test_datasets(
        tokenizer,
        _samples_wanted(args),
        seed=args.seed,
        seq_length=args.seq_length,
        data_path=args.data_path,
        mock_data=args.mock_data,
        split=args.split,
        data_cache_path=args.data_cache_path,
    )
    group = batch_group()
    loaders = [
        build_pretraining_data_loader(
            dataset,
            consumed_samples=0,
            micro_batch_size=args.micro_batch_size,
            data_parallel_rank=0 if group is None else group.rank(),
            data_parallel_size=1 if group is None else group.size(),
        )
        for dataset in datasets
    ]
    train, valid, test = (None if loader is None else iter(loader) for loader in loaders)
    if train is None:
        raise ValueError(f"--split {args.split} leaves no data for training; give train a share")
    return DataIterators(train, valid, test)


def _samples_wanted(args: argparse.Namespace) -> Sequence[int]:
    """Samples of train, validation and test that the job will read."""
    batch = args.global_batch_size
    train = max(args.train_iters, 1) * batch
    if args.eval_interval is None or args.eval_iters == 0:
        return train, 0, 0
    evaluations = args.train_iters // args.eval_interval + 1
    return train, evaluations * args.eval_iters * batch, args.eval_iters * batch


def model_provider(
    args: argparse.Namespace, config: TransformerConfig, groups: ProcessGroupCollection
) -> torch.nn.Module:
    """The model that the flags describe."""
    return GPTModel(
        config,
        args.padded_vocab_size,
        args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        pg_collection=groups,
    )


def forward_step(
    data_iterator: Iterator[Any], model: torch.nn.Module
) -> tuple[torch.Tensor, LossFunc]:
    """Runs the model on the next microbatch."""
    device = next(model.parameters()).device
    batch = {
        name: value.to(device, non_blocking=True) for name, value in next(data_iterator).items()
    }
    output = model(batch["tokens"], batch["position_ids"], labels=batch["labels"])
    mask = batch["loss_mask"]

    def loss_func(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, SampleLosses]:
        masked = losses * mask
        by_sample = masked.detach().double().sum(dim=1)
        counts = mask.double().sum(dim=1)
        return masked.sum(), mask.sum(), {"lm loss": (by_sample, counts)}

    return output, loss_func


def main() -> None:
    """Trains as the command line says."""
    args = parse_and_validate_args()
    with one_error_per_job():
        pretrain(args, data_iterators_provider, model_provider, forward_step)


if __name__ == "__main__":
    main()
