"""Laws of who owns what and who sends what to whom, for any partition, layer and windows."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.geometry.drawn import convolutions, law, layers, line, partitions, pools, unets, windows
from tiledseg.errors import GeometryError
from tiledseg.geometry.box import Interval
from tiledseg.geometry.graph import Node
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.layers.convolutions import Convolution
from tiledseg.geometry.layers.layer import Layer
from tiledseg.geometry.layers.resampling import MaxPool
from tiledseg.geometry.sharing.decomposition import (
    Decomposition,
    Partition,
    WindowExchange,
    decompose,
    partition_through,
    plan_exchange,
)
from tiledseg.geometry.tiling import Tiling, finest_grid, make_tiling


def positions(interval: Interval) -> set[int]:
    return set(range(interval.start, interval.stop))


@law
@given(st.integers(1, 200), st.data())
def test_even_blocks_differ_by_one_at_most(size: int, data: st.DataObject) -> None:
    partition = Partition.even(size, data.draw(st.integers(1, size)))
    sizes = [block.size for block in partition.blocks]
    assert sum(sizes) == size
    assert max(sizes) - min(sizes) <= 1


@law
@given(partitions())
def test_blocks_cover_the_whole_once(partition: Partition) -> None:
    assert [partition.owned(i) for i in range(partition.parts)] == list(partition.blocks)
    assert partition.blocks[0].start == 0
    assert partition.blocks[-1].stop == partition.size == partition.whole.size
    assert all(a.stop == b.start for a, b in itertools.pairwise(partition.blocks))
    assert all(block.size > 0 for block in partition.blocks)


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
@given(partitions(), layers)
def test_outputs_belong_to_a_rank_that_holds_some_of_what_they_read(partition: Partition, layer: Layer) -> None:
    out = through(partition, layer)
    assume(out is not None)
    assert out.parts == partition.parts
    assert out.size == layer.output_size(partition.size)
    for own, given_block in zip(partition.blocks, out.blocks, strict=True):
        for output in positions(given_block):
            inside = positions(layer.required_input(Interval(output, output + 1))) & positions(partition.whole)
            assert not inside or inside & positions(own)


@law
@given(partitions(), st.one_of(convolutions(), pools()))
def test_outputs_belong_to_the_rank_that_holds_the_middle_of_what_they_read(partition: Partition, layer: Layer) -> None:
    out = through(partition, layer)
    assume(out is not None)
    for own, given_block in zip(partition.blocks, out.blocks, strict=True):
        for output in positions(given_block):
            read = layer.required_input(Interval(output, output + 1))
            middle = (read.start + read.stop - 1) // 2
            assert min(max(middle, 0), partition.size - 1) in positions(own)


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


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[Partition, tuple[Interval, ...], list[WindowExchange]]:
    partition = draw(partitions())
    wanted = draw(windows(partition))
    return partition, wanted, [plan_exchange(partition, wanted, i) for i in range(partition.parts)]


Exchanges = tuple[Partition, tuple[Interval, ...], list[WindowExchange]]


@law
@given(exchanges())
def test_what_one_receives_is_what_the_other_sends(planned: Exchanges) -> None:
    _, _, sides = planned
    for i, j in itertools.product(range(len(sides)), repeat=2):
        sent = [t.part for t in sides[i].sends if t.peer == j]
        received = [t.part for t in sides[j].receives if t.peer == i]
        assert sent == received
        assert len(sent) <= (0 if i == j else 1)


@law
@given(exchanges())
def test_parts_cover_each_window_within_the_tensor_once(planned: Exchanges) -> None:
    partition, wanted, sides = planned
    for side, window in zip(sides, wanted, strict=True):
        parts = [side.kept, *(t.part for t in side.receives)]
        covered = [position for part in parts for position in positions(part)]
        assert sorted(covered) == sorted(positions(window) & positions(partition.whole))
        assert len(covered) + sum(side.outside) == window.size
        assert side.window == window
        assert side.size == partition.size


@law
@given(exchanges())
def test_every_part_comes_from_its_owner_and_none_is_empty(planned: Exchanges) -> None:
    partition, _, sides = planned
    for index, side in enumerate(sides):
        assert side.owned == partition.owned(index)
        assert side.owned.contains(side.kept) or not side.kept.size
        assert all(side.owned.contains(t.part) and t.part.size for t in side.sends)
        assert all(partition.owned(t.peer).contains(t.part) and t.part.size for t in side.receives)


@law
@given(exchanges())
def test_where_each_wants_its_own_nothing_travels_and_elsewhere_something_is_done(planned: Exchanges) -> None:
    partition, _, sides = planned
    for index in range(partition.parts):
        assert plan_exchange(partition, partition.blocks, index).is_identity
    for side in sides:
        assert side.is_identity == (side.window == side.owned and not side.sends and not side.receives)


def test_a_halo_wider_than_the_neighbours_block_comes_from_several_ranks() -> None:
    partition = Partition((0, 4, 5, 6, 10))
    side = plan_exchange(partition, (Interval(-2, 8), *partition.blocks[1:]), 0)
    assert [(t.peer, t.part) for t in side.receives] == [(1, Interval(4, 5)), (2, Interval(5, 6)), (3, Interval(6, 8))]
    assert side.outside == (2, 0)
    assert side.kept == side.owned


Decomposed = tuple[Tiling, tuple[int, int], Decomposition]


@st.composite
def decompositions(draw: st.DrawFn) -> Decomposed:
    footprint = network_footprint(draw(unets).graph())
    raster = draw(st.tuples(st.integers(1, 120), st.integers(1, 120)))
    grid = tuple(draw(st.integers(1, min(6, most))) for most in finest_grid(raster, footprint))
    shape = tuple(draw(st.integers(1, tiles)) for tiles in grid)
    tiling = make_tiling(raster, grid, footprint)
    return tiling, shape, decompose(tiling, shape)


@law
@given(decompositions())
def test_each_rank_owns_the_cores_of_its_tiles_and_the_blocks_cover_the_image_once(drawn: Decomposed) -> None:
    tiling, shape, image = drawn
    assert image.shape == shape
    seen = []
    for row, col in itertools.product(*map(range, shape)):
        owned, tiles = image.owned(row, col), image.tiles(row, col)
        assert tiles
        assert all(owned.contains(tile.core) for tile in tiles if tile.core.area)
        assert image.whole.contains(owned)
        seen += [tile.index for tile in tiles]
    assert sorted(seen) == [tile.index for tile in tiling.tiles]
    area = sum(image.owned(row, col).area for row, col in itertools.product(*map(range, shape)))
    assert area == image.whole.area


@law
@given(decompositions())
def test_the_context_windows_are_what_the_tiles_of_a_block_read(drawn: Decomposed) -> None:
    _, shape, image = drawn
    rows, cols = image.context_windows()
    start = image.whole.row.start, image.whole.col.start
    for row, col in itertools.product(*map(range, shape)):
        contexts = [tile.context for tile in image.tiles(row, col)]
        assert positions(rows[row].shift(start[0])) == set().union(*(positions(c.row) for c in contexts))
        assert positions(cols[col].shift(start[1])) == set().union(*(positions(c.col) for c in contexts))
        assert image.rows.whole.contains(rows[row])
        assert image.cols.whole.contains(cols[col])


@pytest.mark.parametrize(("shape", "word"), [((3, 1), "rows"), ((1, 5), "columns")])
def test_more_ranks_than_tiles_are_refused(shape: tuple[int, int], word: str) -> None:
    footprint = network_footprint(line(Convolution(1, 3, padding=1)))
    with pytest.raises(GeometryError, match=rf"{max(shape)} {word} of ranks .* at most \[2, 4\]"):
        decompose(make_tiling((40, 40), (2, 4), footprint), shape)
