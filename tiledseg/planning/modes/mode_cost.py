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
from dataclasses import dataclass
from typing import NamedTuple

from tiledseg.geometry.box import Box
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.shapes import count_trained, tensor_channels
from tiledseg.geometry.sharing.decomposition import Decomposition, Partition, TileSizes
from tiledseg.geometry.sharing.layer_windows import WHOLE, layer_windows, settle
from tiledseg.planning.cost_model.machine import Machine
from tiledseg.planning.cost_model.prices import Prices
from tiledseg.planning.cost_model.step_time import NO_TIME, StepTime, sum_of
from tiledseg.planning.step.cost import backward_passes, layer_costs
from tiledseg.planning.step.halo_traffic import (
    SentBytes,
    Traffic,
    input_tensor,
    input_traffic,
    layer_traffic,
    statistic_sums,
    tensors_of,
)
from tiledseg.planning.step.rank_steps import RankSteps, rank_kinds
from tiledseg.planning.step.tensor_limit import check_countable, largest_of_block
from tiledseg.planning.walk.step_memory import training_memory

DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, WHOLE)  # of fusion; depths between them change little
GRADIENT_BYTES = 8  # a weight's gradient is summed in float64 (docs/decisions/0003)


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
        return input_tensor(self.bands, self.value_bytes).pixel_bytes

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
    time: StepTime = NO_TIME


def mode_cost(task: Task, machine: Machine, mode: str, fusion: int = 1) -> ModeCost:
    """Return the cost of a step in a halo mode. `fusion` is that of mode `layer`, whose GeometryError it raises."""
    return layer_cost(task, machine, fusion) if mode == "layer" else _tile_cost(task, machine, mode)


def _tile_cost(task: Task, machine: Machine, mode: str) -> ModeCost:
    """Return the cost of mode `read`, which sends nothing, or of `exchange`: the work of `read`, and one exchange of
    the input, which needs no gradient."""
    ranks, prices, exchanges = _tile_ranks(task, machine), task.prices(machine), mode == "exchange"
    sent = dict(input_traffic(task.decomposition, task.bands, task.value_bytes)) if exchanges else {}
    held = _input_memory(task) if exchanges else {}
    times = [rank.time._replace(messages=prices.messages(sent.get(at, SentBytes()))) for at, rank in ranks.items()]
    longest = prices.longest(times)
    time = prices.step(longest, task.images, longest.backward)
    if exchanges:
        read, read_max = _blocks_read(task, task.decomposition.rows, task.decomposition.cols)
    else:
        contexts = _contexts_read(task)
        read, read_max = sum(contexts), max(contexts)
    works = [rank.work for rank in ranks.values()]
    return ModeCost(
        mode=mode,
        fusion=0,
        work=sum(works),
        work_max=max(works),
        traffic=Traffic(sum(sent.values(), SentBytes())),
        busiest=Traffic(max(sent.values(), key=lambda each: (each.bytes, each.messages), default=SentBytes())),
        norms=Traffic(),
        memory=max(rank.memory + held.get(at, 0) for at, rank in ranks.items()),
        seconds=prices.seconds(time),
        read=read,
        read_max=read_max,
        time=time,
    )


def layer_cost(task: Task, machine: Machine, fusion: int) -> ModeCost:
    """Return the cost of mode `layer`. Raises GeometryError where a rank would own nothing of some tensor."""
    from tiledseg.planning.walk.step_memory import block_memory

    graph, bands, value = task.graph, task.bands, task.value_bytes
    rows, cols = settled(graph, task.decomposition)
    ranks = layer_ranks(graph, rows, cols, fusion, bands, value)
    check_blocks(graph, rows, cols, fusion, bands)
    norms, prices = statistic_sums(graph, bands, task.ranks), task.prices(machine)
    sums = StepTime(norms=machine.all_reduce_seconds(norms.step.messages, norms.step.bytes, task.ranks))
    longest = prices.longest([rank.time(prices).plus(sums) for rank in ranks])
    time = prices.step(longest, task.images, longest.backward)
    peaks = (block_memory(graph, bands, rank.row, rank.col, task.ranks, value).total for rank in ranks)
    read, read_max = _blocks_read(task, rows, cols)
    return ModeCost(
        mode="layer",
        fusion=fusion,
        work=sum(rank.work * rank.count for rank in ranks),
        work_max=max(rank.work for rank in ranks),
        traffic=sum((rank.traffic * rank.count for rank in ranks), Traffic()),
        busiest=max((rank.traffic for rank in ranks), key=lambda t: (t.step.bytes, t.step.messages)),
        norms=norms,
        memory=max(peak + held_besides(task, rank) for peak, rank in zip(peaks, ranks, strict=True)),
        seconds=prices.seconds(time),
        read=read,
        read_max=read_max,
        time=time,
    )


def settled(graph: Graph, decomposition: Decomposition) -> tuple[Partition, Partition]:
    """Cut the input as layer mode does: at the blocks' edges, moved to where the ranks' blocks fit all layers."""
    return settle(graph, decomposition.rows), settle(graph.along_columns, decomposition.cols)


def gradient_bytes(task: Task) -> int:
    """Return the bytes of the all-reduce of gradients: the same in all modes, once a step."""
    return GRADIENT_BYTES * count_trained(task.graph, task.bands)


@dataclass(frozen=True)
class LayerRank:
    """A kind of rank in layer mode, and how many there are: its steps along rows and columns, multiply-adds of its own,
    forward and of a whole training step, and what it sends."""

    row: RankSteps
    col: RankSteps
    count: int
    work: int
    step_work: int
    traffic: Traffic

    def time(self, prices: Prices) -> StepTime:
        """Predict the time of one image, without all-reduces."""
        return prices.block(self.row, self.col)._replace(messages=prices.messages(self.traffic.step))


@functools.lru_cache(maxsize=64)
def layer_ranks(
    graph: Graph, rows: Partition, cols: Partition, fusion: int, bands: int, value_bytes: int
) -> tuple[LayerRank, ...]:
    """Return the kinds of ranks in layer mode. Raises GeometryError where a rank would own nothing of some tensor."""
    along_rows, along_cols = rank_kinds(graph, rows, fusion), rank_kinds(graph.along_columns, cols, fusion)
    tensors = tensors_of(graph, bands, value_bytes)
    pairs = itertools.product(
        zip(along_rows.steps, along_rows.counts, strict=True), zip(along_cols.steps, along_cols.counts, strict=True)
    )
    return tuple(
        LayerRank(row, col, m * n, *block_work(graph, bands, row, col), layer_traffic(graph, row, col, tensors))
        for (row, m), (col, n) in pairs
    )


@functools.lru_cache(maxsize=64)
def check_blocks(graph: Graph, rows: Partition, cols: Partition, fusion: int, bands: int) -> None:
    """Raise GeometryError where a tensor of a rank's block in layer mode is too large for a kernel."""
    dims = (graph, rows), (graph.along_columns, cols)
    steps = itertools.product(*(rank_kinds(each, dim, fusion).steps for each, dim in dims))
    shapes = (largest_of_block(graph, bands, row, col) for row, col in steps)
    check_countable(shapes, f"spread the image over more ranks than {rows.parts} x {cols.parts}")


def block_work(graph: Graph, bands: int, row: RankSteps, col: RankSteps) -> tuple[int, int]:
    """Return the multiply-adds of a forward pass, and of a training step, of the rank with these steps. Pixels that are
    cropped after a layer count too."""
    channels, forward, step = tensor_channels(graph, bands), 0, 0
    for k, (layer, sources, r, c) in enumerate(zip(graph.layers, graph.sources, row, col, strict=True)):
        work = layer.multiply_adds(channels[sources[0]]) * r.computed * c.computed
        forward, step = forward + work, step + work * (1 + backward_passes(graph, k))
    return forward, step


def held_besides(task: Task, rank: LayerRank) -> int:
    """Return the bytes of the strips, and of the block of the input where the first layer keeps another tensor."""
    from tiledseg.planning.step.halo_traffic import strip_bytes

    first = rank.row[0].inputs[0], rank.col[0].inputs[0]
    own = all(step.held == step.read for step in first) and not any(step.moves for step in first)
    block = 0 if own else first[0].held * first[1].held * task.input_pixel_bytes
    return strip_bytes(task.graph, task.bands, rank.row, rank.col, task.value_bytes) + block


class TileRank(NamedTuple):
    """The tiles of a rank: multiply-adds of a forward pass, peak bytes of a training step, and its seconds."""

    work: int
    memory: int
    time: StepTime


def _tile_ranks(task: Task, machine: Machine) -> dict[tuple[int, int], TileRank]:
    """Return the cost of each rank's tiles, by its place in the mesh; calculated once for each kind of block."""
    graph, bands, width = task.graph, task.bands, task.value_bytes
    tile = functools.cache(task.prices(machine).tile)

    @functools.cache
    def block(row: TileSizes, col: TileSizes) -> TileRank:
        tiles = Counter(((height, width), of_row * of_col) for height, of_row in row for width, of_col in col)
        works = {at: sum(c.multiply_adds for c in layer_costs(graph, bands, at, width)) for at, _ in tiles}
        return TileRank(
            sum(count * works[at] for (at, _), count in tiles.items()),
            max(training_memory(graph, bands, at, width).total for at in works),
            sum_of(tile(*each).times(count) for each, count in tiles.items()),
        )

    rows, cols = task.decomposition.tile_sizes()
    return {(i, j): block(row, col) for i, row in enumerate(rows) for j, col in enumerate(cols)}


def _input_memory(task: Task) -> dict[tuple[int, int], int]:
    """Return the bytes that mode `exchange` holds besides a context, by the rank's place in the mesh: the window, where
    several contexts are cut from it, and the block, where that is not the window."""
    decomposition, held = task.decomposition, {}
    (rows, cols), (in_rows, in_cols) = decomposition.context_windows(), decomposition.tile_sizes()
    for i, j in itertools.product(range(len(rows)), range(len(cols))):
        window, block = rows[i].size * cols[j].size, decomposition.owned(i, j).area
        pixels = window * (len(in_rows[i]) * len(in_cols[j]) > 1) + block * (block != window)
        held[i, j] = pixels * task.input_pixel_bytes
    return held


def _contexts_read(task: Task) -> list[int]:
    """Return the pixels of the raster in the contexts of each rank's tiles. Beyond its border they are mirrored."""
    decomposition, (rows, cols) = task.decomposition, task.decomposition.shape
    raster = Box.of_shape(decomposition.tiling.raster)
    places = itertools.product(range(rows), range(cols))
    return [sum(tile.context.clip(raster).area for tile in decomposition.tiles(*at)) for at in places]


def _blocks_read(task: Task, rows: Partition, cols: Partition) -> tuple[int, int]:
    """Return the pixels of the raster that all ranks, and the rank that reads most, read as a block of the input."""
    origin, raster = task.decomposition.whole, Box.of_shape(task.decomposition.tiling.raster)
    of_rows = [block.shift(origin.row.start).clip(raster.row).size for block in rows.blocks]
    of_cols = [block.shift(origin.col.start).clip(raster.col).size for block in cols.blocks]
    return sum(of_rows) * sum(of_cols), max(of_rows) * max(of_cols)


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
        return max(rank.time(prices).seconds for rank in ranks)

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
