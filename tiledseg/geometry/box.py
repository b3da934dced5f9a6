"""Half-open intervals of pixel positions along one dim, and boxes of rows x columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tiledseg.errors import GeometryError


@dataclass(frozen=True, order=True)
class Box:
    """Rows x columns of a raster, in raster positions unless a name says otherwise."""

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
        """Cut this box, row-major, at multiples of `height` and `width` in raster positions, as blocks of a tiled
        file."""
        for row in _cuts(self.row, height):
            for col in _cuts(self.col, width):
                yield Box(row, col)


def _cuts(interval: Interval, step: int) -> Iterator[Interval]:
    start = interval.start
    while start < interval.stop:
        stop = min((start // step + 1) * step, interval.stop)
        yield Interval(start, stop)
        start = stop


@dataclass(frozen=True, order=True)
class Interval:
    """The positions `start, ..., stop - 1`. Negative positions lie before the raster's first pixel."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if self.stop < self.start:
            raise GeometryError(f"interval stops at {self.stop}, before its start {self.start}; give start <= stop")

    @property
    def size(self) -> int:
        return self.stop - self.start

    def shift(self, by: int) -> Interval:
        return Interval(self.start + by, self.stop + by)

    def expand(self, before: int, after: int) -> Interval:
        """Grow by `before` positions at the start and `after` at the stop."""
        return Interval(self.start - before, self.stop + after)

    def contains(self, other: Interval) -> bool:
        return self.start <= other.start and other.stop <= self.stop

    def clip(self, other: Interval) -> Interval:
        """Return the part inside `other`; if they do not meet, an empty interval at the nearer end of `other`."""
        if other.start <= self.start and self.stop <= other.stop:
            return self
        start = min(max(self.start, other.start), other.stop)
        return Interval(start, max(start, min(self.stop, other.stop)))

    def outside(self, other: Interval) -> tuple[int, int]:
        """Return the numbers of positions before and after `other`."""
        return min(self.size, max(0, other.start - self.start)), min(self.size, max(0, self.stop - other.stop))

    def hull(self, other: Interval) -> Interval:
        """Return the smallest interval that contains both."""
        if self.start <= other.start and other.stop <= self.stop:
            return self
        return Interval(min(self.start, other.start), max(self.stop, other.stop))

    def relative_to(self, origin: int) -> Interval:
        return self.shift(-origin)

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)
