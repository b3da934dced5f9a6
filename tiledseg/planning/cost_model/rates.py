"""How fast a machine does a class of layers: measured points, and what lies between them.

A point is the rate at some channels and pixels. Between points the logarithm of the rate is linear in the logarithms of
both; beyond the last ones it stays. Of the ratios of channels (in / out) that were measured the nearest one counts.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

from tiledseg.records import dataclass


class Rate(NamedTuple):
    """Of a forward and of a backward pass: operations a second, or bytes a second of what is bound by memory."""

    forward: float
    backward: float


class Point(NamedTuple):
    """A measured rate: `ratio` of channels in and out, `channels` and `pixels` of the output."""

    ratio: float
    channels: float
    pixels: float
    forward: float
    backward: float


@dataclass(frozen=True)
class Table:
    """The points of one class and precision, sorted."""

    points: tuple[Point, ...]

    @staticmethod
    def of(points: Iterable[Point]) -> Table:
        return Table(tuple(sorted(points)))

    @cached_property
    def _curves(self) -> dict[float, list[tuple[float, _Curve]]]:
        """By logarithm of the ratio: (logarithm of channels, curve over pixels)."""
        found: dict[float, dict[float, _Curve]] = {}
        for ratio, channels, pixels, *rates in self.points:
            curve = found.setdefault(math.log(ratio), {}).setdefault(math.log(channels), [])
            curve.append((math.log(pixels), Rate(*map(math.log, rates))))
        return {ratio: list(curves.items()) for ratio, curves in found.items()}

    def rate(self, ratio: float, channels: float, pixels: float) -> Rate:
        """Between the points. Of no points there is none."""
        wanted, width, size = (math.log(max(value, 1e-9)) for value in (ratio, channels, pixels))
        curves = self._curves[min(self._curves, key=lambda known: abs(known - wanted))]
        return Rate(*map(math.exp, _between([(at, _between(curve, size)) for at, curve in curves], width)))


_Curve = list[tuple[float, Rate]]


def _between(curve: Sequence[tuple[float, Rate]], at: float) -> Rate:
    """On a line through neighbours; beyond the ends as there. Sorted by position."""
    after = bisect_right(curve, at, key=lambda known: known[0])
    if after == 0 or after == len(curve):
        return curve[min(after, len(curve) - 1)][1]
    (low, one), (high, other) = curve[after - 1 : after + 1]
    share = (at - low) / (high - low)
    return Rate(*(a + share * (b - a) for a, b in zip(one, other, strict=True)))
