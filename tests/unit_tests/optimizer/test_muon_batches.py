"""How Muon's step on CUDA is cut: every part once, nothing overwritten, memory within its bound."""

from __future__ import annotations

from collections import Counter

import pytest

from megatron.core.optimizer import muon_batches
from megatron.core.optimizer.muon_batches import (
    BATCH_ELEMENTS,
    GRAM_MATRICES,
    PLAIN_MATRICES,
    cut_into_batches,
    uses_gram,
)
from megatron.core.optimizer.muon_parts import PartShape
from megatron.core.optimizer.newton_schulz import get_coefficients

LAYER = [(2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (16384, 2048), (2048, 8192)]
MODELS = {
    "dense": LAYER * 4,
    "experts": [(1536, 2048), (2048, 768)] * 128,
    "many small": [(256, 256)] * 5000,
    "one huge": [(16384, 16384), (1024, 1024), (1024, 4096)],
    "just above the ratio": [(1024, 1536)] * 300,
    "experts and others": [(1536, 2048)] * 128 + [(2304, 1152)] * 64,
    "one": [(8, 8)],
}
# Results of five plain steps are in the spare memory, of four in their own; the Gram form's are in
# their own, and after two steps in the spare memory.
STEPS = [1, 2, 4, 5, 10]


def parts_of(shapes: list[tuple[int, int]]) -> list[PartShape]:
    return [
        PartShape(number, rows, 0, rows, rows, columns, 1.0)
        for number, (rows, columns) in enumerate(shapes)
    ]


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("model", MODELS)
def test_every_part_is_iterated_once_with_those_alike(model, steps):
    coefficients = get_coefficients("simple", steps)
    parts = parts_of(MODELS[model])
    chunks = [chunk for batch in cut_into_batches(parts, coefficients) for chunk in batch.chunks]
    assert Counter(part for chunk in chunks for part in chunk.parts) == Counter(parts)
    for chunk in chunks:
        shapes = {(part.rows, part.columns) for part in chunk.parts}
        gram = {uses_gram(*shape, coefficients) for shape in shapes}
        assert len(gram) == 1 and len({min(shape) for shape in shapes}) == 1
        assert len(shapes) == 1 or gram == {True}
        assert len(chunk.batches) == len(shapes), "parts of one shape lie apart"


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("model", MODELS)
def test_no_spare_memory_holds_what_is_still_needed(model, steps):
    coefficients = get_coefficients("simple", steps)
    for batch in cut_into_batches(parts_of(MODELS[model]), coefficients):
        held = [(chunk.start, chunk.start + chunk.numel) for chunk in batch.chunks]
        for number, chunk in enumerate(batch.chunks):
            spare = (chunk.spare, chunk.spare + chunk.numel)
            assert spare[0] >= 0 and max(spare[1], held[number][1]) <= batch.numel
            assert all(spare[1] <= first or last <= spare[0] for first, last in held)
            assert chunk.result in (chunk.start, chunk.spare)
            held[number] = (chunk.result, chunk.result + chunk.numel)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("model", MODELS)
def test_memory_is_a_batch_and_three_times_the_largest_matrix(model, steps):
    coefficients = get_coefficients("simple", steps)
    parts = parts_of(MODELS[model])
    largest = 4 * max(part.numel for part in parts)
    batches = cut_into_batches(parts, coefficients)
    for batch in batches:
        for chunk in batch.chunks:
            part = chunk.parts[0]
            is_gram = uses_gram(part.rows, part.columns, coefficients)
            squares = GRAM_MATRICES if is_gram else PLAIN_MATRICES
            beside = squares * len(chunk.parts) * part.side**2
            assert 2 * (batch.numel + beside) <= 4 * BATCH_ELEMENTS + 3 * largest


def test_chunks_of_one_shape_are_even(monkeypatch):
    monkeypatch.setattr(muon_batches, "BATCH_ELEMENTS", 64 * 100)
    batches = cut_into_batches(parts_of([(8, 8)] * 250), get_coefficients("simple", 5))
    assert [len(chunk.parts) for batch in batches for chunk in batch.chunks] == [50] * 5
