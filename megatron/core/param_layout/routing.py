"""Which optimizer owns a parameter, and which buffer it lies in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from megatron.core.fp8_utils import is_float8tensor


@dataclass(frozen=True)
class BufferKey:
    """Identity of a buffer: parameters that differ in any field lie in different buffers.

    Attributes:
        param_dtype: Dtype of the stored parameter; ``torch.uint8`` if it is quantised.
        grad_dtype: Dtype in which gradients are accumulated and reduced.
        is_expert_parallel: Reduced over the expert data-parallel group.
        is_managed_by_layer_wise_optimizer: Owned whole by one rank (Muon) rather than in flat
            shards.
        computes_in_mxfp8: A high-precision weight that its layer quantises on the fly. Kept apart
            so that buffers are cut alike whether weights are stored in MXFP8 or not; sums over
            three or more ranks depend on the place of an element.
    """

    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    is_expert_parallel: bool
    is_managed_by_layer_wise_optimizer: bool = False
    computes_in_mxfp8: bool = False


def is_managed_by_layer_wise_optimizer(param: torch.nn.Parameter) -> bool:
    """The routing rule: matrices go to the layer-wise optimizer (Muon), all else to the scalar one.

    Embeddings and output layers are not matrices in this sense, nor is anything whose ``use_muon``
    is False.
    """
    return (
        param.dim() == 2
        and not getattr(param, "is_embedding_or_output_parameter", False)
        and getattr(param, "use_muon", True)
    )


def tag_params_for_buffer_routing(model_chunks: Iterable[torch.nn.Module]) -> None:
    """Decides the owner of every trainable parameter, once, before DDP builds its buffers."""
    for chunk in model_chunks:
        for param in chunk.parameters():
            if param.requires_grad:
                owned = is_managed_by_layer_wise_optimizer(param)
                param.is_managed_by_layer_wise_optimizer = owned  # type: ignore[attr-defined]


def buffer_key(param: torch.nn.Parameter, grad_reduce_in_fp32: bool) -> BufferKey:
    """The buffer that ``param`` belongs to."""
    quantized = is_float8tensor(param)
    return BufferKey(
        param_dtype=torch.uint8 if quantized else param.dtype,
        grad_dtype=torch.float32 if grad_reduce_in_fp32 else param.dtype,
        is_expert_parallel=not getattr(param, "allreduce", True),
        is_managed_by_layer_wise_optimizer=getattr(
            param, "is_managed_by_layer_wise_optimizer", False
        ),
        computes_in_mxfp8=not quantized and getattr(param, "computes_in_mxfp8", False),
    )


def group_params_for_buffers(
    params: Sequence[torch.nn.Parameter], grad_reduce_in_fp32: bool
) -> dict[BufferKey, tuple[list[torch.nn.Parameter], list[int]]]:
    """Sorts parameters into buffers.

    Args:
        params: Trainable parameters in construction order.
        grad_reduce_in_fp32: Reduce gradients in FP32 rather than the parameter's nominal dtype.

    Returns:
        For each buffer its parameters, and each one's number among the parameters that would share
        its buffer if none were quantised.

    Raises:
        ValueError: If a parameter does not require a gradient.
    """
    groups: dict[BufferKey, tuple[list[torch.nn.Parameter], list[int]]] = {}
    counts: dict[tuple[object, ...], int] = {}
    for param in params:
        if not param.requires_grad:
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} has requires_grad=False; only "
                "trainable parameters go into buffers"
            )
        key = buffer_key(param, grad_reduce_in_fp32)
        nominal = (
            param.dtype,
            key.grad_dtype,
            key.is_expert_parallel,
            key.is_managed_by_layer_wise_optimizer,
        )
        members, indices = groups.setdefault(key, ([], []))
        members.append(param)
        indices.append(counts.get(nominal, 0))
        counts[nominal] = indices[-1] + 1
    return groups
