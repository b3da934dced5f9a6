"""Laws of who owns what and who sends what to whom, for any partition, layer and windows."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.geometry.drawn import law, layers, line, partitions, unets, windows
from tiledseg.errors import GeometryError
from tiledseg.geometry.box import Interval
from tiledseg.geometry.graph import Node
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.layers.convolutions import Convolution, SlidingWindow
from tiledseg.geometry.layers.layer import Layer
from tiledseg.geometry.layers.resampling import MaxPool
from tiledseg.geometry.sharing.decomposition import (
    Decomposition,
    MeshPosition,
    MeshShape,
    Partition,
    decompose,
    partition_through,
    plan_exchange,
)
from tiledseg.geometry.tiling import Tiling, finest_grid, make_tiling


def positions(interval: Interval) -> set[int]:
    return set(range(interval.start, interval.stop))


@pytest.mark.parametrize("edges", [(0,), (1, 4), (0, 3, 3), (0, 5, 4, 8), (0, 0)])
def test_edges_that_do_not_rise_from_0_are_refused(edges: tuple[int, ...]) -> None:
    with pytest.raises(GeometryError, match="give edges that rise from 0"):
        Partition(edges)


def through(partition: Partition, layer: Layer) -> Partition | None:
    try:
        return partition_through(Node("pool3", layer), [partition])
    except GeometryError:
        return None


@law
@given(partitions(largest=20), layers)
def test_a_partition_is_refused_only_where_a_rank_would_own_no_output(partition: Partition, layer: Layer) -> None:
    """The edges are right by the tests above, so that an empty block between them is the only ground."""
    edges = [0, *(layer.output_edge(edge) for edge in partition.edges[1:-1]), layer.output_size(partition.size)]
    size = edges[-1]
    empty = any(min(max(a, 0), size) >= min(max(b, 0), size) for a, b in itertools.pairwise(edges))
    assert (through(partition, layer) is None) == empty


def test_the_refusal_names_layer_ranks_and_remedy() -> None:
    with pytest.raises(GeometryError, match=r"'pool' gives 2 .* 3 ranks share, and none .* rank 1 .* use fewer"):
        partition_through(Node("pool", MaxPool()), [Partition((0, 3, 4, 5))])
    with pytest.raises(GeometryError, match="'conv' gives 0 positions"):
        partition_through(Node("conv", Convolution(1, 7)), [Partition((0, 2, 3))])


def test_a_halo_wider_than_the_neighbours_block_comes_from_several_ranks() -> None:
    partition = Partition((0, 4, 5, 6, 10))
    side = plan_exchange(partition, (Interval(-2, 8), *partition.blocks[1:]), 0)
    assert side.receives == {0: side.owned, 1: Interval(4, 5), 2: Interval(5, 6), 3: Interval(6, 8)}
    assert side.outside == (2, 0)


Decomposed = tuple[Tiling, tuple[int, int], Decomposition]


@st.composite
def decompositions(draw: st.DrawFn) -> Decomposed:
    footprint = network_footprint(draw(unets).graph())
    raster = draw(st.tuples(st.integers(1, 120), st.integers(1, 120)))
    grid = tuple(draw(st.integers(1, min(6, most))) for most in finest_grid(raster, footprint))
    shape = tuple(draw(st.integers(1, tiles)) for tiles in grid)
    tiling = make_tiling(raster, grid, footprint)
    return tiling, shape, decompose(tiling, shape)


@pytest.mark.parametrize(("shape", "word"), [((3, 1), "rows"), ((1, 5), "columns")])
def test_more_ranks_than_tiles_are_refused(shape: tuple[int, int], word: str) -> None:
    footprint = network_footprint(line(Convolution(1, 3, padding=1)))
    with pytest.raises(GeometryError, match=rf"{max(shape)} {word} of ranks .* at most \[2, 4\]"):
        decompose(make_tiling((40, 40), (2, 4), footprint), shape)


@law
@given(partitions(), st.integers(1, 200), st.data())
def test_blocks_cover_the_whole_once_and_even_ones_differ_by_one_at_most(
    partition: Partition, size: int, data: st.DataObject
) -> None:
    even = Partition.even(size, data.draw(st.integers(1, size)))
    sizes = [block.size for block in even.blocks]
    assert max(sizes) - min(sizes) <= 1
    for each in (partition, even):
        assert [each.owned(i) for i in range(each.parts)] == list(each.blocks)
        assert (each.blocks[0].start, each.blocks[-1].stop) == (0, each.size)
        assert all(a.stop == b.start for a, b in itertools.pairwise(each.blocks))
        assert all(block.size > 0 for block in each.blocks)


@law
@given(partitions(), layers)
def test_outputs_belong_to_a_rank_that_holds_what_they_read(partition: Partition, layer: Layer) -> None:
    """The middle of it, of convolutions and poolings; some of it, of others."""
    out = through(partition, layer)
    assume(out is not None)
    assert (out.parts, out.size) == (partition.parts, layer.output_size(partition.size))
    for own, given_block in zip(partition.blocks, out.blocks, strict=True):
        for output in positions(given_block):
            read = layer.required_input(Interval(output, output + 1))
            inside = positions(read) & positions(partition.whole)
            assert not inside or inside & positions(own)
            if isinstance(layer, SlidingWindow):
                middle = (read.start + read.stop - 1) // 2
                assert min(max(middle, 0), partition.size - 1) in positions(own)


@law
@given(partitions(), st.data())
def test_each_window_is_covered_once_by_parts_of_their_owners(partition: Partition, data: st.DataObject) -> None:
    """One receives what the other sends; where each wants its own, nothing travels."""
    wanted = data.draw(windows(partition))
    sides = [plan_exchange(partition, wanted, index) for index in range(partition.parts)]
    for index, (side, window) in enumerate(zip(sides, wanted, strict=True)):
        covered = [position for part in side.receives.values() for position in positions(part)]
        assert sorted(covered) == sorted(positions(window) & positions(partition.whole))
        assert len(covered) + sum(side.outside) == window.size
        assert (side.window, side.size, side.owned) == (window, partition.size, partition.owned(index))
        assert all(side.owned.contains(part) and part.size for part in side.sends.values())
        assert all(partition.owned(peer).contains(part) and part.size for peer, part in side.receives.items())
        assert side.is_identity == (side.window == side.owned and {*side.sends} == {*side.receives} == {index})
        assert plan_exchange(partition, partition.blocks, index).is_identity
        assert all(other.sends.get(index) == side.receives.get(peer) for peer, other in enumerate(sides))


@law
@given(decompositions())
def test_each_rank_owns_the_cores_of_its_tiles_and_reads_their_contexts(drawn: Decomposed) -> None:
    tiling, shape, image = drawn
    assert image.shape == shape
    rows, cols = image.context_windows()
    start = image.whole.row.start, image.whole.col.start
    seen, area = [], 0
    for row, col in itertools.product(*map(range, shape)):
        owned, tiles = image.owned(row, col), image.tiles(row, col)
        assert tiles
        assert all(owned.contains(tile.core) for tile in tiles if tile.core.area)
        assert image.whole.contains(owned)
        seen += [tile.index for tile in tiles]
        area += owned.area
        assert positions(rows[row].shift(start[0])) == set().union(*(positions(t.context.row) for t in tiles))
        assert positions(cols[col].shift(start[1])) == set().union(*(positions(t.context.col) for t in tiles))
        assert image.rows.whole.contains(rows[row])
        assert image.cols.whole.contains(cols[col])
    assert sorted(seen) == [tile.index for tile in tiling.tiles]
    assert area == image.whole.area


@pytest.mark.parametrize("sides", [(0, 1, 1, 1), (1, 0, 2, 1), (2, 2, -1, 1), (1, 1, 1, 0)])
def test_an_axis_without_ranks_is_refused(sides: tuple[int, ...]) -> None:
    with pytest.raises(GeometryError, match="give at least 1 along each axis"):
        MeshShape(*sides)


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
