"""Pixels put around a tensor, or cut from it."""

from __future__ import annotations

from dataclasses import dataclass

from tiledseg.geometry.interval import Interval
from tiledseg.geometry.layer import Layer


@dataclass(frozen=True)
class Border(Layer):
    """`before` positions of `value` put before the tensor and `after` after it; negative numbers are cut off."""

    before: int
    after: int
    value: float = 0.0

    def required_input(self, out: Interval, index: int = 0) -> Interval:
        return out.shift(-self.before)

    def output_size(self, size: int, *others: int) -> int:
        return size + self.before + self.after

    def output_edge(self, edge: int, *others: int) -> int:
        return edge + self.before

    @property
    def is_padded(self) -> bool:
        return True  # or cut on purpose: what it loses at the ends is no remainder

    @property
    def pads_with_zeros(self) -> bool:
        return self.value == 0

    @property
    def gradient(self) -> str:
        return "parts"

    @property
    def returns_view(self) -> bool:
        return self.before <= 0 and self.after <= 0
