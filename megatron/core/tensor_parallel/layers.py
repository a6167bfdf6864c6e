"""Linear layers and embeddings that are cut over tensor-parallel ranks, and over GTP ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.core import cpu_bf16
from megatron.core.collectives import group_rank, group_size
from megatron.core.quantization import MXFP8Tensor, mxfp8_linear
from megatron.core.tensor_parallel.gtp import (
    ALIGNMENT,
    MXFP8_ALIGNMENT,
    GTPRemat,
    GTPWeight,
    RowShards,
    cut_over_gtp,
    is_gtp_param,
)
from megatron.core.tensor_parallel.gtp_linear import gtp_embedding, gtp_linear
from megatron.core.tensor_parallel.init import NormalInit
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)


def divide(numerator: int, denominator: int, what: str) -> int:
    """The quotient; :class:`ValueError` with the numbers if there is a remainder."""
    if numerator % denominator:
        raise ValueError(f"{what}: {numerator} does not divide by {denominator}")
    return numerator // denominator


def set_tensor_model_parallel_attributes(
    tensor: torch.Tensor, is_parallel: bool, dim: int, stride: int = 1
) -> None:
    """Marks how ``tensor`` is cut, by Megatron's attributes."""
    tensor.tensor_model_parallel = is_parallel  # type: ignore[attr-defined]
    tensor.partition_dim = dim  # type: ignore[attr-defined]
    tensor.partition_stride = stride  # type: ignore[attr-defined]


def param_is_not_tensor_parallel_duplicate(
    param: torch.Tensor, tp_group: dist.ProcessGroup | None = None
) -> bool:
    """Whether this rank is the one that counts ``param``: it is cut, or this is rank 0."""
    return getattr(param, "tensor_model_parallel", False) or _rank_in(tp_group) == 0


def _ranks_of(group: dist.ProcessGroup | None) -> int:
    """Number of tensor-parallel ranks: without a group a layer is whole."""
    return 1 if group is None else group_size(group)


def _rank_in(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else group_rank(group)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x @ weight.T + bias``, in MXFP8 where the weight is stored or marked so.

    The one place in which a layer's products are chosen. A weight that is cut over GTP ranks is put
    together for it.
    """
    if is_gtp_param(weight):
        return gtp_linear(x, weight, bias)
    if isinstance(weight, MXFP8Tensor) or getattr(weight, "computes_in_mxfp8", False):
        return mxfp8_linear(x, weight, bias)
    return cpu_bf16.linear(x, weight, bias)


def embedding(tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rows of a table, which is put together for it if it is cut over GTP ranks."""
    return gtp_embedding(tokens, weight) if is_gtp_param(weight) else F.embedding(tokens, weight)


def _new_weight(
    config: Any,
    full_shape: tuple[int, int],
    dim: int,
    stride: int,
    group: dist.ProcessGroup | None,
    std: float,
    computes_in_mxfp8: bool,
    gtp: GTPRemat | None,
) -> torch.nn.Parameter:
    shape = list(full_shape)
    shape[dim] = divide(shape[dim], _ranks_of(group), "a tensor-parallel weight")
    cut: GTPWeight | None = None
    if gtp is not None and gtp.group is not None and gtp.ranks > 1:
        alignment = MXFP8_ALIGNMENT if computes_in_mxfp8 else ALIGNMENT
        shards = RowShards(shape[0], gtp.ranks, alignment)
        cut = GTPWeight(shards, shape[1], gtp.group, gtp.chain)
        shape[0] = shards.shard_rows
    weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
    set_tensor_model_parallel_attributes(weight, True, dim, stride)
    if cut is not None:
        cut_over_gtp(weight, cut)
    weight.normal_init = NormalInit(std, full_shape, dim, stride, group, cut)  # type: ignore[attr-defined]
    if computes_in_mxfp8:
        weight.computes_in_mxfp8 = True  # type: ignore[attr-defined]
    return weight


class ColumnParallelLinear(torch.nn.Module):
    """``x @ W.T + b`` with ``W``'s rows (output features) cut over the ranks.

    Args:
        input_size: Input features.
        output_size: Output features, over all ranks.
        config: The model's options.
        std: Of the initial weight.
        bias: Whether there is one.
        gather_output: Return all output features instead of this rank's.
        stride: Parts of the output that are cut each on its own; see :class:`NormalInit`.
        tp_group: The ranks.
        quantized: Whether it takes part in ``config.fp8``.
        gtp: Ranks that the weight is cut over once more.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        std: float,
        bias: bool = True,
        gather_output: bool = False,
        stride: int = 1,
        tp_group: dist.ProcessGroup | None = None,
        quantized: bool = True,
        gtp: GTPRemat | None = None,
    ) -> None:
        super().__init__()
        self.tp_group = tp_group
        self.gather_output = gather_output
        self.sequence_parallel = config.sequence_parallel
        shape = (output_size, input_size)
        in_fp8 = quantized and bool(config.fp8)
        self.weight = _new_weight(config, shape, 0, stride, tp_group, std, in_fp8, gtp)
        self.bias = None
        if bias:
            rows = output_size // _ranks_of(tp_group)
            self.bias = torch.nn.Parameter(torch.zeros(rows, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.bias, True, 0, stride)

    def forward(self, x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """``[s, b, input]`` to ``[s, b, output of this rank]``; ``weight`` replaces the layer's own."""
        if self.sequence_parallel:
            x = gather_from_sequence_parallel_region(x, self.tp_group)
        else:
            x = copy_to_tensor_model_parallel_region(x, self.tp_group)
        output = linear(x, self.weight if weight is None else weight, self.bias)
        if self.gather_output:
            output = gather_from_tensor_model_parallel_region(output, self.tp_group)
        return output


class RowParallelLinear(torch.nn.Module):
    """``x @ W.T + b`` with ``W``'s columns (input features) cut over the ranks.

    Args:
        input_size: Input features, over all ranks.
        output_size: Output features.
        config: The model's options.
        std: Of the initial weight.
        bias: Whether there is one; it is added once, after the sum over ranks.
        input_is_parallel: The input holds this rank's features only.
        tp_group: The ranks.
        gtp: Ranks that the weight is cut over once more, along its rows.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        std: float,
        bias: bool = True,
        input_is_parallel: bool = True,
        tp_group: dist.ProcessGroup | None = None,
        gtp: GTPRemat | None = None,
    ) -> None:
        super().__init__()
        self.tp_group = tp_group
        self.input_is_parallel = input_is_parallel
        self.sequence_parallel = config.sequence_parallel
        shape = (output_size, input_size)
        self.weight = _new_weight(config, shape, 1, 1, tp_group, std, bool(config.fp8), gtp)
        self.bias = None
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(output_size, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.bias, False, -1)
            self.bias.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[s, b, input of this rank]`` to ``[s, b, output]``."""
        if not self.input_is_parallel:
            x = scatter_to_tensor_model_parallel_region(x, self.tp_group)
        if _ranks_of(self.tp_group) == 1:
            return linear(x, self.weight, self.bias)
        output = linear(x, self.weight, None)
        if self.sequence_parallel:
            output = reduce_scatter_to_sequence_parallel_region(output, self.tp_group)
        else:
            output = reduce_from_tensor_model_parallel_region(output, self.tp_group)
        return output if self.bias is None else output + self.bias


class VocabParallelEmbedding(torch.nn.Module):
    """An embedding table whose rows (tokens) are cut over the ranks.

    Args:
        num_embeddings: Tokens, over all ranks; a multiple of their number.
        embedding_dim: Features.
        config: The model's options.
        std: Of the initial table.
        tp_group: The ranks.
        gtp: Ranks that the table is cut over once more.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        config: Any,
        std: float,
        tp_group: dist.ProcessGroup | None = None,
        gtp: GTPRemat | None = None,
    ) -> None:
        super().__init__()
        self.tp_group = tp_group
        shape = (num_embeddings, embedding_dim)
        self.weight = _new_weight(config, shape, 0, 1, tp_group, std, False, gtp)
        self.tokens_here = num_embeddings // _ranks_of(tp_group)
        self.first_token = _rank_in(tp_group) * self.tokens_here

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[b, s]`` tokens to ``[b, s, features]``."""
        if _ranks_of(self.tp_group) == 1:
            return embedding(tokens, self.weight)
        local = tokens - self.first_token
        elsewhere = (local < 0) | (local >= self.tokens_here)
        output = embedding(local.masked_fill(elsewhere, 0), self.weight)
        output = output.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return reduce_from_tensor_model_parallel_region(output, self.tp_group)
