"""Rates between measured points, by hand."""

from __future__ import annotations

import math

import pytest

from tiledseg.planning.cost_model.rates import Point, Rate, Table

TABLE = Table.of(
    [
        Point(1, 16, 1000, 4.0, 40.0),
        Point(1, 16, 100, 1.0, 10.0),
        Point(1, 64, 100, 9.0, 90.0),
        Point(2, 16, 100, 5.0, 50.0),
    ]
)


@pytest.mark.parametrize(
    ("ratio", "channels", "pixels", "forward"),
    [
        (1, 16, 100, 1.0),
        (1, 16, 1000, 4.0),
        (1, 16, 100 * math.sqrt(10), 2.0),  # half the way, in logarithms
        (1, 16, 1, 1.0),
        (1, 16, 1e9, 4.0),
        (1, 1, 100, 1.0),
        (1, 1000, 100, 9.0),
        (1, 32, 100, 3.0),
        (1, 32, 1000, 6.0),  # between 4 and, beyond the last point, 9
        (1.3, 16, 100, 1.0),
        (1.5, 16, 100, 5.0),  # nearer to 2, in logarithms
        (100, 16, 100, 5.0),
    ],
)
def test_between_points(ratio: float, channels: float, pixels: float, forward: float) -> None:
    found = TABLE.rate(ratio, channels, pixels)
    assert found == Rate(pytest.approx(forward), pytest.approx(10 * forward))


def test_the_order_of_points_does_not_matter() -> None:
    turned = Table.of(reversed(TABLE.points))
    assert turned.rate(1, 23, 456) == TABLE.rate(1, 23, 456)
