from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tiledseg.geometry.box import Box, Interval

law = settings(derandomize=True, max_examples=60, deadline=None)
intervals = st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda p: Interval(p[0], p[0] + p[1]))
boxes = st.builds(Box, intervals, intervals)


def mask(box: Box) -> np.ndarray:
    pixels_HW = np.zeros((60, 60), dtype=bool)
    pixels_HW[box.slices] = True
    return pixels_HW


@law
@given(boxes, boxes)
def test_operations_are_those_of_masks(a: Box, b: Box) -> None:
    assert mask(a).sum() == a.area == a.height * a.width
    assert a.shape == (a.height, a.width)
    np.testing.assert_array_equal(mask(a.clip(b)), mask(a) & mask(b))
    np.testing.assert_array_equal(mask(a.shift(3, 5))[3:, 5:], mask(a)[:-3, :-5])
    if a.area and b.area:
        assert a.contains(b) == bool((mask(a) >= mask(b)).all())
        inner = b.clip(a)
        if inner.area:
            np.testing.assert_array_equal(mask(a.relative_to(a))[: a.height, : a.width], True)
            assert Box.of_shape(a.shape).contains(inner.relative_to(a))


@law
@given(boxes, st.integers(1, 7), st.integers(1, 7))
def test_blocks_cover_a_box_once_along_the_files_own_grid(box: Box, height: int, width: int) -> None:
    count_HW = np.zeros((60, 60), dtype=int)
    blocks = list(box.blocks(height, width))
    for block in blocks:
        count_HW[block.slices] += 1
        assert block.row.start // height == (block.row.stop - 1) // height
        assert block.col.start // width == (block.col.stop - 1) // width
    np.testing.assert_array_equal(count_HW, mask(box))
    assert blocks == sorted(blocks)
