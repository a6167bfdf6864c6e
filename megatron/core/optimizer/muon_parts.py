"""What of a matrix is orthogonalised together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PartShape:
    """Rows of a matrix that are orthogonalised together.

    Attributes:
        matrix: Number of the matrix.
        period, start, count: Of every ``period`` rows the ``count`` from ``start``.
        rows: All its rows together.
        columns: Columns.
        factor: Scale of its update.
    """

    matrix: int
    period: int
    start: int
    count: int
    rows: int
    columns: int
    factor: float
