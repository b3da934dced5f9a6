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
@given(intervals, intervals)
def test_operations_are_those_of_sets_of_positions(a: Interval, b: Interval) -> None:
    assert positions(a.clip(b)) == positions(a) & positions(b)
    assert b.contains(a.clip(b)), "even where nothing meets"
    assert positions(a.hull(b)) >= positions(a) | positions(b)
    assert positions(a.relative_to(b.start)) == {p - b.start for p in positions(a)}
    assert a.expand(2, 5) == Interval(a.start - 2, a.stop + 5)
    assert list(range(200))[a.shift(40).slice] == [p + 40 for p in sorted(positions(a))]
    if positions(a) and positions(b):
        assert a.contains(b) == (positions(a) >= positions(b))
        hull = a.hull(b)
        assert {hull.start, hull.stop - 1} <= positions(a) | positions(b)


def test_stop_before_start_names_both() -> None:
    with pytest.raises(GeometryError, match=r"2.*5"):
        Interval(5, 2)


@law
@given(boxes, st.integers(1, 7), st.integers(1, 7))
def test_blocks_cover_a_box_once_along_a_files_own_grid(box: Box, height: int, width: int) -> None:
    count_HW, expected_HW = np.zeros((60, 60), dtype=int), np.zeros((60, 60), dtype=int)
    expected_HW[box.slices] = 1
    assert box.area == expected_HW.sum()
    for block in box.blocks(height, width):
        count_HW[block.slices] += 1
        assert block.row.start // height == (block.row.stop - 1) // height
        assert block.col.start // width == (block.col.stop - 1) // width
    np.testing.assert_array_equal(count_HW, expected_HW)
