"""What GTP gathers and holds: counts per pass, and bytes of weights against the prediction.

    torchrun --nproc-per-node 4 -m benchmarks.gtp_gathers \\
        --tensor-model-parallel-size 2 --tensor-parallel-num-weight-shards 4

takes the flags of ``pretrain_gpt.py`` (a small MXFP8 model by default), runs forward and backward passes
on made-up tokens and prints two tables. Held bytes are those of the storages that are alive.
"""

from __future__ import annotations

import gc
import sys
from collections import defaultdict

import torch
import torch.distributed as dist

import pretrain_gpt
from megatron.core.models.gpt import GPTModel, pad_vocab_size
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.quantization import MXFP8Tensor
from megatron.core.tensor_parallel.gtp_chain import Direction, Gathered, GTPChain
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.failure import one_error_per_job
from megatron.training.initialize import initialize_megatron, leave_job

PASSES = 3
DEFAULTS = [
    *("--num-layers", "4", "--hidden-size", "256", "--num-attention-heads", "8"),
    *("--seq-length", "64", "--max-position-embeddings", "64", "--micro-batch-size", "1"),
    *("--train-iters", "1", "--lr", "1e-3", "--bf16", "--fp8-format", "e4m3"),
    *("--fp8-param-gather", "--reuse-grad-buf-for-mxfp8-param-ag"),
]


def storages(tensors: list[torch.Tensor]) -> dict[int, int]:
    """Address and bytes of the storages behind ``tensors``, each once."""
    found = {}
    for tensor in tensors:
        pieces = tensor.storage_bytes.tensors() if isinstance(tensor, MXFP8Tensor) else [tensor]
        for piece in pieces:
            found[piece.untyped_storage().data_ptr()] = piece.untyped_storage().nbytes()
    return found


def held_for_gathers(known: dict[int, int]) -> int:
    """Bytes of byte tensors that are alive and are no parameters."""
    gc.collect()
    alive = [
        item
        for item in gc.get_objects()
        if issubclass(type(item), torch.Tensor)
        and not issubclass(type(item), MXFP8Tensor)
        and item.dtype == torch.uint8
    ]
    return sum(size for address, size in storages(alive).items() if address not in known)


def bytes_of(param: torch.Tensor, numel: int, directions: int) -> int:
    """Of ``numel`` elements in ``param``'s format; MXFP8 has a copy a direction."""
    if isinstance(param, MXFP8Tensor):
        return directions * (numel + numel // 32)
    return numel * param.element_size()


def main() -> None:
    """Prints the tables on rank 0."""
    args = parse_and_validate_args(argv=[*DEFAULTS, *sys.argv[1:]])
    initialize_megatron(args)
    args.padded_vocab_size = pad_vocab_size(
        args.vocab_size or 256, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    with args.device:
        model = pretrain_gpt.model_provider(args, core_transformer_config_from_args(args), groups)
    for param in model.parameters():
        if hasattr(param, "clear_high_precision_init_val"):
            param.clear_high_precision_init_val()
    assert isinstance(model, GPTModel)
    chain = model.gtp_chain
    params: dict[str, torch.Tensor] = dict(model.named_parameters())
    known = storages([param.detach() for param in params.values()])

    peaks = []
    acquire = chain.acquire

    def watched(param: torch.Tensor, direction: Direction) -> Gathered:
        gathered = acquire(param, direction)
        with torch.no_grad():
            peaks.append(held_for_gathers(known))
        return gathered

    tokens = torch.randint(256, (args.micro_batch_size, args.seq_length), device=args.device)
    for number in range(PASSES):
        if number == PASSES - 1:
            # Without gradients, so that no other bytes are alive than gathered weights.
            chain.acquire = watched  # type: ignore[method-assign]
            with torch.no_grad():
                model(tokens, labels=tokens)
        else:
            model(tokens, labels=tokens).mean().backward()

    if dist.get_rank() == 0:
        _print_gathers(chain, params)
        _print_memory(args.gtp_weight_remat_size, params, known, max(peaks, default=0))
    leave_job()


def _print_gathers(chain: GTPChain, params: dict[str, torch.Tensor]) -> None:
    kinds: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for name, param in params.items():
        if hasattr(param, "gtp_remat"):
            kind = ".".join(part for part in name.split(".") if not part.isdigit())
            forward, dgrad = (chain.gathers[id(param), way] for way in Direction)
            kinds[kind].append((forward, dgrad))
    trained = PASSES - 1
    print(f"gathers in {trained} passes with gradients and 1 without, per weight")
    print(f"{'weight':<45}{'weights':>8}{'forward':>9}{'dgrad':>7}")
    for kind, found in kinds.items():
        for forward, dgrad in sorted(set(found)):
            print(f"{kind:<45}{found.count((forward, dgrad)):>8}{forward:>9}{dgrad:>7}")
    print(f"gathered and not used: {chain.wasted}")


def _print_memory(
    ranks: int, params: dict[str, torch.Tensor], known: dict[int, int], peak: int
) -> None:
    whole = shards = largest = 0
    for param in params.values():
        gtp = getattr(param, "gtp_remat", None)
        numel = param.numel() if gtp is None else gtp.shards.rows * gtp.columns
        whole += bytes_of(param, numel, 2)
        shards += bytes_of(param, param.numel(), 2)
        if gtp is not None:
            largest = max(largest, bytes_of(param, gtp.shards.padded_rows * gtp.columns, 1))
    print(f"\nbytes of weights on rank 0, GTP {ranks}")
    print(f"{'':<45}{'predicted':>14}{'held':>14}")
    print(f"{'without GTP':<45}{whole:>14,}{'':>14}")
    print(f"{'shards':<45}{shards:>14,}{sum(known.values()):>14,}")
    print(f"{'gathered, at most two':<45}{2 * largest:>14,}{peak:>14,}")


if __name__ == "__main__":
    with one_error_per_job():
        main()
