"""A Hugging Face ``transformers`` model under Muon and AdamW, built from a config: no download.

    pip install 'megatron-layerwise[transformers]'
    torchrun --nproc-per-node 2 examples/hf_model.py

A small Llama learns the bytes of the English documentation that ships inside Python.
"""

from __future__ import annotations

import os
from pydoc_data.topics import topics

import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.training import wrap_model_chunks_with_ddp

BYTES, SEQUENCE, BATCH, STEPS = 256, 128, 8, 20


def build_model() -> torch.nn.Module:
    """Returns a Llama with about half a million parameters."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise SystemExit(
            "this example needs transformers: pip install 'megatron-layerwise[transformers]'"
        ) from error
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=BYTES,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=SEQUENCE,
            tie_word_embeddings=False,
        )
    )
    # What Muon must leave alone; all other matrices are its own.
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        layer.weight.is_embedding_or_output_parameter = True  # type: ignore[union-attr]
    return model


def main() -> None:
    """Trains for a few steps and prints the loss."""
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    rank, ranks = dist.get_rank(groups.dp_cp), dist.get_world_size(groups.dp_cp)

    torch.manual_seed(1234)
    (model,) = wrap_model_chunks_with_ddp(
        [build_model().bfloat16()],
        TransformerConfig(num_layers=3, hidden_size=128, num_attention_heads=4),
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True),
        use_layer_wise_distributed_optimizer=True,
        pg_collection=groups,
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="muon",
            lr=0.003,
            weight_decay=0.01,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_layer_wise_distributed_optimizer=True,
        ),
        [model],
        pg_collection=groups,
    )

    text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)
    for step in range(STEPS):
        starts = torch.randint(len(text) - SEQUENCE - 1, (BATCH,))
        tokens = torch.stack([text[start : start + SEQUENCE] for start in starts]).long()
        tokens = tokens[rank::ranks]

        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        finalize_model_grads([model])
        optimizer.step()

        average = loss.detach().float()
        dist.all_reduce(average, group=groups.dp_cp)
        if rank == 0 and (step % 5 == 0 or step == STEPS - 1):
            print(f"step {step:3d} | loss {average.item() / ranks:.4f}")
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
