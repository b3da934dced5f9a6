"""Places to look at: the same for one seed, inside their rasters, and filled by any tiles."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tiledseg.geometry.box import Box, Interval
from tiledseg.training.validation import SIDE, PanelView, choose_views

SHAPES = [(1000, 700), (300, 200), (5000, 5000)]


def test_views_are_drawn_by_the_seed_alone() -> None:
    views = choose_views(SHAPES, 7, 3)
    assert views == choose_views(SHAPES, 7, 3)
    assert views[:4] == choose_views(SHAPES, 4, 3), "one more shows the others too"
    assert views != choose_views(SHAPES, 7, 4)
    assert views[0] == PanelView(0, Box.of_shape((1000, 700)), 4)
    assert {view.image for view in views} == {0, 1, 2}
    for view in views:
        assert Box.of_shape(SHAPES[view.image]).contains(view.box)
        assert max(view.shape) <= SIDE
        assert view.stride == 1 or view == views[0]


@settings(derandomize=True, max_examples=60, deadline=None)
@given(data=st.data(), stride=st.integers(1, 9))
def test_tiles_fill_a_view_with_every_strideth_pixel(data: st.DataObject, stride: int) -> None:
    """Whatever the tiles are: each of its pixels comes once, and is the right one."""
    height, width = (data.draw(st.integers(1, 40)) for _ in range(2))
    sides = []
    for size in (height, width):
        start = data.draw(st.integers(0, size - 1))
        sides.append(Interval(start, data.draw(st.integers(start + 1, size))))
    view = PanelView(0, Box(*sides), stride)
    raster = np.arange(height * width).reshape(height, width)
    picture = np.full(view.shape, -1)
    tile = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    for core in Box.of_shape((height, width)).blocks(*tile):
        part = view.part(core)
        if part is not None:
            to, of = part
            assert (picture[to] == -1).all()
            picture[to] = raster[core.slices][of]
    assert (picture == raster[view.box.slices][::stride, ::stride]).all()
