"""Half-open boxes of pixels: an interval of rows and an interval of columns, in this order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tiledseg.geometry.interval import Interval


@dataclass(frozen=True, order=True)
class Box:
    """Rows x columns of a raster, in absolute raster positions unless a name says otherwise."""

    row: Interval
    col: Interval

    @staticmethod
    def of_shape(shape: tuple[int, int]) -> Box:
        """Return the box of a whole raster of `shape` (height, width)."""
        return Box(Interval(0, shape[0]), Interval(0, shape[1]))

    @property
    def height(self) -> int:
        return self.row.size

    @property
    def width(self) -> int:
        return self.col.size

    @property
    def shape(self) -> tuple[int, int]:
        return self.row.size, self.col.size

    @property
    def area(self) -> int:
        return self.row.size * self.col.size

    @property
    def slices(self) -> tuple[slice, slice]:
        return self.row.slice, self.col.slice

    def shift(self, row: int, col: int) -> Box:
        return Box(self.row.shift(row), self.col.shift(col))

    def contains(self, other: Box) -> bool:
        return self.row.contains(other.row) and self.col.contains(other.col)

    def clip(self, other: Box) -> Box:
        return Box(self.row.clip(other.row), self.col.clip(other.col))

    def relative_to(self, origin: Box) -> Box:
        """Return the same pixels, counted from the first row and column of `origin`."""
        return self.shift(-origin.row.start, -origin.col.start)

    def blocks(self, height: int, width: int) -> Iterator[Box]:
        """Cut this box, row-major, along the absolute multiples of `height` and `width`: blocks of a tiled file."""
        for row in _cuts(self.row, height):
            for col in _cuts(self.col, width):
                yield Box(row, col)


def _cuts(interval: Interval, step: int) -> Iterator[Interval]:
    start = interval.start
    while start < interval.stop:
        stop = min((start // step + 1) * step, interval.stop)
        yield Interval(start, stop)
        start = stop
