"""Blocks of a box, and intervals of nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.geometry.drawn import law
from tiledseg.errors import GeometryError
from tiledseg.geometry.box import Box, Interval

boxes = st.builds(Box, *(st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda p: Interval(p[0], sum(p))),) * 2)


def test_a_part_of_what_does_not_meet_is_empty_at_the_nearer_end() -> None:
    assert Interval(0, 2).clip(Interval(5, 9)) == Interval(5, 5)
    assert Interval(12, 14).clip(Interval(5, 9)) == Interval(9, 9)


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
