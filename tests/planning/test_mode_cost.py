"""The cost of the halo modes: against the formulas of the literature, and against sums over every rank and tile; and
the choice of mode and fusion."""

from __future__ import annotations

import functools
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.law.every_layer import EveryLayer, ForeignLayers
from tiledseg.architecture.unet import UNet
from tiledseg.geometry.box import Box
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.layers.joins import ImageProducts
from tiledseg.geometry.shapes import count_parameters, tensor_channels
from tiledseg.geometry.sharing.decomposition import Decomposition, Partition, decompose
from tiledseg.geometry.sharing.layer_windows import WHOLE, layer_blocks
from tiledseg.geometry.tiling import Tiling, make_tiling
from tiledseg.planning.walk.cost import rank_walk, tile_walk
from tiledseg.planning.walk.cost_model import Machine, Prices
from tiledseg.planning.walk.mode_cost import (
    DEPTHS,
    choose_fusion,
    exchange_cost,
    layer_cost,
    read_cost,
)
from tiledseg.planning.walk.rank_steps import rank_steps
from tiledseg.planning.walk.segment_memory import BlockedStep
from tiledseg.planning.walk.step_memory import memory_of, training_memory

MACHINE = Machine()


def cut_of(unet: UNet, size: tuple[int, int], grid: tuple[int, int], mesh: tuple[int, int]) -> Decomposition:
    return decompose(make_tiling(size, grid, network_footprint(unet.graph())), mesh)


def prices_of(unet: UNet, ranks: int) -> Prices:
    return Prices(unet.graph(), unet.bands, 4, MACHINE, ranks)


def pixels_of_raster(tiling: Tiling, box: Box) -> int:
    """How many pixels of a box the raster has, one by one."""
    height, width = tiling.raster
    rows = sum(0 <= row < height for row in range(box.row.start, box.row.stop))
    return rows * sum(0 <= col < width for col in range(box.col.start, box.col.stop))


@functools.cache
def work(unet: UNet, context: tuple[int, int]) -> int:
    return sum(c.multiply_adds for c in tile_walk(unet.graph(), unet.bands, context).costs)


@pytest.mark.parametrize(("levels", "base"), [(2, 8), (5, 64)])
def test_layer_mode_sends_the_volume_of_the_formula(levels: int, base: int) -> None:
    """An interior tile of q px: 4q (c_in + c0 (1 + 4.5 (L - 1))) values forward in 2 (2L - 1) exchanges with eight
    neighbours, and the corners, which the formula leaves out: 4 a channel. Backward as much, but for the input's."""
    q, unet = 512, UNet(levels, base_channels=base)
    layers, partition = unet.graph(), Partition.even(3 * q, 3)
    steps = rank_steps(layers, partition)[1]
    walk, exchanges = rank_walk(layers, unet.bands, steps, steps, 9, 4), 2 * (2 * levels - 1)
    channels = tensor_channels(layers, unet.bands)
    sources = [(layers.sources[k][0], step.inputs[0]) for k, step in enumerate(steps)]
    corners = 4 * sum(channels[source] for source, step in sources if step.moves)
    volume = 4 * q * (unet.bands + base * (1 + 4.5 * (levels - 1)))
    assert (len(walk.sent), sum(walk.sent)) == (8 * exchanges, 4 * int(volume + corners))
    of_input = 4 * unet.bands * (4 * q + 4)
    assert (len(walk.returned), sum(walk.returned)) == (8 * (exchanges - 1), sum(walk.sent) - of_input)


def test_exchange_mode_sends_the_volume_of_the_formula() -> None:
    """An interior tile: c_in ((q + 2h)^2 - q^2) values, once."""
    q, h = 512, 96
    cost = exchange_cost(prices_of(UNet(), 9), cut_of(UNet(), (3 * q, 3 * q), (3, 3), (3, 3)))
    assert (cost.messages_rank, cost.bytes_rank) == (8, 4 * 4 * ((q + 2 * h) ** 2 - q**2))


@pytest.mark.parametrize(("padding", "upsampling"), [("same", "bilinear"), ("valid", "transposed")])
def test_layer_mode_computes_nothing_twice(padding: str, upsampling: str) -> None:
    """E is exactly 1 with a fusion of 1, and rises with the fusion."""
    unet = UNet(3, base_channels=2, padding=padding, upsampling=upsampling)
    cut = cut_of(unet, (203, 331), (3, 4), (3, 4))
    blocks = layer_blocks(cut.tiling, unet.graph(), (3, 4))
    costs = [layer_cost(prices_of(unet, 12), blocks, fusion) for fusion in (1, 2, WHOLE)]
    assert work(unet, cut.whole.shape) == costs[0].work < costs[1].work < costs[2].work
    assert costs[0].messages > costs[1].messages > costs[2].messages


@settings(derandomize=True, max_examples=25, deadline=None)
@given(
    st.sampled_from(["same", "valid"]),
    st.tuples(st.integers(30, 90), st.integers(30, 90)),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.floats(0, 1),
    st.sampled_from([1, 2, WHOLE]),
)
def test_costs_are_sums_and_maxima_over_all_ranks(
    padding: str, size: tuple[int, int], grid: tuple[int, int], share: float, fusion: int
) -> None:
    """What kinds of ranks give, each rank and tile gives when counted one by one."""
    unet = UNet(3, base_channels=2, padding=padding)
    mesh = 1 + round(share * (grid[0] - 1)), 1 + round((1 - share) * (grid[1] - 1))
    cut, graph, ranks = cut_of(unet, size, grid, mesh), unet.graph(), mesh[0] * mesh[1]
    places = list(itertools.product(range(mesh[0]), range(mesh[1])))

    tiles, tiling = {at: [tile.context.shape for tile in cut.tiles(*at)] for at in places}, cut.tiling
    read, exchange = read_cost(prices_of(unet, 3), tiling, 2), exchange_cost(prices_of(unet, ranks), cut)
    assert read.work == exchange.work == sum(work(unet, shape) for shapes in tiles.values() for shape in shapes)
    assert read.memory == max(training_memory(graph, 4, s).total for shapes in tiles.values() for s in shapes)
    assert read.memory <= exchange.memory
    assert read.read == sum(pixels_of_raster(tiling, tile.context) for tile in tiling.tiles)

    blocks = layer_blocks(tiling, graph, mesh, fusion)
    cost = layer_cost(prices_of(unet, ranks), blocks, fusion)
    rows, cols = (rank_steps(graph, each, fusion) for each in (blocks.rows, blocks.cols))
    owned = {at: pixels_of_raster(tiling, cut.owned(*at)) for at in places}
    assert (exchange.read, exchange.read_max) == (size[0] * size[1], max(owned.values()))
    assert cost.read == size[0] * size[1]
    assert cost.read_max >= cost.read / len(places)
    walks = [rank_walk(graph, 4, rows[i], cols[j], ranks, 4) for i, j in places]
    works, sent = [walk.work for walk in walks], [walk.sent + walk.returned for walk in walks]
    assert cost.work == sum(works)
    assert (cost.messages, cost.bytes) == (sum(map(len, sent)), sum(map(sum, sent)))
    assert cost.bytes_rank == max(map(sum, sent))
    assert all(len(walk.sent) >= len(walk.returned) for walk in walks)
    assert cost.memory == max(memory_of(walk).total + walk.besides for walk in walks)
    seconds = [6 * w / MACHINE.flops + MACHINE.message_seconds(s) for w, s in zip(works, sent, strict=True)]
    reduced = MACHINE.all_reduce_seconds(1, 8 * count_parameters(graph, 4), ranks)
    assert cost.seconds == pytest.approx(max(seconds) + reduced)


def test_gradients_and_norms() -> None:
    unet = UNet(3, base_channels=4, norm="instance")
    channels = [4, 4, 8, 8, 16, 16, 8, 8, 4, 4]
    forward, backward = 8 * 4 * sum(1 + 2 * c for c in channels), 8 * sum(2 * c for c in channels)
    expected = 2 * len(channels), forward + backward
    for mesh, norms in (((2, 2), expected), ((1, 1), (0, 0))):
        tiling = make_tiling((200, 200), (2, 2), network_footprint(unet.graph()))
        assert layer_cost(prices_of(unet, 4), layer_blocks(tiling, unet.graph(), mesh), 1).norms == norms


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        *((Machine(), None), (Machine(latency=1e-3), None), (Machine(bandwidth=1e6), None)),
        (Machine(latency=1.0), WHOLE),  # dear messages: one exchange
        (Machine(latency=0, bandwidth=1e15), 1),  # messages for nothing: a thin halo at each layer
    ],
)
def test_no_other_depth_takes_less_time(machine: Machine, expected: int | None) -> None:
    layers = UNet(4, base_channels=8).graph()
    tiling, prices = make_tiling((500, 700), (2, 3), network_footprint(layers)), Prices(layers, 4, 4, machine, 6)
    blocks = layer_blocks(tiling, layers, (2, 3))
    fusion = choose_fusion(prices, blocks)
    seconds = {depth: layer_cost(prices, blocks, depth).seconds for depth in DEPTHS}
    assert seconds[fusion] == min(seconds.values())
    assert fusion == (expected or fusion)
    alone = layer_blocks(tiling, layers, (1, 1))
    assert choose_fusion(Prices(layers, 4, 4, machine), alone) == 1, "a rank without neighbours sends nothing"
    assert fusion == WHOLE or all(seconds[depth] > seconds[fusion] for depth in DEPTHS if depth < fusion)


def test_products_over_an_image_have_a_cost_over_ranks_and_in_blocks() -> None:
    """They take two tensors, and their sums are those of all ranks."""
    graph, bands = ForeignLayers(whole=True).graph(), ForeignLayers.bands
    assert any(isinstance(layer, ImageProducts) for layer in graph.layers)
    tiling = make_tiling((96, 96), (2, 2), network_footprint(graph))
    cost = layer_cost(Prices(graph, bands, 4, MACHINE, 4), layer_blocks(tiling, graph, (2, 2)), 1)
    assert cost.memory < training_memory(graph, bands, tiling.whole.shape).total
    step = BlockedStep(graph, bands, tiling.whole.shape, (1, 1))
    assert step.total(in_file=False) >= training_memory(graph, bands, tiling.whole.shape).weights


@pytest.mark.parametrize("kind", [EveryLayer, ForeignLayers])
def test_each_kept_tensor_of_a_rank_counts_once(kind: type[EveryLayer]) -> None:
    """Windows are freed during the walk: a later tensor in the place of one is another tensor."""
    graph = kind().graph()
    rows, cols = (rank_steps(each, Partition.even(96, 2)) for each in (graph, graph.along_columns))
    for row, col in itertools.product(rows, cols):
        walk = rank_walk(graph, kind.bands, row, col, 4, 4)
        kept = {id(tensor): tensor.memory for run in walk.ran.values() for tensor, _ in run.kept}
        inside = sum(run.large + run.small for run in walk.ran.values())
        assert sum(cost.kept_bytes for cost in walk.costs) == inside + sum(kept.values())
