"""The cost of an optimizer step on one image in each halo mode.

The modes give one result. `read`: each tile's context is read from the raster. `exchange`: each rank reads its block,
one exchange of the input brings the rest of its contexts, then its tiles are computed as in `read`. `layer`: each rank
computes its block of every tensor, and halos travel before the layers that need them; with a fusion depth several such
layers share an exchange and compute its overlap twice. Work, messages, bytes and memory are whole numbers that follow
from the geometry; seconds follow from them and a Machine, with nothing hidden behind anything else.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tiledseg.geometry.box import Box
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.layers.declared import WholeLeaf
from tiledseg.geometry.layers.pixelwise import Positions
from tiledseg.geometry.shapes import count_parameters, tensor_channels, tensor_shapes
from tiledseg.geometry.sharing.decomposition import Decomposition, Partition, TileSizes
from tiledseg.geometry.sharing.layer_windows import WHOLE, layer_windows, settle
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
    """A training step: each of `replicas` takes `images` like that of `decomposition`, one after the other, over its
    ranks. `value_bytes`: of a value that is sent or kept."""

    graph: Graph
    bands: int
    decomposition: Decomposition
    value_bytes: int = 4
    images: int = 1
    replicas: int = 1

    @property
    def ranks(self) -> int:
        return self.decomposition.rows.parts * self.decomposition.cols.parts

    @property
    def undivided_work(self) -> int:
        """Multiply-adds of the undivided network on the whole image, forward."""
        return tile_walk(self.graph, self.bands, self.decomposition.whole.shape).work

    def prices(self, machine: Machine) -> Prices:
        return Prices(self.graph, self.bands, self.value_bytes, machine, self.replicas * self.ranks)


@dataclass(frozen=True)
class ModeCost:
    """The cost of a mode on one image. `fusion`: 0 in other modes than `layer`.

    `work`, `work_max`: multiply-adds of a forward pass, of all ranks and of the busiest. `traffic`: of all ranks;
    `busiest`: of the rank that sends most bytes in a step. `norms`: all-reduces of norm statistics, calls and
    bytes a rank. `memory`: peak bytes of a training step on the rank that needs most. `seconds`: predicted
    for one step, of all its images, the all-reduce of gradients included. `read`, `read_max`: pixels of the raster that
    all ranks, and the rank that reads most, read. `time`: the parts of `seconds` on the rank that takes longest, with
    cores of its own.
    """

    mode: str
    fusion: int
    work: int
    work_max: int
    traffic: Traffic
    busiest: Traffic
    norms: Traffic
    memory: int
    seconds: float
    read: int = 0
    read_max: int = 0
    time: StepTime = field(default_factory=StepTime)


class RankCost(NamedTuple):
    """The cost of each of `number` equal ranks on one image: multiply-adds of a forward pass, peak bytes of a training
    step, its seconds, and its messages."""

    work: int
    memory: int
    time: StepTime
    traffic: Traffic = Traffic()
    number: int = 1


def mode_cost(task: Task, machine: Machine, mode: str, fusion: int = 1) -> ModeCost:
    """Return the cost of a step in a halo mode. `fusion` is that of mode `layer`, whose GeometryError it raises.

    Mode `exchange` has one exchange of the input, which needs no gradient. Its ranks also hold the window, where
    several contexts are cut from it, and the block, where that is not the window.
    """
    if mode == "layer":
        return layer_cost(task, machine, fusion)
    graph, bands, width, cut = task.graph, task.bands, task.value_bytes, task.decomposition
    prices, (rows, cols) = task.prices(machine), cut.tile_sizes()
    of_image = whole_bytes(graph, bands, cut.whole.shape)
    tile, kinds, ranks = functools.cache(prices.tile), dict[tuple[TileSizes, TileSizes], RankCost](), list[RankCost]()
    for row, col in itertools.product(rows, cols):  # ranks with tiles of the same sizes cost the same
        if (row, col) not in kinds:
            tiles = [((height, width), above * beside) for height, above in row for width, beside in col]
            walks = {at: tile_walk(graph, bands, at, width) for at, _ in tiles}
            work = sum([walks[at].work for at, _ in tiles])
            memory = max([training_memory(graph, bands, at, width).total for at in walks]) + of_image
            times = [tile(*each).times(count) for each, count in Counter(tiles).items()]
            kinds[row, col] = RankCost(work, memory, sum_of(times))
        ranks.append(kinds[row, col])
    if mode == "read":  # beyond the raster's border contexts are mirrored
        raster, places = Box.of_shape(cut.tiling.raster), itertools.product(*map(range, cut.shape))
        read = [sum([tile.context.clip(raster).area for tile in cut.tiles(*at)]) for at in places]
        return _join_ranks(task, machine, mode, 0, ranks, read, Traffic())
    (row_windows, col_windows), exchanging = cut.context_windows(), list[RankCost]()
    for rank, ((i, j), messages) in zip(ranks, input_traffic(cut, bands, width), strict=True):
        window, owned = row_windows[i].size * col_windows[j].size, cut.owned(i, j).area
        held = window * (len(rows[i]) * len(cols[j]) > 1) + owned * (owned != window)
        time = rank.time._replace(messages=machine.message_seconds(messages, prices.ranks))
        exchanging.append(RankCost(rank.work, rank.memory + held * bands * wide_bytes(width), time, Traffic(messages)))
    return _join_ranks(task, machine, mode, 0, exchanging, _blocks_read(task, cut.rows, cut.cols), Traffic())


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
    return _join_ranks(task, machine, "layer", fusion, ranks, _blocks_read(task, rows, cols), norms)


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


def _join_ranks(
    task: Task, machine: Machine, mode: str, fusion: int, ranks: Sequence[RankCost], read: Sequence[int], norms: Traffic
) -> ModeCost:
    """Join the costs of ranks; `read`: pixels of the raster of each."""
    prices, traffic, busiest, longest = task.prices(machine), Traffic(), Traffic(), StepTime()
    for rank in ranks:
        of_step, most = rank.traffic.step, busiest.step
        busiest = rank.traffic if (of_step.bytes, of_step.messages) > (most.bytes, most.messages) else busiest
        longest = max(longest, rank.time, key=sum)
        traffic += rank.traffic * rank.number
    time = prices.step(longest, task.images, longest.backward)
    return ModeCost(
        mode,
        fusion,
        work=sum([rank.work * rank.number for rank in ranks]),
        work_max=max([rank.work for rank in ranks]),
        traffic=traffic,
        busiest=busiest,
        norms=norms,
        memory=max([rank.memory for rank in ranks]),
        seconds=prices.seconds(time),
        read=sum(read),
        read_max=max(read),
        time=time,
    )


def settled(graph: Graph, decomposition: Decomposition) -> tuple[Partition, Partition]:
    """Cut the input as layer mode does: at the blocks' edges, moved to where the ranks' blocks fit all layers."""
    return settle(graph, decomposition.rows), settle(graph.along_columns, decomposition.cols)


def gradient_bytes(task: Task) -> int:
    """Return the bytes of the all-reduce of gradients: the same in all modes, once a step, in float64
    (docs/decisions/0003)."""
    return DOUBLE_BYTES * count_parameters(task.graph, task.bands, trained=True)


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


def _blocks_read(task: Task, rows: Partition, cols: Partition) -> list[int]:
    """Return the pixels of the raster that each rank reads as a block of the input."""
    origin, raster = task.decomposition.whole, Box.of_shape(task.decomposition.tiling.raster)
    of_rows = [block.shift(origin.row.start).clip(raster.row).size for block in rows.blocks]
    of_cols = [block.shift(origin.col.start).clip(raster.col).size for block in cols.blocks]
    return [height * width for height, width in itertools.product(of_rows, of_cols)]


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


def label(cost: ModeCost) -> str:
    """Return the mode of a cost in words."""
    return mode_words(cost.mode, fusion_word(cost.fusion))
