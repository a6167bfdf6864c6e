"""What of a matrix is orthogonalised together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# The kernels' tiles begin at multiples of 16 bytes, in FP16.
_TILE_ALIGNMENT = 8


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

    @property
    def numel(self) -> int:
        """Elements."""
        return self.rows * self.columns

    @property
    def side(self) -> int:
        """Its smaller side."""
        return min(self.rows, self.columns)

    @property
    def fits_tiles(self) -> bool:
        """Whether the kernels for symmetric products take matrices of this shape."""
        return self.rows % _TILE_ALIGNMENT == 0 and self.columns % _TILE_ALIGNMENT == 0


@dataclass(frozen=True)
class PartRows:
    """Rows of a matrix, as an index into a view of it.

    Attributes:
        view_shape: ``(rows, columns)``, or with rows in two dimensions.
        index: Which of them.
        is_batch: They are as many matrices as the view's first dimension says.
    """

    view_shape: tuple[int, ...]
    index: Any
    is_batch: bool = False

    def shapes(
        self, matrix: int, rows: int, columns: int, factor: Callable[[int, int], float]
    ) -> list[PartShape]:
        """The same as numbers.

        Args:
            matrix: Its number.
            rows, columns: Its shape.
            factor: Scale of the update of a part of so many rows and columns.
        """
        if self.is_batch:
            count = self.view_shape[1]
            scale = factor(count, columns)
            return [
                PartShape(matrix, rows, first, count, count, columns, scale)
                for first in range(0, rows, count)
            ]
        if isinstance(self.index, slice):
            return [PartShape(matrix, rows, 0, rows, rows, columns, factor(rows, columns))]
        groups, period, _ = self.view_shape
        start, end = self.index[1].start, self.index[1].stop
        total = groups * (end - start)
        scale = factor(total, columns)
        return [PartShape(matrix, period, start, end - start, total, columns, scale)]
