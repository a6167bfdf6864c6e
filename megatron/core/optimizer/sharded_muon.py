"""Orthogonalised updates of matrices whose shards lie on several ranks.

Four ways, by Megatron's name of ``muon_tp_mode``: ``duplicated`` puts every matrix together on every
rank; ``layer_sharded`` each on one rank, and shares the matrices out; ``distributed`` leaves the shards
where they are and sums Gram matrices; ``blockwise`` treats shards as matrices of their own, a cheaper
update that depends on the cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.core import cpu_bf16
from megatron.core.collectives import (
    MAX,
    all_gather_into_tensor,
    all_reduce,
    all_to_all_single,
    group_rank,
    group_size,
)
from megatron.core.optimizer.newton_schulz import Coefficients, _matmul_precision
from megatron.core.optimizer.sharded_matrix import ShardedMatrix
from megatron.core.param_layout import newton_schulz_cost


@dataclass(frozen=True)
class MatrixPart:
    """Rows of a matrix that are orthogonalised together.

    Attributes:
        rows: Their numbers.
        factor: The scale of their update, by the shape that they make.
    """

    rows: torch.Tensor
    factor: float


@dataclass(frozen=True)
class Update:
    """What one matrix is to be updated with.

    Attributes:
        matrix: How it is cut.
        shard: FP32, this rank's shard of the momentum; padding is zero.
    """

    matrix: ShardedMatrix
    shard: torch.Tensor


# From a whole matrix, and its number among the updates, to its orthogonalised and scaled update, FP32.
Orthogonalize = Callable[[torch.Tensor, int], torch.Tensor]


def duplicated(
    updates: Sequence[Update], orthogonalize: Orthogonalize
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields number and own shard of every update, each computed on every rank."""
    for number, update in enumerate(updates):
        full = update.matrix.gather(update.shard)
        yield number, update.matrix.shard(orthogonalize(full, number))


def layer_sharded(
    updates: Sequence[Update], orthogonalize: Orthogonalize
) -> Iterator[tuple[int, torch.Tensor]]:
    """The same bits as :func:`duplicated`; each is computed on one rank, which holds one at a time."""
    by_group: dict[dist.ProcessGroup, list[int]] = {}
    for number, update in enumerate(updates):
        by_group.setdefault(update.matrix.group, []).append(number)
    for group, numbers in by_group.items():
        # The costliest first: those of one round then cost nearly the same.
        numbers.sort(key=lambda n: (-newton_schulz_cost(updates[n].matrix.shape), n))
        ranks = group_size(group)
        for first in range(0, len(numbers), ranks):
            dealt = numbers[first : first + ranks]
            yield from _one_round(updates, dealt, group, orthogonalize)


def _one_round(
    updates: Sequence[Update],
    dealt: Sequence[int],
    group: dist.ProcessGroup,
    orthogonalize: Orthogonalize,
) -> Iterator[tuple[int, torch.Tensor]]:
    ranks, rank = group_size(group), group_rank(group)
    shards = [updates[number].shard for number in dealt]
    to_each = [shard.numel() for shard in shards] + [0] * (ranks - len(dealt))
    own = dealt[rank] if rank < len(dealt) else None
    from_each = [0 if own is None else updates[own].shard.numel()] * ranks
    sent = torch.cat([shard.reshape(-1) for shard in shards])
    received = sent.new_empty(sum(from_each))
    all_to_all_single(received, sent, group, from_each, to_each)
    if own is not None:
        matrix = updates[own].matrix
        full = matrix.assemble(received.view(ranks, *matrix.local_shape))
        result = orthogonalize(full, own)
        received = torch.cat([matrix.shard(result, r).view(-1) for r in range(ranks)])
    returned = torch.empty_like(sent)
    all_to_all_single(returned, received, group, to_each, from_each)
    pieces = returned.split([shard.numel() for shard in shards])
    for number, piece, shard in zip(dealt, pieces, shards, strict=True):
        yield number, piece.view_as(shard)


def blockwise(
    update: Update,
    parts: Sequence[MatrixPart],
    newton_schulz: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The shard's update, as if its rows and columns were all there are; factors are the matrix's."""
    place = update.matrix.own_place
    result = torch.zeros_like(update.shard)
    for part in parts:
        own = torch.isin(place.rows, part.rows).nonzero().flatten()
        if own.numel():
            result[own] = newton_schulz(update.shard[own]).float() * part.factor
    return result


def distributed(
    update: Update,
    parts: Sequence[MatrixPart],
    coefficients: Sequence[Coefficients],
    precision: str,
) -> torch.Tensor:
    """The shard's update; the same as that of the whole matrix up to rounding.

    Cut over both axes, it is put together over the one with fewer ranks.
    """
    matrix, place = update.matrix, update.matrix.own_place
    count = place.rows.numel()
    held = _Held(update.shard[:count], place.rows, slice(0, count), slice(None))
    group = matrix.group
    if matrix.tp_group is not None and matrix.gtp_group is not None:
        if group_size(matrix.tp_group) < group_size(matrix.gtp_group):
            group, held = matrix.gtp_group, _put_together(update, matrix.tp_group)
        else:
            group, held = matrix.tp_group, _put_together(update, matrix.gtp_group)
    # Whichever dimension is still cut is the one that Gram matrices sum over.
    cut_dim = 1 if group is matrix.tp_group and matrix.tp_dim == 1 else 0
    result = torch.zeros_like(held.values)
    for part in parts:
        own = torch.isin(held.rows, part.rows).nonzero().flatten()
        orthogonal = _distributed_newton_schulz(
            held.values[own], cut_dim, group, coefficients, precision
        )
        result[own] = orthogonal.float() * part.factor
    output = torch.zeros_like(update.shard)
    output[:count] = result[held.own_rows, held.own_columns]
    return output


@dataclass(frozen=True)
class _Held:
    """What this rank computes with: values without padding, their rows in the matrix, and which of
    the values are its own."""

    values: torch.Tensor
    rows: torch.Tensor
    own_rows: slice
    own_columns: slice


def _put_together(update: Update, inner: dist.ProcessGroup) -> _Held:
    """The shards of the ranks of ``inner``, one of the two axes."""
    matrix = update.matrix
    ranks, rank = group_size(inner), group_rank(inner)
    tp_ranks = group_size(matrix.tp_group)
    gathered = update.shard.new_empty((ranks, *matrix.local_shape))
    all_gather_into_tensor(gathered.view(-1), update.shard.contiguous().view(-1), inner)
    gtp_rank, tp_rank = divmod(group_rank(matrix.group), tp_ranks)
    if inner is matrix.tp_group:
        places = matrix.places[gtp_rank * tp_ranks : (gtp_rank + 1) * tp_ranks]
    else:
        places = matrix.places[tp_rank::tp_ranks]
    counts = [place.rows.numel() for place in places]
    pieces = [shard[:count] for shard, count in zip(gathered.unbind(0), counts, strict=True)]
    if inner is matrix.tp_group and matrix.tp_dim == 1:
        # Side by side: the same rows, other columns.
        return _Held(
            torch.cat(pieces, dim=1), places[0].rows, slice(None), matrix.own_place.columns
        )
    start = sum(counts[:rank])
    rows = torch.cat([place.rows for place in places])
    return _Held(torch.cat(pieces), rows, slice(start, start + counts[rank]), slice(None))


def _distributed_newton_schulz(
    x: torch.Tensor,
    cut_dim: int,
    group: dist.ProcessGroup,
    coefficients: Sequence[Coefficients],
    precision: str,
) -> torch.Tensor:
    """Newton-Schulz of a matrix of which this rank has some rows (``cut_dim`` 0) or columns (1)."""
    x = x.float().mT if cut_dim == 0 else x.float()
    x = _normalized(x, group)
    if precision == "medium":
        x = x.bfloat16()
    with _matmul_precision(precision, x.device):
        for a, b, c in coefficients:
            gram = cpu_bf16.matmul(x, x.mT).float()
            all_reduce(gram, group)
            gram = gram.to(x.dtype)
            polynomial = b * gram + c * cpu_bf16.matmul(gram, gram)
            x = a * x + cpu_bf16.matmul(polynomial, x)
    return x.mT if cut_dim == 0 else x


def _normalized(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Over the Frobenius norm of the whole matrix, by way of an exact power of two (law L12)."""
    largest = x.abs().amax().view(1) if x.numel() else x.new_zeros(1)
    # NaN would be lost in a maximum over ranks; as Inf it reaches all of them.
    largest = torch.where(largest.isnan(), torch.inf, largest)
    all_reduce(largest, group, MAX)
    exponent = torch.frexp(largest).exponent
    half = torch.div(exponent, 2, rounding_mode="floor")
    one = torch.ones_like(largest)
    scaled = x * torch.ldexp(one, -half) * torch.ldexp(one, half - exponent)
    square = scaled.square().sum().view(1)
    all_reduce(square, group)
    norm = square.sqrt()
    norm = torch.where(largest.isinf(), torch.nan, norm)
    return scaled / torch.where(norm == 0, one, norm)
