"""Laws of who owns what and who sends what to whom, for any partition, layer and windows."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from tests.geometry.drawn import law, layers, line, partitions, unets
from tiledseg.errors import GeometryError
from tiledseg.geometry.box import Interval
from tiledseg.geometry.graph import Graph, Node
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.layers.convolutions import Convolution
from tiledseg.geometry.layers.layer import Layer
from tiledseg.geometry.sharing.decomposition import (
    Decomposition,
    MeshPosition,
    MeshShape,
    Partition,
    decompose,
)
from tiledseg.geometry.sharing.layer_windows import partitions_of
from tiledseg.geometry.tiling import finest_grid, make_tiling


def positions(interval: Interval) -> set[int]:
    return set(range(interval.start, interval.stop))


def test_what_shares_nothing_is_refused() -> None:
    for edges in ((0,), (1, 4), (0, 3, 3)):
        with pytest.raises(GeometryError, match="give edges that rise from 0"):
            Partition(edges)
    for sides in ((0, 1, 1, 1), (1, 1, 1, 0)):
        with pytest.raises(GeometryError, match="give at least 1 along each axis"):
            MeshShape(*sides)


@st.composite
def decompositions(draw: st.DrawFn) -> Decomposition:
    footprint = network_footprint(draw(unets).graph())
    raster = draw(st.tuples(st.integers(1, 120), st.integers(1, 120)))
    grid = tuple(draw(st.integers(1, min(6, most))) for most in finest_grid(raster, footprint))
    return decompose(make_tiling(raster, grid, footprint), tuple(draw(st.integers(1, tiles)) for tiles in grid))


@pytest.mark.parametrize(("shape", "word"), [((3, 1), "rows"), ((1, 5), "columns")])
def test_more_ranks_than_tiles_are_refused(shape: tuple[int, int], word: str) -> None:
    footprint = network_footprint(line(Convolution(1, 3, padding=1)))
    with pytest.raises(GeometryError, match=rf"{max(shape)} {word} of ranks .* at most \[2, 4\]"):
        decompose(make_tiling((40, 40), (2, 4), footprint), shape)


@law
@given(partitions(), layers)
def test_outputs_belong_to_a_rank_that_holds_what_they_read(partition: Partition, layer: Layer) -> None:
    """The middle of it, of convolutions and poolings; some of it, of others. Where inputs give windows of outputs, the
    rank of the input whose window's centre is nearest."""
    try:
        out = partitions_of(Graph((Node("layer", layer),)), partition)[1]
    except GeometryError:
        reject()
    assert (out.parts, out.size) == (partition.parts, layer.output_size(partition.size))
    for own, given_block in zip(partition.blocks, out.blocks, strict=True):
        for output in positions(given_block):
            read = layer.required_input(Interval(output, output + 1))
            inside = positions(read) & positions(partition.whole)
            assert not inside or inside & positions(own)
            if layer.window.transposed:
                centres = [
                    at * layer.window.stride - layer.window.padding + layer.window.reach / 2
                    for at in positions(partition.whole)
                ]
                distances = [abs(output - centre) for centre in centres]
                assert min(distances[own.slice]) == min(distances)
            else:
                middle = (read.start + read.stop - 1) // 2
                assert min(max(middle, 0), partition.size - 1) in positions(own)


@law
@given(decompositions())
def test_each_rank_owns_the_cores_of_its_tiles_and_reads_their_contexts(image: Decomposition) -> None:
    rows, cols = image.context_windows()
    start = image.whole.row.start, image.whole.col.start
    seen, area = [], 0
    for row, col in itertools.product(*map(range, image.shape)):
        owned, tiles = image.owned(row, col), image.tiles(row, col)
        assert tiles
        assert all(owned.contains(tile.core) for tile in tiles if tile.core.area)
        seen += [tile.index for tile in tiles]
        area += owned.area
        assert positions(rows[row].shift(start[0])) == set().union(*(positions(t.context.row) for t in tiles))
        assert positions(cols[col].shift(start[1])) == set().union(*(positions(t.context.col) for t in tiles))
    assert sorted(seen) == list(range(len(image.tiling)))
    assert area == image.whole.area


@law
@given(st.builds(MeshShape, *[st.integers(1, 5)] * 4), st.integers(0, 10))
def test_each_place_has_one_rank_and_groups_share_what_they_are_named_for(shape: MeshShape, beyond: int) -> None:
    """Stages count first, replicas last; ranks beyond the mesh own nothing."""
    counts = map(range, (shape.replicas, shape.rows, shape.cols, shape.stages))
    places = [MeshPosition(*place) for place in itertools.product(*counts)]
    assert [shape.rank_at(place) for place in places] == list(range(shape.ranks))
    assert [shape.position(rank) for rank in range(shape.ranks)] == places
    assert shape.position(shape.ranks + beyond) is None
    for rank, here in enumerate(places):
        assert [places[r] for r in shape.pipeline(rank)] == [here._replace(stage=s) for s in range(shape.stages)]
        assert {places[r].stage for r in shape.holders(here.stage)} == {here.stage}
        assert rank in shape.holders(here.stage)
        assert places[shape.blocks(here.replica, here.stage)[here.row * shape.cols + here.col]] == here
