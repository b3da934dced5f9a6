"""Line charts as values: where lines, ticks and words lie in a drawing of fixed size, for a template to draw."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tiledseg.records import dataclass

WIDTH, HEIGHT = 420, 230
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 34
MOST_POINTS = 400
"""Of a line: more steps than that are averaged, which the eye cannot tell at this size."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A named line of (x, y) points, in order of x; `colour` as CSS has it; `marks`: each point is shown."""

    name: str
    points: Sequence[Point]
    colour: str
    marks: bool = False


@dataclass(frozen=True)
class Tick:
    """Where a tick is, in the drawing, and its words."""

    at: float
    words: str


@dataclass(frozen=True)
class DrawnLine:
    """`path`: points for SVG; `places`: x and y in the drawing, then what they are in words."""

    name: str
    colour: str
    path: str
    marks: bool
    places: tuple[tuple[float, float, str], ...]


@dataclass(frozen=True)
class Chart:
    """Everything that the template draws of a chart."""

    title: str
    unit: str
    lines: tuple[DrawnLine, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]


def draw_chart(
    title: str, unit: str, lines: Sequence[Line], y_range: tuple[float, float] | None = None
) -> Chart | None:
    """Lines over one axis of optimizer steps; None where no line has a point. `y_range`: else that of the points."""
    lines = [Line(line.name, _thinned(line.points), line.colour, line.marks) for line in lines if line.points]
    every = [point for line in lines for point in line.points]
    if not every:
        return None
    x_low, x_high = _ends([x for x, _ in every])
    y_low, y_high = y_range or _ends([y for _, y in every])
    y_ticks = nice_ticks(y_low, y_high, 5)
    if y_range is None:
        step = y_ticks[1] - y_ticks[0]
        y_low, y_high = math.floor(y_low / step) * step, math.ceil(y_high / step) * step
        y_ticks = nice_ticks(y_low, y_high, 5)

    def across(x: float) -> float:
        return round(LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT), 2)

    def down(y: float) -> float:
        return round(HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM), 2)

    drawn = []
    for line in lines:
        places = tuple((across(x), down(y), f"step {_short(x)}: {_short(y)}") for x, y in line.points)
        path = " ".join(f"{x},{y}" for x, y, _ in places)
        drawn.append(DrawnLine(line.name, line.colour, path, line.marks or len(places) == 1, places))
    return Chart(
        title,
        unit,
        tuple(drawn),
        tuple(Tick(across(x), _short(x)) for x in nice_ticks(x_low, x_high, 5)),
        tuple(Tick(down(y), _short(y)) for y in y_ticks),
    )


def nice_ticks(low: float, high: float, most: int) -> list[float]:
    """At least two multiples of 1, 2 or 5 times a power of ten from `low` to `high`, about `most` of them."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    ticks = [(first + k) * step for k in range(int((high - first * step) / step + 1e-9) + 1)]
    return ticks if len(ticks) > 1 else [low, high]


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """The least and the largest, or a range about both where they are one but for rounding, which has no ticks."""
    low, high = min(values), max(values)
    if high - low <= 1e-9 * abs(low):
        pad = abs(low) * 0.1 or 1.0
        return low - pad, high + pad
    return low, high


def _thinned(points: Sequence[Point]) -> list[Point]:
    """At most `MOST_POINTS`: means of neighbours, at the last one's x."""
    size = -(-len(points) // MOST_POINTS)
    groups = (points[start : start + size] for start in range(0, len(points), size))
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]


def _short(value: float) -> str:
    """A number in few letters."""
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.4g}"
