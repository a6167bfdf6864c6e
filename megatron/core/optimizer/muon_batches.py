"""How Muon's step on CUDA is cut: which matrices are iterated together, in which form, and in which memory.

Pure arithmetic on shapes. FP16 memory holds the updates of a batch, and what a chunk of them needs beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron.core.optimizer.muon_parts import PartShape
from megatron.core.optimizer.newton_schulz import Coefficients

# Where the Gram form is used; all from measurements on an H200 (benchmarks/muon_step.py). It is faster
# from this ratio of sides on. One restart keeps it closer to the FP64 iteration than plain BF16 is for so
# many steps, and for coefficients that stretch small singular values less than polar_express and cans do.
GRAM_ASPECT = 1.5
GRAM_STEPS = 8
GRAM_STRETCH = 5.0
RESTART_AFTER = 2

# Square matrices that an iteration needs beside an update and as much spare memory, in either form.
GRAM_MATRICES = 3
PLAIN_MATRICES = 1

# Elements of the updates that pass through memory at once.
BATCH_ELEMENTS = 2**27


def uses_gram(rows: int, columns: int, coefficients: Sequence[Coefficients]) -> bool:
    """Whether matrices of this shape are iterated in the Gram form."""
    return (
        max(rows, columns) >= GRAM_ASPECT * min(rows, columns)
        and len(coefficients) <= GRAM_STEPS
        and max(a for a, _, _ in coefficients) <= GRAM_STRETCH
    )


def result_is_in_spare(rows: int, columns: int, coefficients: Sequence[Coefficients]) -> bool:
    """Whether an iteration leaves its result in the spare memory; products with updates move them."""
    moves = len(coefficients)
    if uses_gram(rows, columns, coefficients):
        moves = 1 if moves <= RESTART_AFTER else 2
    return moves % 2 == 1


@dataclass(frozen=True)
class Chunk:
    """Parts that are iterated together: of one shape, or of one smaller side in the Gram form.

    Attributes:
        parts: Those of one shape follow each other.
        start: Where the first one's update lies in the batch's memory, in elements; the others follow.
        spare: Where as much spare memory lies.
        result: Where the results are left: one of the two.
    """

    parts: tuple[PartShape, ...]
    start: int
    spare: int
    result: int

    @cached_property
    def numel(self) -> int:
        """Elements of its updates."""
        return sum(part.numel for part in self.parts)

    @cached_property
    def batches(self) -> list[tuple[int, int, int]]:
        """Number, rows and columns of the parts of each shape."""
        shapes = [(part.rows, part.columns) for part in self.parts]
        return [(shapes.count(shape), *shape) for shape in dict.fromkeys(shapes)]


@dataclass(frozen=True)
class Batch:
    """Chunks whose updates are in memory together.

    Attributes:
        chunks: In the order in which they are iterated.
        numel: Elements of the memory, spare memory included.
    """

    chunks: tuple[Chunk, ...]
    numel: int


def cut_into_batches(
    parts: Sequence[PartShape], coefficients: Sequence[Coefficients]
) -> list[Batch]:
    """Batches of at most :data:`BATCH_ELEMENTS` elements of updates, or of one part that has more.

    A batch's memory and what iterations need beside it take 2 bytes an element, and together no more than
    4 bytes for each of :data:`BATCH_ELEMENTS` and three times the largest part in FP32. The largest come
    first: while the GPU works on them the host gets ahead, and small kernels then follow each other
    without gaps.
    """
    most = _most_memory(parts)
    batches: list[list[tuple[PartShape, ...]]] = []
    for chunk in _cut_into_chunks(parts, coefficients):
        together = [*batches[-1], chunk] if batches else []
        if together and _fit(together, most, coefficients):
            batches[-1] = together
        else:
            batches.append([chunk])
    return [_place(chunks, coefficients) for chunks in batches]


def _cut_into_chunks(
    parts: Sequence[PartShape], coefficients: Sequence[Coefficients]
) -> list[tuple[PartShape, ...]]:
    """Chunks as even as can be, the largest parts first."""
    alike: dict[tuple[int, ...], list[PartShape]] = {}
    for part in sorted(parts, key=_size, reverse=True):
        is_gram = uses_gram(part.rows, part.columns, coefficients)
        shape = (part.side,) if is_gram else (part.rows, part.columns)
        alike.setdefault(shape, []).append(part)
    most = _most_memory(parts) - BATCH_ELEMENTS
    chunks = []
    for members in alike.values():
        numel = sum(part.numel for part in members)
        need = numel + _squares(members, coefficients)
        each = need / max(-(-need // most), -(-numel // BATCH_ELEMENTS))
        chunk: list[PartShape] = []
        need = numel = 0
        for part in members:
            more = part.numel + _squares([part], coefficients)
            is_full = need + more > most or numel + part.numel > BATCH_ELEMENTS or need >= each
            if chunk and is_full:
                chunks.append(tuple(chunk))
                chunk, need, numel = [], 0, 0
            chunk.append(part)
            need, numel = need + more, numel + part.numel
        chunks.append(tuple(chunk))
    return chunks


def _fit(
    chunks: Sequence[tuple[PartShape, ...]], most: int, coefficients: Sequence[Coefficients]
) -> bool:
    """Whether chunks may make up one batch: its updates, the largest spare memory and the most squares."""
    numels = [sum(part.numel for part in parts) for parts in chunks]
    squares = max(_squares(parts, coefficients) for parts in chunks)
    return sum(numels) <= BATCH_ELEMENTS and sum(numels) + max(numels) + squares <= most


def _most_memory(parts: Sequence[PartShape]) -> int:
    """Elements, of 2 bytes, that the updates of a batch and all beside them may take."""
    return 2 * BATCH_ELEMENTS + 6 * max(part.numel for part in parts)


def _squares(parts: Sequence[PartShape], coefficients: Sequence[Coefficients]) -> int:
    """Elements of the square matrices that iterating ``parts`` together takes."""
    is_gram = uses_gram(parts[0].rows, parts[0].columns, coefficients)
    return (GRAM_MATRICES if is_gram else PLAIN_MATRICES) * len(parts) * parts[0].side ** 2


def _place(chunks: Sequence[tuple[PartShape, ...]], coefficients: Sequence[Coefficients]) -> Batch:
    """Memory for updates behind spare memory for the largest chunk.

    A chunk that leaves its results in the spare memory leaves spare memory where it was, right before its
    successor; so those come first.
    """

    def moves(parts: tuple[PartShape, ...]) -> bool:
        return result_is_in_spare(parts[0].rows, parts[0].columns, coefficients)

    free = 0
    start = max(sum(part.numel for part in parts) for parts in chunks)
    placed = []
    for parts in sorted(chunks, key=moves, reverse=True):
        chunk = Chunk(parts, start, free, free if moves(parts) else start)
        placed.append(chunk)
        start += chunk.numel
        if moves(parts):
            free += chunk.numel
    return Batch(tuple(placed), start)


def _size(part: PartShape) -> tuple[int, int, int]:
    return part.side, part.rows, part.columns
