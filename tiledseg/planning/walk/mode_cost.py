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
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tiledseg.geometry.box import Box
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.shapes import count_parameters, tensor_channels
from tiledseg.geometry.sharing.decomposition import Decomposition, Partition, TileSizes
from tiledseg.geometry.sharing.layer_windows import WHOLE, layer_windows, settle
from tiledseg.planning.cost_model.machine import Machine
from tiledseg.planning.cost_model.prices import Prices, StepTime, sum_of
from tiledseg.planning.step.cost import ForwardWalk, layer_costs, rank_walk
from tiledseg.planning.step.rank_steps import SentBytes, Traffic, rank_kinds, sent, swaps
from tiledseg.planning.step.tensor_limit import check_countable, largest_of_block
from tiledseg.planning.walk.step_memory import memory_of, training_memory
from tiledseg.units import DOUBLE_BYTES, wide_bytes

DEPTHS = (1, 2, 4, 8, WHOLE)  # of fusion; depths between them change little


@dataclass(frozen=True)
class Task:
    """A step of one network: `images` like that of `decomposition`, one after the other, over its ranks, and as many in
    each other of `replicas`; `value_bytes` of a value that is sent and kept."""

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
    def input_pixel_bytes(self) -> int:
        return self.bands * wide_bytes(self.value_bytes)

    @property
    def undivided_work(self) -> int:
        """Multiply-adds of the undivided network on the whole image, forward."""
        return sum(c.multiply_adds for c in layer_costs(self.graph, self.bands, self.decomposition.whole.shape))

    def prices(self, machine: Machine) -> Prices:
        return Prices(self.graph, self.bands, self.value_bytes, machine, self.replicas * self.ranks)


@dataclass(frozen=True)
class ModeCost:
    """One mode, on one image. `fusion` is 0 but for layer mode.

    `work`, `work_max`: multiply-adds of a forward pass, of all ranks and of the busiest. `traffic`: of all ranks;
    `busiest`: of the rank that sends most bytes in a step. `norms`: all-reduces of norm statistics, calls and
    bytes a rank. `memory`: peak bytes of a training step on the rank that needs most. `seconds`: predicted
    for one step, of all its images, the all-reduce of gradients included. `read`, `read_max`: pixels of the raster that
    all ranks, and the rank that reads most, read. `time`: the parts of `seconds`, of the rank that takes longest, were
    it not to share its cores with more ranks than there are.
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
    """The cost of a rank on one image, and of how many such ranks: multiply-adds of a forward pass, peak bytes of a
    training step, its seconds, and what it sends."""

    work: int
    memory: int
    time: StepTime
    traffic: Traffic = Traffic()
    number: int = 1


def mode_cost(task: Task, machine: Machine, mode: str, fusion: int = 1) -> ModeCost:
    """Return the cost of a step in a halo mode. `fusion` is that of mode `layer`, whose GeometryError it raises."""
    if mode == "layer":
        return layer_cost(task, machine, fusion)
    cut = task.decomposition
    read = _contexts_read(task) if mode == "read" else _blocks_read(task, cut.rows, cut.cols)
    return _of_ranks(task, machine, mode, 0, _tile_ranks(task, machine, mode == "exchange"), read, Traffic())


def _of_ranks(
    task: Task,
    machine: Machine,
    mode: str,
    fusion: int,
    ranks: Sequence[RankCost],
    read: Sequence[int],
    norms: Traffic,
) -> ModeCost:
    """Join the costs of ranks; `read`: pixels of the raster of each."""
    prices, longest = task.prices(machine), max((rank.time for rank in ranks), key=sum)
    time = prices.step(longest, task.images, longest.backward)
    return ModeCost(
        mode,
        fusion,
        work=sum(rank.work * rank.number for rank in ranks),
        work_max=max(rank.work for rank in ranks),
        traffic=sum((rank.traffic * rank.number for rank in ranks), Traffic()),
        busiest=max((rank.traffic for rank in ranks), key=lambda t: (t.step.bytes, t.step.messages)),
        norms=norms,
        memory=max(rank.memory for rank in ranks),
        seconds=prices.seconds(time),
        read=sum(read),
        read_max=max(read),
        time=time,
    )


def layer_cost(task: Task, machine: Machine, fusion: int) -> ModeCost:
    """Return the cost of mode `layer`. Raises GeometryError where a rank would own nothing of some tensor."""
    graph, bands, width, prices = task.graph, task.bands, task.value_bytes, task.prices(machine)
    rows, cols = settled(graph, task.decomposition)
    check_blocks(graph, rows, cols, fusion, bands)
    norms = statistic_sums(graph, bands, task.ranks)
    sums = StepTime(messages=machine.all_reduce_seconds(norms.step.messages, norms.step.bytes, task.ranks))
    ranks = [
        RankCost(
            walk.work, memory_of(walk).total + walk.besides, sum_of((_time(walk, prices), sums)), walk.traffic, number
        )
        for walk, number in layer_ranks(graph, rows, cols, fusion, bands, width)
    ]
    return _of_ranks(task, machine, "layer", fusion, ranks, _blocks_read(task, rows, cols), norms)


def _time(walk: ForwardWalk, prices: Prices) -> StepTime:
    """Return the time of one image on a rank, without all-reduces."""
    messages = prices.machine.message_seconds(walk.traffic.step, prices.ranks)
    return prices.walked(walk, walk.owned)._replace(messages=messages)


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
    along = rank_kinds(graph, rows, fusion), rank_kinds(graph.along_columns, cols, fusion)
    ranks, kinds = rows.parts * cols.parts, (zip(each.steps, each.counts, strict=True) for each in along)
    return tuple(
        (rank_walk(graph, bands, row, col, ranks, value_bytes), m * n)
        for (row, m), (col, n) in itertools.product(*kinds)
    )


@functools.lru_cache(maxsize=64)
def check_blocks(graph: Graph, rows: Partition, cols: Partition, fusion: int, bands: int) -> None:
    """Raise GeometryError where a tensor of a rank's block in layer mode is too large for a kernel."""
    dims = (graph, rows), (graph.along_columns, cols)
    steps = itertools.product(*(rank_kinds(each, dim, fusion).steps for each, dim in dims))
    shapes = (largest_of_block(graph, bands, row, col) for row, col in steps)
    check_countable(shapes, f"spread the image over more ranks than {rows.parts} x {cols.parts}")


def _tile_ranks(task: Task, machine: Machine, exchanges: bool) -> list[RankCost]:
    """Return the cost of each rank's tiles, calculated once for each kind of block. Mode `exchange` has one exchange of
    the input, which needs no gradient. Its ranks also hold the window, where several contexts are cut from it, and the
    block, where that is not the window."""
    graph, bands, width, cut = task.graph, task.bands, task.value_bytes, task.decomposition
    prices = task.prices(machine)
    tile = functools.cache(prices.tile)

    @functools.cache
    def block(row: TileSizes, col: TileSizes) -> RankCost:
        tiles = Counter(((height, width), of_row * of_col) for height, of_row in row for width, of_col in col)
        works = {at: sum(c.multiply_adds for c in layer_costs(graph, bands, at, width)) for at, _ in tiles}
        return RankCost(
            sum(count * works[at] for (at, _), count in tiles.items()),
            max(training_memory(graph, bands, at, width).total for at in works),
            sum_of([tile(*each).times(count) for each, count in tiles.items()]),
        )

    rows, cols = cut.tile_sizes()
    ranks = {(i, j): block(row, col) for i, row in enumerate(rows) for j, col in enumerate(cols)}
    windows = cut.context_windows()
    for (i, j), messages in input_traffic(cut, bands, width) if exchanges else ():
        rank, seconds = ranks[i, j], machine.message_seconds(messages, prices.ranks)
        window, owned = windows[0][i].size * windows[1][j].size, cut.owned(i, j).area
        held = window * (len(rows[i]) * len(cols[j]) > 1) + owned * (owned != window)
        memory, time = rank.memory + held * task.input_pixel_bytes, rank.time._replace(messages=seconds)
        ranks[i, j] = RankCost(rank.work, memory, time, Traffic(messages))
    return list(ranks.values())


def input_traffic(
    decomposition: Decomposition, bands: int, value_bytes: int
) -> Iterator[tuple[tuple[int, int], SentBytes]]:
    """Yield the messages of the rank at each (row, col) in the one exchange of mode `exchange`. It has no backward
    pass."""
    row_windows, col_windows = decomposition.context_windows()
    rows, cols = swaps(decomposition.rows, row_windows), swaps(decomposition.cols, col_windows)
    for (i, row), (j, col) in itertools.product(enumerate(rows), enumerate(cols)):
        pieces = sent(row, col)
        yield (i, j), SentBytes(len(pieces), sum(pieces) * bands * wide_bytes(value_bytes))


def statistic_sums(graph: Graph, bands: int, ranks: int) -> Traffic:
    """Return the all-reduces of statistics in one step of layer mode: calls, and bytes a rank, in float64.

    Each rank gives count, means and variances of a norm, in a slot of its own. Backward it gives the gradients of the
    mean and of the deviation, which are summed (`models.normalise`). Other layers say how many values they give.
    """
    channels, traffic = tensor_channels(graph, bands), Traffic()
    for layer, sources in zip(graph.layers, graph.sources, strict=True):
        if layer.statistics and ranks > 1:
            forward, backward = layer.shared_values(channels[sources[0]], ranks)
            traffic += Traffic(SentBytes(1, forward * DOUBLE_BYTES), SentBytes(1, backward * DOUBLE_BYTES))
    return traffic


def _contexts_read(task: Task) -> list[int]:
    """Return the pixels of the raster in the contexts of each rank's tiles. Beyond its border they are mirrored."""
    cut, raster = task.decomposition, Box.of_shape(task.decomposition.tiling.raster)
    places = itertools.product(*map(range, cut.shape))
    return [sum(tile.context.clip(raster).area for tile in cut.tiles(*at)) for at in places]


def _blocks_read(task: Task, rows: Partition, cols: Partition) -> list[int]:
    """Return the pixels of the raster that each rank reads as a block of the input."""
    origin, raster = task.decomposition.whole, Box.of_shape(task.decomposition.tiling.raster)
    of_rows = [block.shift(origin.row.start).clip(raster.row).size for block in rows.blocks]
    of_cols = [block.shift(origin.col.start).clip(raster.col).size for block in cols.blocks]
    return [height * width for height, width in itertools.product(of_rows, of_cols)]


def choose_fusion(
    graph: Graph, rows: Partition, cols: Partition, bands: int, value_bytes: int, machine: Machine
) -> int:
    """Return the fusion depth (1, 2, ..., WHOLE) whose training step takes the least predicted time; the smallest of
    equals. `rows`, `cols`: the cut of the input. Raises GeometryError where it cannot be. The same on every rank.
    """
    if rows.parts * cols.parts == 1:
        return 1
    prices = Prices(graph, bands, value_bytes, machine, rows.parts * cols.parts)

    def seconds(fusion: int) -> float:
        ranks = layer_ranks(graph, rows, cols, fusion, bands, value_bytes)
        return max(_time(walk, prices).seconds for walk, _ in ranks)

    dims = (graph, rows), (graph.along_columns, cols)
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
