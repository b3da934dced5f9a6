"""The cost of an optimizer step in each halo mode.

The modes give one result. `read`: tiles are dealt to the ranks, and each tile's context is read from the raster.
`exchange`: each rank reads its block, one exchange of the input brings the rest of its contexts, then it computes tile
by tile. `layer`: each rank computes its block of every tensor, and halos travel before the layers that need them; with
a fusion depth several such layers share an exchange and compute its overlap twice. Work, messages, bytes and memory are
whole numbers that follow from the geometry; seconds follow from them and a Machine, none hidden behind others.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tiledseg.geometry.box import Box
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.layers.declared import WholeLeaf
from tiledseg.geometry.layers.pixelwise import Positions
from tiledseg.geometry.shapes import tensor_channels, tensor_shapes
from tiledseg.geometry.sharing.decomposition import Decomposition, Partition
from tiledseg.geometry.sharing.layer_windows import WHOLE, layer_windows, settle
from tiledseg.geometry.tiling import TileSpan, deal
from tiledseg.planning.walk.cost import ForwardWalk, rank_walk, tile_walk
from tiledseg.planning.walk.cost_model import Machine, Prices, StepTime, sum_of
from tiledseg.planning.walk.rank_steps import (
    RankSteps,
    SentBytes,
    TensorShape,
    Traffic,
    check_countable,
    pieces,
    rank_kinds,
    swaps,
)
from tiledseg.planning.walk.step_memory import memory_of, training_memory
from tiledseg.units import DOUBLE_BYTES, SINGLE_BYTES, wide_bytes

DEPTHS = (1, 2, 4, WHOLE)  # of fusion; depths between them change little


@dataclass(frozen=True)
class Task:
    """A training step on `images` like that of `decomposition`: in mode `read` all images of the step, in other modes
    those that each of `replicas` takes, one after the other. `value_bytes`: of a value that is sent or kept."""

    graph: Graph
    bands: int
    decomposition: Decomposition
    value_bytes: int = 4
    images: int = 1
    replicas: int = 1

    @property
    def ranks(self) -> int:
        return self.decomposition.rows.parts * self.decomposition.cols.parts

    def prices(self, machine: Machine, ranks: int | None = None) -> Prices:
        """Return the prices with so many ranks at work, all that share images unless given."""
        return Prices(self.graph, self.bands, self.value_bytes, machine, ranks or self.replicas * self.ranks)


@dataclass(frozen=True)
class ModeCost:
    """The cost of a training step in a mode. `fusion`: 0 in other modes than `layer`. `ranks`: those that have work.

    Of all ranks on one image: `work`, multiply-adds of a forward pass; `traffic`; `read`, pixels of the raster. Of a
    step: `busiest`, the messages of the rank that sends most bytes; `read_max`, the pixels of the rank that reads most;
    `memory`, peak bytes on the rank that needs most; `seconds`, predicted, the all-reduce of gradients included;
    `time`, the parts of `seconds` on the rank that takes longest, with cores of its own. `norms`: all-reduces of norm
    statistics on one image, calls and bytes a rank.
    """

    mode: str
    ranks: int
    work: int
    traffic: Traffic
    busiest: Traffic
    memory: int
    seconds: float
    time: StepTime
    read: int
    read_max: int
    fusion: int = 0
    norms: Traffic = field(default_factory=Traffic)


class RankCost(NamedTuple):
    """The cost of each of `number` equal ranks on one image, in mode `read` of a step: multiply-adds of a forward pass,
    peak bytes of a training step, its seconds, its messages, and how many backward passes it has."""

    work: int
    memory: int
    time: StepTime
    traffic: Traffic = Traffic()
    number: int = 1
    passes: int = 1


def read_cost(task: Task, machine: Machine, ranks: int, batch: int = 1) -> ModeCost:
    """Return the cost of a step in mode `read`, whose tiles are dealt to `ranks` as a run deals them, in batches of
    `batch`. Beyond the raster's border contexts are mirrored: only pixels inside are read."""
    tiling, number = task.decomposition.tiling, len(task.decomposition.tiling)
    raster, tiles = Box.of_shape(tiling.raster), _tiles_of(tiling.rows, tiling.cols)
    of_rows = [span.context.clip(raster.row).size for span in tiling.rows]
    of_cols = [span.context.clip(raster.col).size for span in tiling.cols]
    read = [height * width for height, width in itertools.product(of_rows, of_cols)]
    shares = [share for share in deal(tiling.contexts * task.images, ranks, batch, task.graph.is_untraced) if share]
    prices, costs = task.prices(machine, len(shares)), list[RankCost]()
    kinds = Counter(tuple(sorted([tiles[tile % number] for tile in share])) for share in shares)
    for kind, count in kinds.items():  # ranks with tiles of the same sizes cost the same
        costs.append(_tiles_cost(prices, kind, tiling.whole.shape, batch)._replace(number=count))
    most = max([sum([read[tile % number] for tile in share]) for share in shares])
    cost = _join_ranks(prices, 1, costs, "read", (sum(read), most))
    return replace(cost, work=cost.work // task.images)


def exchange_cost(task: Task, machine: Machine) -> ModeCost:
    """Return the cost of mode `exchange`: one exchange of the input, which needs no gradient. Ranks also hold the
    window, where several contexts are cut from it, and the block, where that is not the window."""
    bands, width, cut, ranks = task.bands, task.value_bytes, task.decomposition, list[RankCost]()
    prices, (row_windows, col_windows) = task.prices(machine), cut.context_windows()
    of_tiles = functools.cache(lambda tiles: _tiles_cost(prices, tiles, cut.whole.shape))
    for (i, j), messages in input_traffic(cut, bands, width):
        rank = of_tiles(tuple(sorted(_tiles_of(cut.spans(0, i), cut.spans(1, j)))))
        window, owned = row_windows[i].size * col_windows[j].size, cut.owned(i, j).area
        held = window * (rank.passes > 1) + owned * (owned != window)
        time = rank.time._replace(messages=machine.message_seconds(messages, prices.ranks))
        memory = rank.memory + held * bands * wide_bytes(width)
        ranks.append(rank._replace(memory=memory, time=time, traffic=Traffic(messages)))
    return _join_ranks(prices, task.images, ranks, "exchange", _blocks_read(task, cut.rows, cut.cols))


def _tiles_of(rows: Sequence[TileSpan], cols: Sequence[TileSpan]) -> list[tuple[tuple[int, int], int]]:
    """Return the context (height, width) of each tile, and the pixels that it owns."""
    pairs = itertools.product(rows, cols)
    return [((row.context.size, col.context.size), row.core.size * col.core.size) for row, col in pairs]


def _tiles_cost(
    prices: Prices, tiles: Sequence[tuple[tuple[int, int], int]], whole: tuple[int, int], batch: int = 1
) -> RankCost:
    """Return the cost of a rank that computes tiles of an image of (height, width), in batches."""
    of_network, counts = (prices.graph, prices.bands), Counter(tiles)
    work = sum([tile_walk(*of_network, at, prices.width).work * count for (at, _), count in counts.items()])
    memory = max([training_memory(*of_network, at, prices.width).total for at, _ in counts])
    time = sum_of([prices.tile(*tile).times(count) for tile, count in counts.items()])
    return RankCost(work, memory + whole_bytes(*of_network, whole), time, passes=-(-len(tiles) // batch))


def layer_cost(task: Task, machine: Machine, fusion: int) -> ModeCost:
    """Return the cost of mode `layer`. Raises GeometryError where a rank would own nothing of some tensor."""
    graph, bands, width, prices = task.graph, task.bands, task.value_bytes, task.prices(machine)
    rows, cols = settled(graph, task.decomposition)
    of_image = whole_bytes(graph, bands, (rows.size, cols.size))
    norms, ranks = statistic_sums(graph, bands, task.ranks, (rows.size, cols.size), width), list[RankCost]()
    sums = machine.all_reduce_seconds(norms.step.messages, norms.step.bytes, task.ranks)
    for walk, number in layer_ranks(graph, rows, cols, fusion, bands, width):
        time = _rank_time(walk, prices)
        time = time._replace(messages=time.messages + sums)
        memory = memory_of(walk).total + walk.besides + of_image
        ranks.append(RankCost(walk.work, memory, time, walk.traffic, number))
    cost = _join_ranks(prices, task.images, ranks, "layer", _blocks_read(task, rows, cols))
    return replace(cost, fusion=fusion, norms=norms)


def whole_bytes(graph: Graph, bands: int, size: tuple[int, int]) -> int:
    """Return the bytes that each rank holds of a whole image of (height, width): those of positions, and those of a
    leaf that is declared to see the whole image, with its input."""
    whole = [(k, layer) for k, layer in enumerate(graph.layers) if isinstance(layer, Positions | WholeLeaf)]
    shapes, kept = tensor_shapes(graph, bands, *size) if whole else (), 0
    for k, layer in whole:
        if isinstance(layer, Positions):
            values = layer.whole_values
        else:
            values = layer.kept + layer.out_channels + 5 * shapes[graph.sources[k][0]][0]
        kept += SINGLE_BYTES * values * math.prod(shapes[k + 1][1:])
    return kept


def _rank_time(walk: ForwardWalk, prices: Prices) -> StepTime:
    """Return the time of one image on a rank, without all-reduces."""
    messages = prices.machine.message_seconds(walk.traffic.step, prices.ranks)
    return prices.walked(walk, math.prod(walk.made[len(walk.graph)].size))._replace(messages=messages)


def _join_ranks(prices: Prices, images: int, ranks: Sequence[RankCost], mode: str, read: tuple[int, int]) -> ModeCost:
    """Join the costs of ranks, each of which takes `images`. `read`: pixels of the raster that all ranks read of an
    image, and the rank that reads most in a step."""
    traffic, busiest, longest = Traffic(), Traffic(), ranks[0]
    for rank in ranks:
        of_step, most = rank.traffic.step, busiest.step
        busiest = rank.traffic if (of_step.bytes, of_step.messages) > (most.bytes, most.messages) else busiest
        longest = max(longest, rank, key=lambda each: sum(each.time))
        traffic += rank.traffic * rank.number
    time = prices.step(longest.time, images, longest.time.backward / longest.passes)
    return ModeCost(
        mode,
        prices.ranks,
        work=sum([rank.work * rank.number for rank in ranks]),
        traffic=traffic,
        busiest=busiest * images,
        memory=max([rank.memory for rank in ranks]),
        seconds=prices.seconds(time),
        time=time,
        read=read[0],
        read_max=read[1],
    )


def settled(graph: Graph, decomposition: Decomposition) -> tuple[Partition, Partition]:
    """Cut the input as layer mode does: at the blocks' edges, moved to where the ranks' blocks fit all layers."""
    return settle(graph, decomposition.rows), settle(graph.along_columns, decomposition.cols)


@functools.lru_cache(maxsize=64)
def layer_ranks(
    graph: Graph, rows: Partition, cols: Partition, fusion: int, bands: int, value_bytes: int
) -> tuple[tuple[ForwardWalk, int], ...]:
    """Return the walk of each kind of rank in layer mode, and how many there are. Raises GeometryError where a rank
    would own nothing of some tensor."""
    kinds = rank_kinds(graph, rows, fusion).items(), rank_kinds(graph.along_columns, cols, fusion).items()
    ranks = rows.parts * cols.parts
    pairs = [(row, col, above * beside) for (row, above), (col, beside) in itertools.product(*kinds)]
    return tuple([(rank_walk(graph, bands, row, col, ranks, value_bytes), number) for row, col, number in pairs])


def check_blocks(graph: Graph, rows: Partition, cols: Partition, fusion: int, bands: int, value_bytes: int = 4) -> None:
    """Raise GeometryError where a tensor of a rank's block in layer mode is too large for a kernel."""
    ranks = layer_ranks(graph, rows, cols, fusion, bands, value_bytes)
    steps = ((walk.costs[run.first : run.moment + 1], k) for walk, _ in ranks for k, run in walk.ran.items())
    shapes = (TensorShape(graph.nodes[k].name, *cost.shape) for costs, k in steps for cost in costs)
    largest = max(shapes, key=lambda shape: shape.values)
    check_countable(largest, f"spread the image over more ranks than {rows.parts} x {cols.parts}")


def input_traffic(
    decomposition: Decomposition, bands: int, value_bytes: int
) -> Iterator[tuple[tuple[int, int], SentBytes]]:
    """Yield the messages of the rank at each (row, col) in the one exchange of mode `exchange`. It has no backward
    pass."""
    row_windows, col_windows = decomposition.context_windows()
    rows, cols = swaps(decomposition.rows, row_windows), swaps(decomposition.cols, col_windows)
    for (i, row), (j, col) in itertools.product(enumerate(rows), enumerate(cols)):
        sent = pieces((row.kept, *row.sent), (col.kept, *col.sent))
        yield (i, j), SentBytes(len(sent), sum(sent) * bands * wide_bytes(value_bytes))


def statistic_sums(graph: Graph, bands: int, ranks: int, size: tuple[int, int], value_bytes: int) -> Traffic:
    """Return the collective calls of layers in one step of layer mode on an image of `size`: calls, and bytes a rank.

    Each rank gives count, means and variances of a norm, in a slot of its own, in float64. Backward it gives the
    gradients of the mean and of the deviation, which are summed (`models.normalise`). Other layers say how many values
    they give. Attention broadcasts each rank's keys and values, forward and backward, and sums their gradients
    (`models.layers.attention`). A leaf that sees the whole image broadcasts its input, forward alone.
    """
    channels, traffic = tensor_channels(graph, bands), Traffic()
    for layer, sources in zip(graph.layers, graph.sources, strict=True):
        if layer.sees_all and ranks > 1:
            shapes = tensor_shapes(graph, bands, *size)
            passing = sum(math.prod(shapes[source]) for source in sources[1:] or sources)
            once = SentBytes(ranks, passing * value_bytes)
            traffic += Traffic(once, once * len(sources[1:2]) + SentBytes(ranks, passing * wide_bytes(value_bytes)))
        elif layer.statistics and ranks > 1:
            forward, backward = layer.shared_values(channels[sources[0]], ranks)
            traffic += Traffic(SentBytes(1, forward * DOUBLE_BYTES), SentBytes(1, backward * DOUBLE_BYTES))
    return traffic


def _blocks_read(task: Task, rows: Partition, cols: Partition) -> tuple[int, int]:
    """Return the pixels of the raster that all ranks read of an image, and the rank that reads most in a step, as
    blocks of the input."""
    origin, raster = task.decomposition.whole, Box.of_shape(task.decomposition.tiling.raster)
    of_rows = [block.shift(origin.row.start).clip(raster.row).size for block in rows.blocks]
    of_cols = [block.shift(origin.col.start).clip(raster.col).size for block in cols.blocks]
    return sum(of_rows) * sum(of_cols), task.images * max(of_rows) * max(of_cols)


def choose_fusion(
    graph: Graph, rows: Partition, cols: Partition, bands: int, value_bytes: int, machine: Machine
) -> int:
    """Return the fusion depth (1, 2, ..., WHOLE) whose training step takes the least predicted time on the rank with
    most to do; the smallest of equals. `rows`, `cols`: the cut of the input. Raises GeometryError where it cannot be.
    The same on every rank.
    """
    if rows.parts * cols.parts == 1:
        return 1
    ranks, dims = rows.parts * cols.parts, ((graph, rows), (graph.along_columns, cols))
    prices = Prices(graph, bands, value_bytes, machine, ranks)

    def read(kind: RankSteps) -> int:
        return sum(each.window for step in kind for each in step.inputs)

    def sent(kind: RankSteps) -> int:
        return sum(sum(each.swap.sent) for step in kind for each in step.inputs)

    def seconds(fusion: int) -> float:
        kinds = [rank_kinds(each, cut, fusion) for each, cut in dims]
        busiest = {(max(kinds[0], key=load), max(kinds[1], key=load)) for load in (read, sent)}
        return max(sum(_rank_time(rank_walk(graph, bands, *kind, ranks, value_bytes), prices)) for kind in busiest)

    halos = max(sum(at.exchanges for at in layer_windows(each, partition)) for each, partition in dims)
    return min((depth for depth in DEPTHS if depth in (1, WHOLE) or depth < halos), key=seconds)


def fusion_word(fusion: int) -> int | str | None:
    """Return the depth; "whole" for one exchange of the input; None for 0, of the other modes."""
    return "whole" if fusion >= WHOLE else fusion or None


def mode_words(mode: str, fusion: int | str | None) -> str:
    """Return the mode with its fusion (as `fusion_word` gives it), where an exchange serves several layers."""
    return mode if fusion in (None, 1) else f"{mode}, fusion {fusion}"
