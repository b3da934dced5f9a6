"""Pixels put around a tensor, or cut from it."""

from __future__ import annotations

from dataclasses import dataclass

from tiledseg.errors import GeometryError
from tiledseg.geometry.interval import Interval
from tiledseg.geometry.layers.layer import Layer

MIRRORED = ("reflect", "replicate")


@dataclass(frozen=True)
class Border(Layer):
    """A border: `before` positions put before the tensor and `after` after it; negative numbers are cut off.

    `mode`: `constant`, of `value`; `reflect`, the positions beside the end one in reverse; `replicate`, the end one
    again and again.
    """

    before: int
    after: int
    value: float = 0.0
    mode: str = "constant"

    is_padded = True  # or cut on purpose: what it loses at the ends is no remainder

    def required_input(self, out: Interval, index: int = 0) -> Interval:
        return out.shift(-self.before)

    def within(self, read: Interval, size: int) -> Interval:
        """Return also the positions that are mirrored, from the end one on."""
        inside = super().within(read, size)
        if self.mode not in MIRRORED:
            return inside
        ahead, past = (beyond if self.mode == "reflect" else 0 for beyond in (-read.start, read.stop - size))
        if read.start < 0:
            inside = inside.hull(Interval(0, min(size, ahead + 1)))
        if read.stop > size:
            inside = inside.hull(Interval(max(0, size - 1 - past), size))
        return inside

    def output_size(self, size: int, *others: int) -> int:
        if self.mode == "reflect" and max(self.before, self.after) >= size:
            raise GeometryError(
                f"it mirrors {max(self.before, self.after)} positions beside the end one of {size}; give larger images"
            )
        return size + self.before + self.after

    def output_edge(self, edge: int, *others: int) -> int:
        return edge + self.before

    @property
    def padding_after(self) -> int:
        return max(0, self.after)

    @property
    def pads_with_zeros(self) -> bool:
        return self.mode == "constant" and self.value == 0

    @property
    def clamps(self) -> bool:
        return self.mode in MIRRORED

    @property
    def kept_inputs(self) -> tuple[int, ...]:
        return (0,) if self.mode == "replicate" else ()
