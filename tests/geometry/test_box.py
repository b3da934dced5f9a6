"""Intervals and boxes against sets of positions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.geometry.drawn import law
from tiledseg.errors import GeometryError
from tiledseg.geometry.box import Box, Interval

intervals = st.tuples(st.integers(-30, 30), st.integers(0, 30)).map(lambda p: Interval(p[0], p[0] + p[1]))
boxes = st.builds(Box, *(st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda p: Interval(p[0], sum(p))),) * 2)


def positions(interval: Interval) -> set[int]:
    return set(range(interval.start, interval.stop))


@law
@given(intervals, intervals, st.integers(0, 9), st.integers(0, 9))
def test_operations_are_those_of_sets_of_positions(a: Interval, b: Interval, before: int, after: int) -> None:
    assert positions(a.clip(b)) == positions(a) & positions(b)
    assert b.contains(a.clip(b)), "even where nothing meets"
    assert positions(a.hull(b)) >= positions(a) | positions(b)
    assert positions(a.shift(3)) == {p + 3 for p in positions(a)}
    assert positions(a.relative_to(b.start)) == {p - b.start for p in positions(a)}
    grown = a.expand(before, after)
    assert (grown.start, grown.stop) == (a.start - before, a.stop + after)
    assert list(range(200))[grown.shift(40).slice] == [p + 40 for p in range(grown.start, grown.stop)]
    if positions(a) and positions(b):
        assert a.contains(b) == (positions(a) >= positions(b))
        hull = a.hull(b)
        assert {hull.start, hull.stop - 1} <= positions(a) | positions(b)


def test_stop_before_start_names_both() -> None:
    with pytest.raises(GeometryError, match=r"2.*5"):
        Interval(5, 2)


@law
@given(boxes, boxes, st.integers(1, 7), st.integers(1, 7))
def test_boxes_are_intervals_of_rows_and_columns(a: Box, b: Box, height: int, width: int) -> None:
    """Their blocks cover them once, along a file's own grid."""
    assert (a.height, a.width) == a.shape == (a.row.size, a.col.size)
    assert a.area == a.height * a.width
    assert a.clip(b) == Box(a.row.clip(b.row), a.col.clip(b.col))
    assert a.contains(b) == (a.row.contains(b.row) and a.col.contains(b.col))
    assert a.relative_to(a) == Box.of_shape(a.shape)
    count_HW, expected_HW = np.zeros((60, 60), dtype=int), np.zeros((60, 60), dtype=int)
    expected_HW[a.slices] = 1
    blocks = list(a.blocks(height, width))
    for block in blocks:
        count_HW[block.slices] += 1
        assert block.row.start // height == (block.row.stop - 1) // height
        assert block.col.start // width == (block.col.stop - 1) // width
    np.testing.assert_array_equal(count_HW, expected_HW)
    assert blocks == sorted(blocks)
