"""A training loop of one's own, for a plain ``nn.Module``, written as for megatron-core 0.19.2.

    torchrun --nproc-per-node 2 examples/own_model.py

The model learns which of ten random directions its input points to most. Its matrices go to Muon, each
owned whole by one rank; biases, norm and classifier go to AdamW, sharded over the ranks.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn

from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.layer_wise_optimizer import (
    LayerWiseDistributedOptimizer,
    tag_params_for_buffer_routing,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

WIDTH, CLASSES, BATCH, STEPS = 64, 10, 128, 30


class Classifier(nn.Module):
    """Two hidden layers and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.hidden = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.classifier = nn.Linear(WIDTH, CLASSES)
        # Muon is for the matrices inside; what touches the outside is AdamW's.
        self.classifier.weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(x + self.hidden(self.norm(x)))


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
    model = Classifier().bfloat16()
    directions = torch.randn(CLASSES, WIDTH)

    config = TransformerConfig(num_layers=2, hidden_size=WIDTH, num_attention_heads=1)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        bucket_size=10_000,
    )
    # Three steps that megatron.training.training.wrap_model_chunks_with_ddp takes at once: say which
    # optimizer owns what, lay parameters out for that, put them into buffers.
    tag_params_for_buffer_routing([model])
    layout = LayerWiseDistributedOptimizer.compute_full_param_layout(
        [param for param in model.parameters() if param.requires_grad],
        ddp_config.bucket_size,
        ranks,
        ddp_config,
    )
    chunk = DistributedDataParallel(
        config, ddp_config, model, pg_collection=groups, full_param_layout=layout
    )
    chunk.broadcast_params()

    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="muon",
            lr=0.02,
            min_lr=0.002,
            weight_decay=0.01,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_layer_wise_distributed_optimizer=True,
            overlap_param_gather=True,
            muon_momentum=0.9,
            muon_scale_mode="shape_scaling",
        ),
        [chunk],
        pg_collection=groups,
        use_gloo_process_groups=False,
    )
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=0.02,
        min_lr=0.002,
        lr_warmup_steps=3 * BATCH,
        lr_decay_steps=STEPS * BATCH,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=STEPS * BATCH,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
    )

    # Every rank starts with the same weights, so the first step has nothing to gather.
    chunk.disable_forward_pre_hook(param_sync=False)
    for step in range(STEPS):
        inputs = torch.randn(BATCH, WIDTH)
        labels = (inputs @ directions.T).argmax(dim=1)
        mine = slice(rank, None, ranks)

        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        logits = chunk(inputs[mine].bfloat16())
        loss = nn.functional.cross_entropy(logits.float(), labels[mine])
        loss.backward()
        finalize_model_grads([chunk])
        updated, grad_norm, _ = optimizer.step()
        if updated:
            schedule.step(increment=BATCH)
        if step == 0:
            chunk.enable_forward_pre_hook()

        average = loss.detach().clone()
        dist.all_reduce(average, group=groups.dp_cp)
        if rank == 0 and (step % 5 == 0 or step == STEPS - 1):
            print(f"step {step:3d} | loss {average.item() / ranks:.4f} | grad norm {grad_norm:.3f}")
    # The last update has not been gathered yet.
    chunk.disable_forward_pre_hook(param_sync=True)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
