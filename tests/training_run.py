"""A small training run through the whole subsystem, for laws that compare runs with each other.

The model has what makes layouts and owners interesting: embeddings, matrices of several shapes,
biases and norms, an output layer that may be tied, and a matrix that Muon does not own.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch.nn.functional import cross_entropy

from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.layer_wise_optimizer import tag_params_for_buffer_routing
from megatron.core.optimizer.masters import iter_full_masters
from megatron.core.quantization import MXFP8Quantizer
from megatron.core.tensor_parallel.layers import linear
from tests.ranks import on_cuda

VOCABULARY, HIDDEN, WIDE, SEQUENCE, ROWS = 64, 32, 64, 32, 12
DEVICE = "cuda" if on_cuda() else "cpu"


@dataclass(frozen=True)
class Run:
    """One configuration of a run. Everything that a law says does not matter is a field."""

    steps: int = 4
    microbatches: int = 1
    bf16: bool = True
    optimizer: str = "muon"
    distributed_optimizer: bool = True
    layout: str = "padded"
    fp8: str = "off"
    """``off``; ``computed``: BF16 weights are quantised on the fly; ``stored``: weights are MXFP8."""
    reuse_grad_buf: bool = True
    overlap_param_gather: bool = False
    overlap_grad_reduce: bool = False
    grad_reduce_in_fp32: bool = True
    fp32_accumulation: bool = False
    average_in_collective: bool = False
    single_bucket_group: bool = False
    bucket_size: int | None = 6_000
    instances: int = 1
    tied: bool = False
    excluded_matrix: bool = True
    biases: bool = True
    clip_grad: float = 0.0
    seed: int = 7
    optimizer_options: dict[str, object] = field(default_factory=dict, hash=False)

    def but(self, **changes: object) -> Run:
        """The same run but for ``changes``."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


@dataclass
class Result:
    """What a run leaves behind, to be compared bit for bit."""

    losses: list[float]
    norms: list[float]
    masters: dict[str, torch.Tensor]

    def check_equal(self, other: Result, what: str = "") -> None:
        """Fails unless losses, gradient norms and masters have the same bits."""
        assert self.losses == other.losses, f"{what} losses {self.losses} and {other.losses}"
        assert self.norms == other.norms, f"{what} norms {self.norms} and {other.norms}"
        assert list(self.masters) == list(other.masters)
        for name, value in self.masters.items():
            assert torch.equal(value, other.masters[name]), f"{what} {name} differs"


class Linear(torch.nn.Linear):
    """A linear layer that computes in MXFP8 if its weight says so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


class NeverQuantized(Linear):
    """One that stays BF16 whatever the run."""


class Block(torch.nn.Module):
    """A residual block of three matrices and a norm; one matrix is never quantised."""

    def __init__(self, run: Run, excluded: bool) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.mix = NeverQuantized(HIDDEN, HIDDEN, bias=False)
        self.up = Linear(HIDDEN, WIDE, bias=run.biases)
        self.down = Linear(WIDE, HIDDEN, bias=run.biases)
        if excluded:
            self.down.weight.use_muon = False  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.mix(self.norm(x)))))


class SmallModel(torch.nn.Module):
    """Embedding, two residual blocks, output layer."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = torch.nn.ModuleList(
            Block(run, excluded=run.excluded_matrix and i == 1) for i in range(2)
        )
        self.head = NeverQuantized(HIDDEN, VOCABULARY, bias=False)
        for weight in (self.embedding.weight, self.head.weight):
            weight.is_embedding_or_output_parameter = True  # type: ignore[assignment]
        if run.tied:
            self.head.weight = self.embedding.weight
            self.embedding.weight.shared_embedding = True  # type: ignore[assignment]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build_model(run: Run) -> torch.nn.Module:
    """The model with the same values on every rank."""
    generator = torch.Generator().manual_seed(run.seed)
    model = SmallModel(run)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "norm" not in name:
                param.copy_(torch.randn(param.shape, generator=generator) * 0.1)
    model = model.to(DEVICE, torch.bfloat16 if run.bf16 else torch.float32)
    for module in model.modules():
        if not isinstance(module, Linear) or isinstance(module, NeverQuantized):
            continue
        if run.fp8 == "computed":
            module.weight.computes_in_mxfp8 = True  # type: ignore[assignment]
        elif run.fp8 == "stored":
            module.weight = MXFP8Quantizer().quantize_parameter(module.weight)
    return model


def build(run: Run) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    """Model and optimizer of ``run`` over the ranks of the current world."""
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=run.instances)
    model = build_model(run)
    legacy = run.layout == "legacy"
    sharded = run.distributed_optimizer and not legacy
    if run.optimizer == "muon" and sharded:
        tag_params_for_buffer_routing([model])
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=run.grad_reduce_in_fp32,
        overlap_grad_reduce=run.overlap_grad_reduce,
        overlap_param_gather=run.overlap_param_gather,
        use_distributed_optimizer=sharded,
        num_distributed_optimizer_instances=run.instances,
        bucket_size=run.bucket_size,
        reduce_scatter_with_fp32_accumulation=run.fp32_accumulation,
        average_in_collective=run.average_in_collective,
        check_for_nan_in_grad=True,
        fp8_param_gather=run.fp8 == "stored",
        reuse_grad_buf_for_mxfp8_param_ag=run.fp8 == "stored" and run.reuse_grad_buf,
    )
    config = SimpleNamespace(calculate_per_token_loss=False)
    ddp = DistributedDataParallel(
        config, ddp_config, model, disable_bucketing=run.single_bucket_group
    )
    options = {"lr": 0.02, "weight_decay": 0.01, "muon_nesterov": True} | run.optimizer_options
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer=run.optimizer,
            bf16=run.bf16,
            clip_grad=run.clip_grad,
            use_distributed_optimizer=sharded,
            use_layer_wise_distributed_optimizer=legacy,
            overlap_param_gather=run.overlap_param_gather,
            **options,  # type: ignore[arg-type]
        ),
        [ddp],
    )
    return ddp, optimizer


def batch(step: int, microbatch: int, microbatches: int) -> torch.Tensor:
    """This rank's tokens ``[rows, SEQUENCE + 1]``: a slice of the same global batch on every rank."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(VOCABULARY, (ROWS, SEQUENCE + 1), generator=generator)
    rank = parallel_state.get_data_parallel_rank()
    ranks = parallel_state.get_data_parallel_world_size()
    rows = ROWS // (ranks * microbatches)
    first = (microbatch * ranks + rank) * rows
    return tokens[first : first + rows].to(DEVICE)


def train_step(run: Run, ddp: DistributedDataParallel, step: int) -> torch.Tensor:
    """Accumulates one step's gradients; returns this rank's mean loss, FP64."""
    ddp.zero_grad_buffer()
    total = torch.zeros((), dtype=torch.float64, device=DEVICE)
    for microbatch in range(run.microbatches):
        last = microbatch == run.microbatches - 1
        tokens = batch(step, microbatch, run.microbatches)

        def forward_backward(tokens: torch.Tensor = tokens) -> torch.Tensor:
            logits = ddp(tokens[:, :-1]).float()
            loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            (loss / run.microbatches).backward()
            return loss.detach().double() / run.microbatches

        if last:
            total += forward_backward()
        else:
            with ddp.no_sync():
                total += forward_backward()
    finalize_model_grads([ddp])
    return total


def train(run: Run, after_step: Callable[..., None] | None = None) -> Result:
    """Trains on the ranks of the current world; every rank returns the same result."""
    ddp, optimizer = build(run)
    losses, norms = [], []
    for step in range(run.steps):
        loss = train_step(run, ddp, step)
        torch.distributed.all_reduce(loss)
        losses.append(float(loss) / torch.distributed.get_world_size())
        succeeded, norm, _ = optimizer.step()
        assert succeeded and norm is not None
        norms.append(norm)
        if after_step is not None:
            after_step(ddp, optimizer, step)
    if run.overlap_param_gather:
        ddp.disable_forward_pre_hook()
    return Result(losses, norms, dict(iter_full_masters(optimizer, [ddp])))


def train_all(runs: list[Run]) -> list[Result]:
    """Several runs, one after the other, in one world with one set of process groups."""
    return [train(run) for run in runs]


def digest(result: Result) -> str:
    """A short name for a result's bits, to compare runs across worlds and processes."""
    sha = hashlib.sha256(repr((result.losses, result.norms)).encode())
    for name, value in result.masters.items():
        sha.update(name.encode() + value.numpy().tobytes())
    return sha.hexdigest()
