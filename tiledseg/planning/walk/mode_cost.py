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
from dataclasses import dataclass, replace
from typing import NamedTuple

from tiledseg.geometry.box import Interval
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.layers.declared import WholeLeaf
from tiledseg.geometry.layers.pixelwise import Positions
from tiledseg.geometry.shapes import tensor_channels, tensor_shapes
from tiledseg.geometry.sharing.decomposition import Decomposition, Partition
from tiledseg.geometry.sharing.layer_windows import WHOLE, LayerBlocks, layer_windows
from tiledseg.geometry.tiling import TileSpan, Tiling, deal
from tiledseg.planning.walk.cost import ForwardWalk, rank_walk, tile_walk
from tiledseg.planning.walk.cost_model import Prices, StepTime, sum_of
from tiledseg.planning.walk.rank_steps import (
    RankSteps,
    TensorShape,
    check_countable,
    pieces,
    rank_steps,
    swaps,
)
from tiledseg.planning.walk.step_memory import memory_of
from tiledseg.units import DOUBLE_BYTES, SINGLE_BYTES, wide_bytes

DEPTHS = (1, 2, 4, WHOLE)  # of fusion; depths between them change little


@dataclass(frozen=True)
class ModeCost:
    """The cost of a training step in a mode. `fusion`: 0 in other modes than `layer`. `ranks`: those that have work.
    `images`: of the step in mode `read`, else those that a rank takes part in, one after the other.

    Of all ranks on one image: `work`, multiply-adds of a forward pass; `messages` and `bytes` sent, forward and
    backward; `read`, pixels of the raster. Of a step: `messages_rank` and `bytes_rank`, of the rank that sends most
    bytes; `read_max`, the pixels of the rank that reads most; `memory`, peak bytes on the rank that needs most;
    `seconds`, predicted, the all-reduce of gradients included; `time`, the parts of `seconds` on the rank that takes
    longest, with cores of its own. `norms`: all-reduces of norm statistics on one image, calls and bytes a rank.
    """

    mode: str
    ranks: int
    images: int
    work: int
    messages: int
    bytes: int
    messages_rank: int
    bytes_rank: int
    memory: int
    seconds: float
    time: StepTime
    read: int
    read_max: int
    fusion: int = 0
    norms: tuple[int, int] = (0, 0)


class RankCost(NamedTuple):
    """The cost of each of `number` equal ranks on one image, in mode `read` of a step: multiply-adds of a forward pass,
    peak bytes of a training step, its seconds, the bytes of each message that it sends, and its backward passes."""

    work: int
    memory: int
    time: StepTime
    sent: Sequence[int] = ()
    number: int = 1
    passes: int = 1


def read_cost(prices: Prices, tiling: Tiling, images: int, batch: int = 1) -> ModeCost:
    """Return the cost of a step on `images` in mode `read`, whose tiles are dealt to the ranks as a run deals them, in
    batches of `batch`. Beyond the raster's border contexts are mirrored: only pixels inside are read."""
    tiles, number = _tiles_of(tiling.rows, tiling.cols), len(tiling)
    of_rows = [span.context.clip(Interval(0, tiling.raster[0])).size for span in tiling.rows]
    of_cols = [span.context.clip(Interval(0, tiling.raster[1])).size for span in tiling.cols]
    read = [height * width for height, width in itertools.product(of_rows, of_cols)]
    dealt = deal(tiling.contexts * images, prices.ranks, batch, prices.graph.is_untraced)
    shares, costs = [share for share in dealt if share], list[RankCost]()
    prices = replace(prices, ranks=len(shares))
    kinds = Counter(tuple(sorted([tiles[tile % number] for tile in share])) for share in shares)
    for kind, count in kinds.items():  # ranks with tiles of the same sizes cost the same
        costs.append(_tiles_cost(prices, kind, tiling.whole.shape, batch)._replace(number=count))
    most = max([sum([read[tile % number] for tile in share]) for share in shares])
    cost = _join_ranks(prices, 1, costs, "read", (sum(read), most))
    return replace(cost, images=images, work=cost.work // images)


def exchange_cost(prices: Prices, cut: Decomposition, images: int = 1) -> ModeCost:
    """Return the cost of mode `exchange`: one exchange of the input, which needs no gradient. Ranks also hold the
    window, where several contexts are cut from it, and the block, where that is not the window."""
    bands, width, ranks = prices.bands, prices.width, list[RankCost]()
    row_windows, col_windows = cut.context_windows()
    of_tiles = functools.cache(lambda tiles: _tiles_cost(prices, tiles, cut.whole.shape))
    for (i, j), sent in input_messages(cut, bands, width):
        rank = of_tiles(tuple(sorted(_tiles_of(cut.spans(0, i), cut.spans(1, j)))))
        window, owned = row_windows[i].size * col_windows[j].size, cut.rows.blocks[i].size * cut.cols.blocks[j].size
        held = window * (rank.passes > 1) + owned * (owned != window)
        time = rank.time._replace(messages=prices.machine.message_seconds(sent, prices.ranks))
        memory = rank.memory + held * bands * wide_bytes(width)
        ranks.append(rank._replace(memory=memory, time=time, sent=sent))
    return _join_ranks(prices, images, ranks, "exchange", _blocks_read(cut, images))


def _tiles_of(rows: Sequence[TileSpan], cols: Sequence[TileSpan]) -> list[tuple[tuple[int, int], int]]:
    """Return the context (height, width) of each tile, and the pixels that it owns."""
    pairs = itertools.product(rows, cols)
    return [((row.context.size, col.context.size), row.core.size * col.core.size) for row, col in pairs]


def _tiles_cost(
    prices: Prices, tiles: Sequence[tuple[tuple[int, int], int]], whole: tuple[int, int], batch: int = 1
) -> RankCost:
    """Return the cost of a rank that computes tiles of an image of (height, width), in batches."""
    of_network, counts = (prices.graph, prices.bands), Counter(tiles)
    walks = [(tile_walk(*of_network, at, prices.width), owned, count) for (at, owned), count in counts.items()]
    work = sum([walk.work * count for walk, _, count in walks])
    memory = max([memory_of(walk).total for walk, _, _ in walks])
    time = sum_of([prices.walked(walk, owned).times(count) for walk, owned, count in walks])
    return RankCost(work, memory + whole_bytes(*of_network, whole), time, passes=-(-len(tiles) // batch))


def layer_cost(prices: Prices, cut: LayerBlocks, fusion: int, images: int = 1) -> ModeCost:
    """Return the cost of mode `layer`."""
    graph, bands, width, ranks = prices.graph, prices.bands, prices.width, list[RankCost]()
    size, sharing = (cut.rows.size, cut.cols.size), cut.rows.parts * cut.cols.parts
    of_image = whole_bytes(graph, bands, size)
    (calls, ahead), (calls_back, back) = statistic_sums(graph, bands, sharing, size, width)
    norms = calls + calls_back, ahead + back
    sums = prices.machine.all_reduce_seconds(*norms, sharing)
    for walk, number in layer_ranks(graph, cut.rows, cut.cols, fusion, bands, width):
        time = prices.walked(walk)
        time = time._replace(messages=time.messages + sums)
        memory = memory_of(walk).total + walk.besides + of_image
        ranks.append(RankCost(walk.work, memory, time, walk.sent + walk.returned, number))
    cost = _join_ranks(prices, images, ranks, "layer", _blocks_read(cut, images))
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


def _join_ranks(prices: Prices, images: int, ranks: Sequence[RankCost], mode: str, read: tuple[int, int]) -> ModeCost:
    """Join the costs of ranks, each of which takes `images`. `read`: pixels of the raster that all ranks read of an
    image, and the rank that reads most in a step."""
    busiest = max([rank.sent for rank in ranks], key=lambda sent: (sum(sent), len(sent)))
    longest = max(ranks, key=lambda rank: sum(rank.time))
    time = prices.step(longest.time, images, longest.time.backward / longest.passes)
    return ModeCost(
        mode,
        prices.ranks,
        images,
        work=sum([rank.work * rank.number for rank in ranks]),
        messages=sum([len(rank.sent) * rank.number for rank in ranks]),
        bytes=sum([sum(rank.sent) * rank.number for rank in ranks]),
        messages_rank=len(busiest) * images,
        bytes_rank=sum(busiest) * images,
        memory=max([rank.memory for rank in ranks]),
        seconds=prices.seconds(time),
        time=time,
        read=read[0],
        read_max=read[1],
    )


@functools.lru_cache(maxsize=64)
def layer_ranks(
    graph: Graph, rows: Partition, cols: Partition, fusion: int, bands: int, value_bytes: int
) -> tuple[tuple[ForwardWalk, int], ...]:
    """Return the walk of each kind of rank in layer mode, and how many there are. Raises GeometryError where a rank
    would own nothing of some tensor."""
    of_rows = Counter(rank_steps(graph, rows, fusion))
    of_cols = Counter(rank_steps(graph.along_columns, cols, fusion))
    return tuple(
        (rank_walk(graph, bands, row, col, rows.parts * cols.parts, value_bytes), of_rows[row] * of_cols[col])
        for row, col in itertools.product(of_rows, of_cols)
    )


def check_blocks(graph: Graph, rows: Partition, cols: Partition, fusion: int, bands: int, value_bytes: int = 4) -> None:
    """Raise GeometryError where a tensor of a rank's block in layer mode is too large for a kernel."""
    ranks = layer_ranks(graph, rows, cols, fusion, bands, value_bytes)
    steps = ((walk.costs[run.first : run.moment + 1], k) for walk, _ in ranks for k, run in walk.ran.items())
    shapes = (TensorShape(graph.nodes[k].name, *cost.shape) for costs, k in steps for cost in costs)
    largest = max(shapes, key=lambda shape: shape.values)
    check_countable(largest, f"spread the image over more ranks than {rows.parts} x {cols.parts}")


def input_messages(
    decomposition: Decomposition, bands: int, value_bytes: int
) -> Iterator[tuple[tuple[int, int], list[int]]]:
    """Yield the bytes of each message of the rank at each (row, col) in the one exchange of mode `exchange`. It has no
    backward pass."""
    row_windows, col_windows = decomposition.context_windows()
    rows, cols = swaps(decomposition.rows, row_windows), swaps(decomposition.cols, col_windows)
    for (i, row), (j, col) in itertools.product(enumerate(rows), enumerate(cols)):
        sent = pieces((row.kept, *row.sent), (col.kept, *col.sent))
        yield (i, j), [pixels * bands * wide_bytes(value_bytes) for pixels in sent]


def statistic_sums(
    graph: Graph, bands: int, ranks: int, size: tuple[int, int], value_bytes: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the collective calls of layers, and their bytes a rank, in layer mode on an image of `size`: forward, then
    backward.

    Each rank gives count, means and variances of a norm, in a slot of its own, in float64. Backward it gives the
    gradients of the mean and of the deviation, which are summed (`models.normalise`). Other layers say how many values
    they give. Attention broadcasts each rank's keys and values, forward and backward, and sums their gradients
    (`models.layers.attention`). A leaf that sees the whole image broadcasts its input, forward alone.
    """
    channels, calls, ahead, calls_back, back = tensor_channels(graph, bands), 0, 0, 0, 0
    for layer, sources in zip(graph.layers, graph.sources, strict=True) if ranks > 1 else ():
        if layer.sees_all:
            shapes = tensor_shapes(graph, bands, *size)
            passing = sum(math.prod(shapes[source]) for source in sources[1:] or sources)
            again = len(sources[1:2])  # keys and values are broadcast once more for their gradients
            calls, ahead = calls + ranks, ahead + passing * value_bytes
            calls_back += (again + 1) * ranks
            back += passing * (again * value_bytes + wide_bytes(value_bytes))
        elif layer.statistics:
            forward, backward = layer.shared_values(channels[sources[0]], ranks)
            calls, ahead = calls + 1, ahead + forward * DOUBLE_BYTES
            calls_back, back = calls_back + 1, back + backward * DOUBLE_BYTES
    return (calls, ahead), (calls_back, back)


def _blocks_read(cut: Decomposition, images: int) -> tuple[int, int]:
    """Return the pixels of the raster that all ranks read of an image, and the rank that reads most in a step, as
    blocks of the input."""
    (height, width), origin = cut.tiling.raster, cut.whole
    of_rows = [block.shift(origin.row.start).clip(Interval(0, height)).size for block in cut.rows.blocks]
    of_cols = [block.shift(origin.col.start).clip(Interval(0, width)).size for block in cut.cols.blocks]
    return sum(of_rows) * sum(of_cols), images * max(of_rows) * max(of_cols)


def choose_fusion(prices: Prices, cut: LayerBlocks) -> int:
    """Return the fusion depth (1, 2, ..., WHOLE) whose training step takes the least predicted time on the rank with
    most to do; the smallest of equals. The same on every rank."""
    if prices.ranks == 1:
        return 1
    graph, times = prices.graph, dict[int, float]()
    dims = (graph, cut.rows), (graph.along_columns, cut.cols)
    halos = max(sum(at.exchanges for at in layer_windows(each, partition)) for each, partition in dims)
    for depth in (depth for depth in DEPTHS if depth in (1, WHOLE) or depth < halos):
        busiest = list[list[RankSteps]]()  # along rows and columns, the kinds that read most and that send most
        for each, partition in dims:
            loads = dict[RankSteps, tuple[int, int]]()
            for kind in rank_steps(each, partition, depth):
                inputs = [one for step in kind for one in step.inputs]
                loads[kind] = sum(one.window for one in inputs), sum(sum(one.swap.sent) for one in inputs)
            busiest.append([max(loads, key=lambda kind: loads[kind][load]) for load in (0, 1)])
        pairs = set(zip(*busiest, strict=True))
        walks = [rank_walk(graph, prices.bands, row, col, prices.ranks, prices.width) for row, col in pairs]
        times[depth] = max(sum(prices.walked(walk)) for walk in walks)
    return min(times, key=times.__getitem__)


def fusion_word(fusion: int) -> int | str | None:
    """Return the depth; "whole" for one exchange of the input; None for 0, of the other modes."""
    return "whole" if fusion >= WHOLE else fusion or None


def mode_words(mode: str, fusion: int | str | None) -> str:
    """Return the mode with its fusion (as `fusion_word` gives it), where an exchange serves several layers."""
    return mode if fusion in (None, 1) else f"{mode}, fusion {fusion}"
