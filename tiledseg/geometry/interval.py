"""Half-open intervals of integer pixel positions along one dim."""

from __future__ import annotations

from dataclasses import dataclass

from tiledseg.errors import GeometryError


@dataclass(frozen=True, order=True)
class Interval:
    """The positions `start, ..., stop - 1`. Positions may be negative: before the raster's first pixel."""

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
        """Return the part inside `other`: an empty one, at the nearer end of `other`, if they do not meet."""
        if other.start <= self.start and self.stop <= other.stop:
            return self
        start = min(max(self.start, other.start), other.stop)
        return Interval(start, max(start, min(self.stop, other.stop)))

    def outside(self, other: Interval) -> tuple[int, int]:
        """Count the positions before `other` and those after it."""
        return min(self.size, max(0, other.start - self.start)), min(self.size, max(0, self.stop - other.stop))

    def hull(self, other: Interval) -> Interval:
        """Return the smallest interval that contains both."""
        return Interval(min(self.start, other.start), max(self.stop, other.stop))

    def relative_to(self, origin: int) -> Interval:
        return self.shift(-origin)

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)
