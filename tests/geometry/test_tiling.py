"""Laws of the tiling, for any raster, grid and network."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.geometry.drawn import law, unets
from tiledseg.architecture.unet import UNet
from tiledseg.errors import GeometryError
from tiledseg.geometry.box import Box, Interval
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.halo import Footprint, minimum_halo, network_footprint, round_up
from tiledseg.geometry.shapes import output_size, required_input
from tiledseg.geometry.tiling import Tiling, context_sizes, finest_grid, make_tiling

sides = st.one_of(st.integers(1, 90), st.sampled_from([1, 2, 31, 97, 127, 128, 129]))


@functools.cache
def footprint_of(unet: UNet) -> tuple[Graph, Footprint]:
    return unet.graph(), network_footprint(unet.graph())


@st.composite
def cases(draw: st.DrawFn) -> tuple[Graph, Tiling]:
    """A network with its own halo or a wider one, and any legal grid on any raster."""
    unet = draw(unets)
    layers, footprint = footprint_of(unet)
    if draw(st.booleans()):
        footprint = network_footprint(layers, max(minimum_halo(layers)) + draw(st.integers(0, 20)))
    raster = draw(sides), draw(sides)
    rows, cols = finest_grid(raster, footprint)
    grid = draw(st.integers(1, min(rows, 9))), draw(st.integers(1, min(cols, 9)))
    return layers, make_tiling(raster, grid, footprint)


@law
@given(unets, st.tuples(sides, sides))
def test_a_grid_finer_than_the_alignment_names_both_values(unet: UNet, raster: tuple[int, int]) -> None:
    _, footprint = footprint_of(unet)
    rows, cols = finest_grid(raster, footprint)
    assert len(make_tiling(raster, (rows, 1), footprint)) == rows
    for grid, side, parts in (((rows + 1, 1), raster[0], rows + 1), ((1, cols + 1), raster[1], cols + 1)):
        with pytest.raises(GeometryError, match=rf"{parts} tiles along {side} .* alignment of {footprint.alignment} "):
            make_tiling(raster, grid, footprint)


def test_the_papers_raster() -> None:
    tiling = make_tiling((10000, 10000), (8, 8), network_footprint(UNet(levels=5).graph()))
    assert tiling.core_max == (1264, 1264)
    assert tiling.context_max == (1440, 1440)


@law
@given(cases())
def test_cores_cover_every_pixel_once_in_even_aligned_tiles_row_by_row(case: tuple[Graph, Tiling]) -> None:
    _, tiling = case
    unit, (rows, cols) = tiling.footprint.alignment, tiling.grid
    assert [(t.index, t.position) for t in tiling.tiles] == [(i, divmod(i, cols)) for i in range(rows * cols)]
    assert [t.core for t in tiling.tiles] == sorted(t.core for t in tiling.tiles)
    count_HW, units = np.zeros(tiling.raster, dtype=int), set[tuple[int, int]]()
    for tile in tiling.tiles:
        assert Box.of_shape(tiling.raster).contains(tile.core)
        count_HW[tile.core.slices] += 1
        units.add((round_up(tile.core.height, unit) // unit, round_up(tile.core.width, unit) // unit))
        for side, end in ((tile.core.row, tiling.raster[0]), (tile.core.col, tiling.raster[1])):
            assert side.start % unit == 0
            assert side.stop % unit == 0 or side.stop == end
    assert (count_HW == 1).all()
    assert all(min(sizes) > 0 and max(sizes) - min(sizes) <= 1 for sizes in zip(*units, strict=True))


@law
@given(cases())
def test_a_context_is_a_legal_input_that_holds_all_that_its_core_depends_on(case: tuple[Graph, Tiling]) -> None:
    """And every tile sees the pooling grid of the whole raster."""
    layers, tiling = case
    unit = tiling.footprint.alignment
    sides = zip(tiling.raster, tiling.grid, strict=True)
    (height, rows), (width, cols) = (context_sizes(side, parts, tiling.footprint) for side, parts in sides)
    assert (height, width) == tiling.context_max
    assert rows * cols == sum(tile.context.area for tile in tiling.tiles)
    for tile, dim in itertools.product(tiling.tiles, ("row", "col")):
        boxes = tile.core, tile.context, tile.output, tile.core_in_output, tiling.whole
        core, context, output, inner, whole = (getattr(box, dim) for box in boxes)
        assert output_size(layers, context.size) == output.size
        assert output.contains(core)
        assert inner.shift(output.start) == core
        assert (context.start - whole.start) % unit == 0
        need = required_input(layers, inner).shift(context.start)  # in absolute positions
        if tiling.footprint.mirror:
            assert context.contains(need)
            continue
        # A padded network pads beyond the extended raster, as it does when it is given the whole of it.
        extended = Interval(0, round_up(tiling.raster[dim == "col"], unit))
        assert need == required_input(layers, core)
        assert context.contains(need.clip(extended))
        assert whole == extended
        assert whole.contains(context)
        assert output == context


def test_an_empty_raster_or_grid_is_refused() -> None:
    with pytest.raises(GeometryError, match="raster has 0 "):
        make_tiling((10, 0), (1, 1), Footprint(16, 96, 96))
    with pytest.raises(GeometryError, match="grid has 0 tiles"):
        make_tiling((100, 100), (1, 0), Footprint(16, 96, 96))
