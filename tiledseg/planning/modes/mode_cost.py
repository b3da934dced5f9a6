"""What one optimizer step on one image costs its ranks in each halo mode.

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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tiledseg.geometry.box import Box
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.shapes import count_parameters, count_trained, tensor_channels
from tiledseg.geometry.sharing.decomposition import Decomposition, Partition, TileSizes
from tiledseg.geometry.sharing.layer_windows import settle
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

GRADIENT_BYTES = 8  # a weight's gradient is summed in float64 (docs/decisions/0003)


@dataclass(frozen=True)
class Task:
    """A step of one network: `images` like that of `decomposition`, one after the other, over its ranks, and as many in
    each other of `replicas`; `value_bytes` of a value that travels and is kept."""

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

    @property
    def parameters(self) -> int:
        return count_parameters(self.graph, self.bands)

    @property
    def trained(self) -> int:
        return count_trained(self.graph, self.bands)

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


def mode_cost(task: Task, machine: Machine, mode: str, fusion: int) -> ModeCost:
    """A step in a halo mode. `fusion` is that of mode `layer`, whose GeometryError it raises."""
    if mode == "layer":
        return layer_cost(task, machine, fusion)
    return {"read": read_cost, "exchange": exchange_cost}[mode](task, machine)


def read_cost(task: Task, machine: Machine) -> ModeCost:
    """Mode `read`: nothing is sent."""
    ranks, prices, read = _tile_ranks(task, machine), task.prices(machine), _contexts_read(task)
    time = _step_time(task, prices, [rank.time for rank in ranks.values()])
    works = [rank.work for rank in ranks.values()]
    memory = max(rank.memory for rank in ranks.values())
    sums = sum(works), max(works), Traffic(), Traffic(), Traffic(), memory
    return ModeCost("read", 0, *sums, prices.seconds(time), sum(read), max(read), time)


def exchange_cost(task: Task, machine: Machine) -> ModeCost:
    """Mode `exchange`: the work of `read`; one exchange of the input, which needs no gradient."""
    ranks, held, prices = _tile_ranks(task, machine), _input_memory(task), task.prices(machine)
    sent = dict(input_traffic(task.decomposition, task.bands, task.value_bytes))
    time = _step_time(
        task, prices, [rank.time._replace(messages=prices.messages(sent[at])) for at, rank in ranks.items()]
    )
    return ModeCost(
        mode="exchange",
        fusion=0,
        work=sum(rank.work for rank in ranks.values()),
        work_max=max(rank.work for rank in ranks.values()),
        traffic=Traffic(sum(sent.values(), SentBytes())),
        busiest=Traffic(max(sent.values(), key=lambda each: (each.bytes, each.messages))),
        norms=Traffic(),
        memory=max(rank.memory + held[at] for at, rank in ranks.items()),
        seconds=prices.seconds(time),
        time=time,
        **_blocks_read(task, task.decomposition.rows, task.decomposition.cols),
    )


def layer_cost(task: Task, machine: Machine, fusion: int) -> ModeCost:
    """Mode `layer` with a fusion depth. Raises GeometryError where a rank would own nothing of some tensor."""
    rows, cols = settled(task.graph, task.decomposition)
    ranks = layer_ranks(task.graph, rows, cols, fusion, task.bands, task.value_bytes)
    check_blocks(task.graph, rows, cols, fusion, task.bands)
    norms = statistic_sums(task.graph, task.bands, task.ranks)
    prices = task.prices(machine)
    sums = StepTime(norms=machine.all_reduce_seconds(norms.step.messages, norms.step.bytes, task.ranks))
    time = _step_time(task, prices, [rank.time(prices).plus(sums) for rank in ranks])
    return ModeCost(
        mode="layer",
        fusion=fusion,
        work=sum(rank.work * rank.count for rank in ranks),
        work_max=max(rank.work for rank in ranks),
        traffic=sum((rank.traffic * rank.count for rank in ranks), Traffic()),
        busiest=max((rank.traffic for rank in ranks), key=lambda t: (t.step.bytes, t.step.messages)),
        norms=norms,
        memory=max(_layer_memory(task, rank) for rank in ranks),
        seconds=prices.seconds(time),
        time=time,
        **_blocks_read(task, rows, cols),
    )


def settled(graph: Graph, decomposition: Decomposition) -> tuple[Partition, Partition]:
    """How layer mode cuts the input: at the blocks' edges, moved to where the ranks' blocks fit all layers."""
    return settle(graph, decomposition.rows), settle(graph.along_columns, decomposition.cols)


def gradient_bytes(task: Task) -> int:
    """Bytes of the all-reduce of gradients: the same in all modes, once a step."""
    return GRADIENT_BYTES * task.trained


def _step_time(task: Task, prices: Prices, ranks: Sequence[StepTime]) -> StepTime:
    """Of a step, from the times of an image on each of some ranks: that of the one that takes longest."""
    longest = prices.longest(ranks)
    return prices.step(longest, task.images, longest.backward)


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
        """Predicted for one image, without all-reduces."""
        return prices.block(self.row, self.col)._replace(messages=prices.messages(self.traffic.step))


@functools.lru_cache(maxsize=64)
def layer_ranks(
    graph: Graph, rows: Partition, cols: Partition, fusion: int, bands: int, value_bytes: int
) -> tuple[LayerRank, ...]:
    """The kinds of ranks in layer mode. Raises GeometryError where a rank would own nothing of some tensor."""
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
    """Multiply-adds of a forward pass, and of a training step, of the rank with these steps; what is cropped after a
    layer counts too."""
    channels, forward, step = tensor_channels(graph, bands), 0, 0
    for k, (layer, sources, r, c) in enumerate(zip(graph.layers, graph.sources, row, col, strict=True)):
        work = layer.multiply_adds(channels[sources[0]]) * r.computed * c.computed
        forward, step = forward + work, step + work * (1 + backward_passes(graph, k))
    return forward, step


def _layer_memory(task: Task, rank: LayerRank) -> int:
    """The walked peak, and what is held besides."""
    from tiledseg.planning.walk.step_memory import block_memory

    memory = block_memory(task.graph, task.bands, rank.row, rank.col, task.ranks, task.value_bytes)
    return memory.total + held_besides(task, rank)


def held_besides(task: Task, rank: LayerRank) -> int:
    """The strips, and the block of the input where what the first layer keeps is not that itself."""
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
    """Return what each rank's tiles take, by its place in the mesh; worked out once for each kind of block."""
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
    """Bytes that mode `exchange` holds besides a context: the window, where several contexts are cut from it, and the
    block, where that is not the window; by the rank's place in the mesh."""
    decomposition, found = task.decomposition, {}
    (rows, cols), (in_rows, in_cols) = decomposition.context_windows(), decomposition.tile_sizes()
    for at in itertools.product(range(len(rows)), range(len(cols))):
        window, block = rows[at[0]].size * cols[at[1]].size, decomposition.owned(*at).area
        pixels = window * (len(in_rows[at[0]]) * len(in_cols[at[1]]) > 1) + block * (block != window)
        found[at] = pixels * task.input_pixel_bytes
    return found


def _contexts_read(task: Task) -> list[int]:
    """Pixels of the raster in the contexts of each rank's tiles: what lies beyond its border is mirrored, not read."""
    decomposition, (rows, cols) = task.decomposition, task.decomposition.shape
    raster = Box.of_shape(decomposition.tiling.raster)
    places = itertools.product(range(rows), range(cols))
    return [sum(tile.context.clip(raster).area for tile in decomposition.tiles(*at)) for at in places]


def _blocks_read(task: Task, rows: Partition, cols: Partition) -> dict[str, int]:
    """The same of ranks that each read a block of the network's input."""
    origin, raster = task.decomposition.whole, Box.of_shape(task.decomposition.tiling.raster)
    of_rows = [block.shift(origin.row.start).clip(raster.row).size for block in rows.blocks]
    of_cols = [block.shift(origin.col.start).clip(raster.col).size for block in cols.blocks]
    return {"read": sum(of_rows) * sum(of_cols), "read_max": max(of_rows) * max(of_cols)}
