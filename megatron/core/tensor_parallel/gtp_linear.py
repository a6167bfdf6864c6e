"""Products with weights that are cut over GTP ranks: gather, multiply, let go; and backward again."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from megatron.core import cpu_bf16
from megatron.core.quantization import MXFP8Tensor, products
from megatron.core.quantization import format as mxfp8
from megatron.core.tensor_parallel.gtp import GTPWeight, gtp_weight_of
from megatron.core.tensor_parallel.gtp_chain import Direction, Gathered


def gtp_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``x @ W.T + bias`` with the matrix ``W`` that ``weight`` is this rank's shard of.

    In MXFP8 where the shard is stored or marked so. Nothing of ``W`` is kept for the backward pass,
    which gathers it again.

    Args:
        x: ``[..., columns]``.
        weight: ``[rows of a shard, columns]``; see :class:`~megatron.core.tensor_parallel.gtp.GTPWeight`.
        bias: ``[rows]``.

    Returns:
        ``[..., rows]``.

    Raises:
        ValueError: In MXFP8, if the tokens are no multiple of 32.
    """
    if _computes_in_mxfp8(weight):
        products.check_input(x, weight)
    rows = _weight(weight).shards.rows
    output = _GTPLinear.apply(x.reshape(-1, x.size(-1)), weight)
    if bias is not None:
        output = output + bias
    return output.view(*x.shape[:-1], rows)


def gtp_embedding(tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rows of the table that ``weight`` is this rank's shard of: ``[...]`` to ``[..., columns]``."""
    return _GTPEmbedding.apply(weight, tokens)


def _weight(param: torch.Tensor) -> GTPWeight:
    weight = gtp_weight_of(param)
    assert weight is not None
    return weight


def _computes_in_mxfp8(weight: torch.Tensor) -> bool:
    return isinstance(weight, MXFP8Tensor) or getattr(weight, "computes_in_mxfp8", False)


def _rowwise_bytes(weight: torch.Tensor, gathered: Gathered) -> tuple[torch.Tensor, torch.Tensor]:
    """Data and scales for the forward product, without padding."""
    rows = _weight(weight).shards.rows
    if not isinstance(weight, MXFP8Tensor):
        return mxfp8.quantize_rowwise(gathered.parts[0][:rows])
    data, scale = gathered.parts
    return data[:rows], scale[:rows]


def _columnwise_bytes(
    weight: torch.Tensor, gathered: Gathered
) -> tuple[torch.Tensor, torch.Tensor]:
    """Data and scales for dgrad, without padding."""
    rows = _weight(weight).shards.rows
    if not isinstance(weight, MXFP8Tensor):
        return mxfp8.quantize_columnwise(gathered.parts[0][:rows])
    data, scale = gathered.parts
    return data[:rows], scale[: rows // mxfp8.BLOCK]


class _GTPLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        chain, rows = _weight(weight).chain, _weight(weight).shards.rows
        kept: tuple[torch.Tensor, ...]
        gathered = chain.acquire(weight, Direction.FORWARD)
        if _computes_in_mxfp8(weight):
            output = products.forward_product(x, *_rowwise_bytes(weight, gathered))
            kept = mxfp8.quantize_columnwise(x) if ctx.needs_input_grad[1] else ()
        else:
            output = cpu_bf16.matmul(x, gathered.parts[0][:rows].T)
            kept = (x,)
        chain.release(gathered)
        ctx.save_for_backward(*kept)
        ctx.weight = weight
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:  # type: ignore[override]
        weight, kept = ctx.weight, ctx.saved_tensors
        chain, rows = _weight(weight).chain, _weight(weight).shards.rows
        in_mxfp8 = _computes_in_mxfp8(weight)
        grad_x = None
        if ctx.needs_input_grad[0]:
            gathered = chain.acquire(weight, Direction.DGRAD)
            if in_mxfp8:
                grad_x = products.dgrad_product(grad_output, *_columnwise_bytes(weight, gathered))
            else:
                grad_x = cpu_bf16.matmul(grad_output, gathered.parts[0][:rows])
            chain.release(gathered)
        if ctx.needs_input_grad[1]:
            if in_mxfp8:
                grad_weight = products.wgrad_product(grad_output, *kept)
            else:
                grad_weight = cpu_bf16.matmul(grad_output.T, kept[0])
            chain.reduce(weight, grad_weight)
        # The weight's gradient goes to its shard by way of the chain.
        return grad_x, None


class _GTPEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        chain, rows = _weight(weight).chain, _weight(weight).shards.rows
        gathered = chain.acquire(weight, Direction.FORWARD)
        output = F.embedding(tokens, gathered.parts[0][:rows])
        chain.release(gathered)
        ctx.save_for_backward(tokens)
        ctx.weight = weight
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:  # type: ignore[override]
        (tokens,) = ctx.saved_tensors
        weight = _weight(ctx.weight)
        if ctx.needs_input_grad[0]:
            grad = torch.ops.aten.embedding_dense_backward(
                grad_output, tokens, weight.shards.rows, -1, False
            )
            weight.chain.reduce(ctx.weight, grad)
        return None, None
