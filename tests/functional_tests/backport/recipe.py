"""Trains the small model with the Megatron-core that this process has imported.

Everything about communication and optimisation is the release's own code: DistributedDataParallel
and its buffers, the layer-wise optimizer, Megatron's wrapper of Muon, the distributed optimizer.
What is written here is the part of a training script that drives them.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from tests.functional_tests.backport import mxfp8_stand_in
from tests.functional_tests.backport.model import ResidualModel, batch


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        primary: MXFP8 primary weights (ON) or BF16 ones quantised on the fly (OFF).
        overlap: Overlap the gradient reduction and the parameter gather with compute.
        layout: ``padded`` (whole parameters in shard-aligned slots) or ``legacy``.
        ranks: Data-parallel ranks.
        readers: How many of them have a loss; the others add zeros. A sum of three or more terms
            depends on where in a buffer it is made, so where ON and OFF have different buffers
            they can only be compared with two readers.
        grads_in_fp32: Reduce gradients in FP32 rather than BF16.
        single_group: Ask for one bucket group (``disable_bucketing``).
        quantized_output, plain_down, matrices_first: See :class:`~.model.ResidualModel`.
        experts: The second matrix of each block lives in the buffers of expert parameters.
        microbatches: Per step.
        force_sync_after: Steps after which hooks are taken off, parameters synchronised and the
            hooks put back, as evaluation does.
        bucket_size: Elements; Megatron ignores it without overlap.
        steps: Optimizer steps.
        damage: What to break in an MXFP8 weight before the first step, of what staging relies on:
            ``no_master``, ``small_master`` or ``split``.
    """

    primary: bool = True
    overlap: bool = False
    layout: str = "padded"
    ranks: int = 2
    readers: int = 8
    grads_in_fp32: bool = True
    single_group: bool = False
    quantized_output: bool = False
    plain_down: bool = False
    matrices_first: bool = False
    experts: bool = False
    microbatches: int = 1
    force_sync_after: tuple[int, ...] = ()
    bucket_size: int = 20_000
    steps: int = 10
    damage: str = ""

    def off(self) -> Run:
        """The same run with BF16 primary weights."""
        return replace(self, primary=False)


@dataclass
class Outcome:
    """What one rank saw.

    Attributes:
        losses: Mean over the readers, per step.
        weights: Final value of every parameter: of a BF16 weight that ON keeps in MXFP8, the bytes
            that it would be quantised to; of any other, the bytes that it is stored in.
        masters: FP32 masters of whole parameters that this rank holds before the first step.
        unseeded: Parameters that still hold their high-precision initial value then.
        own_gathers: How often the layer-wise optimizer gathered through temporaries although it
            was told to reuse gradient memory.
    """

    losses: list[float] = field(default_factory=list)
    weights: dict[str, bytes] = field(default_factory=dict)
    masters: dict[str, bytes] = field(default_factory=dict)
    unseeded: list[str] = field(default_factory=list)
    own_gathers: int = 0


def release(module: str) -> Any:
    """A module of the Megatron-core under test (which is not this project's own)."""
    return importlib.import_module(f"megatron.core.{module}")


def pretend_to_have_transformer_engine() -> None:
    """Makes the release take the stand-in for Transformer Engine's MXFP8 tensor."""
    fp8_utils = release("fp8_utils")
    fp8_utils.HAVE_TE_FP8_TENSOR_CLASS = fp8_utils.HAVE_TE_MXFP8TENSOR = True
    fp8_utils.FP8_TENSOR_CLASS = mxfp8_stand_in.QuantizedTensor
    fp8_utils.MXFP8Tensor = mxfp8_stand_in.MXFP8Tensor


def train(run: Run) -> Outcome:
    """Trains on this rank; process groups are initialised."""
    model, optimizer = build(run)
    outcome = Outcome()
    _count_own_gathers(optimizer, outcome)
    for name, parameter in model.module.named_parameters():
        master = getattr(parameter, "main_param", None)
        if master is not None and master.shape == parameter.shape:
            outcome.masters[name] = _bytes(master)
        if getattr(parameter, "get_high_precision_init_val", lambda: None)() is not None:
            outcome.unseeded.append(name)

    if run.damage:
        _damage_a_weight(run.damage, model)
    if run.overlap:
        # The weights are in place already, and nothing is staged yet.
        model.disable_forward_pre_hook(param_sync=False)
    for step in range(run.steps):
        outcome.losses.append(_step(run, model, optimizer, step))
        if run.overlap and step == 0:
            model.enable_forward_pre_hook()
        if run.overlap and step in run.force_sync_after:
            _stage_for_forced_sync(run, model, optimizer)
            model.disable_forward_pre_hook()
            model.enable_forward_pre_hook()
    if run.overlap:
        _stage_for_forced_sync(run, model, optimizer)
        model.disable_forward_pre_hook()
    for name, parameter in model.module.named_parameters():
        outcome.weights[name] = _stored_bytes(parameter)
    return outcome


def build(run: Run) -> tuple[Any, Any]:
    """The model in Megatron's DistributedDataParallel, and its optimizer."""
    layer_wise = release("optimizer.layer_wise_optimizer")
    has_layouts = hasattr(layer_wise, "tag_params_for_buffer_routing")
    if run.layout == "padded" and not has_layouts:
        raise ValueError("this release has the legacy layout only")
    # Releases with the legacy path alone gather through temporaries, not through gradient memory.
    reuse = run.primary and has_layouts
    module = ResidualModel(run.primary, run.quantized_output, run.plain_down, run.matrices_first)
    if run.experts:
        for name, parameter in module.named_parameters():
            if name.endswith("down.weight"):
                parameter.allreduce = False  # type: ignore[attr-defined]
    ddp_config = release("distributed").DistributedDataParallelConfig(
        grad_reduce_in_fp32=run.grads_in_fp32,
        overlap_grad_reduce=run.overlap,
        overlap_param_gather=run.overlap,
        use_distributed_optimizer=run.layout == "padded",
        bucket_size=run.bucket_size if run.overlap else None,
        fp8_param_gather=run.primary,
        reuse_grad_buf_for_mxfp8_param_ag=reuse,
    )
    keywords: dict[str, Any] = {}
    if run.layout == "padded":
        layer_wise.tag_params_for_buffer_routing([module])
        keywords["full_param_layout"] = (
            layer_wise.LayerWiseDistributedOptimizer.compute_full_param_layout(
                list(module.parameters()), ddp_config.bucket_size, run.ranks, ddp_config
            )
        )
    model = release("distributed").DistributedDataParallel(
        release("transformer").TransformerConfig(
            num_layers=1, hidden_size=64, num_attention_heads=1
        ),
        ddp_config,
        module,
        disable_bucketing=run.single_group,
        **keywords,
    )
    return model, _build_optimizer(run, model, reuse)


def _build_optimizer(run: Run, model: Any, reuse: bool) -> Any:
    settings = {
        "optimizer": "muon",
        "lr": 0.01,
        "weight_decay": 0.01,
        "clip_grad": 0.0,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "muon_tp_mode": "blockwise",
        "overlap_param_gather": run.overlap,
        "reuse_grad_buf_for_mxfp8_param_ag": reuse,
        "use_layer_wise_distributed_optimizer": True,
    }
    package = release("optimizer")
    known = package.OptimizerConfig.__dataclass_fields__
    config = package.OptimizerConfig(**{k: v for k, v in settings.items() if k in known})
    if "use_layer_wise_distributed_optimizer" in known:
        groups = release("process_groups_config").ProcessGroupCollection.use_mpu_process_groups()
        return package.get_megatron_optimizer(config, [model], pg_collection=groups)
    return release("optimizer.muon").get_megatron_muon_optimizer(
        config, [model], use_gloo_process_groups=False, layer_wise_distributed_optimizer=True
    )


def _step(run: Run, model: Any, optimizer: Any, step: int) -> float:
    model.zero_grad_buffer()
    optimizer.zero_grad()
    if run.overlap and model.remove_forward_pre_hook_handles:
        _stage_distributed_optimizers(optimizer)
    rank, total = dist.get_rank(), torch.zeros(())
    weight = 1.0 / run.microbatches if rank < run.readers else 0.0
    for microbatch in range(run.microbatches):
        tokens, labels = batch(step, rank, microbatch)
        if microbatch + 1 < run.microbatches:
            with model.no_sync():
                loss = model(tokens, labels) * weight
                loss.backward()
        else:
            loss = model(tokens, labels) * weight
            loss.backward()
        total += loss.detach()
    model.finish_grad_sync()
    optimizer.step()
    dist.all_reduce(total)
    return float(total) / min(run.readers, dist.get_world_size())


def _count_own_gathers(optimizer: Any, outcome: Outcome) -> None:
    for part in [optimizer, *getattr(optimizer, "chained_optimizers", [])]:
        if hasattr(part, "allgather_params") and part.config.reuse_grad_buf_for_mxfp8_param_ag:
            gather = part.allgather_params

            def counted(gather: Any = gather) -> None:
                outcome.own_gathers += 1
                gather()

            part.allgather_params = counted


def _damage_a_weight(damage: str, model: Any) -> None:
    bucket = next(
        bucket
        for group in model.bucket_groups
        for bucket in group.buckets
        if isinstance(bucket.params_list[0], mxfp8_stand_in.MXFP8Tensor)
    )
    shard = bucket.param_data.numel() // dist.get_world_size()
    weight = next(p for p in bucket.params_list if bucket.param_to_index[p][0] < shard)
    if damage == "split":
        bucket.param_to_index[weight] = (shard - 1, shard - 1 + weight.numel())
    elif hasattr(weight, "main_param") and damage == "no_master":
        del weight.main_param
    elif hasattr(weight, "main_param"):
        weight.main_param = weight.main_param.flatten()[:1]


def _stage_distributed_optimizers(optimizer: Any) -> None:
    """With overlap, the training loop stages a distributed optimizer's masters after zeroing."""
    distributed_optimizer = release("optimizer.distrib_optimizer").DistributedOptimizer
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        reuses = part.config.reuse_grad_buf_for_mxfp8_param_ag
        if reuses and isinstance(part, distributed_optimizer):
            part._copy_main_params_to_param_buffer()


def _stage_for_forced_sync(run: Run, model: Any, optimizer: Any) -> None:
    if hasattr(optimizer, "prepare_model_params_for_param_sync"):
        optimizer.prepare_model_params_for_param_sync()
    elif run.primary:
        model.zero_grad_buffer()
        _stage_distributed_optimizers(optimizer)


def _stored_bytes(parameter: torch.Tensor) -> bytes:
    parts: tuple[torch.Tensor, ...] = (parameter.detach(),)
    if isinstance(parameter, mxfp8_stand_in.MXFP8Tensor):
        parts = parameter.storage_parts()
    elif getattr(parameter, "computes_in_mxfp8", False):
        parts = mxfp8_stand_in.MXFP8Tensor.quantized_from(parameter.detach()).storage_parts()
    return b"".join(_bytes(part) for part in parts)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
