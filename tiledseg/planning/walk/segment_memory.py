"""The memory and the time of a rank that computes its tile in blocks, segment by segment: of a training step or a map.

A segment is a run of nodes, walked on its largest block as a stage is on a tile. Between segments lie tensors: values
until the backward pass of their last reader, gradients until that of their maker. Each segment but the last is run
forward, and each is run once more and differentiated; a node makes the halo of a segment at each of its blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tiledseg.geometry.box import Interval
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.shapes import tensor_channels
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.geometry.sharing.layer_windows import NodeWindows, block_partition, partitions_of, segment_windows
from tiledseg.geometry.sharing.segments import Segment, segments
from tiledseg.planning.step.backward_walk import gradients_by_node, peak_of
from tiledseg.planning.step.cost import ForwardWalk, layer_costs, loss_bytes
from tiledseg.planning.step.rank_steps import RankSteps, dim_steps
from tiledseg.planning.step.tensor_limit import TensorShape
from tiledseg.planning.walk.items import BACKWARD, Speed
from tiledseg.planning.walk.step_memory import fixed_memory, weight_memory
from tiledseg.units.widths import norm_work_bytes

MOST_WRITTEN = 32 << 20  # bytes on their way to a file, as `memory.shelf` bounds them


class BlockMoment(NamedTuple):
    """Bytes at once while a segment runs: of tensors `stored` between segments, and in all but the fixed ones, where
    those lie in memory or in a file."""

    stored: int
    in_memory: int
    in_file: int


@dataclass(frozen=True)
class SegmentMemory:
    """Bytes: of weights, their gradients' sums and the optimizer's values; of images as they were read; and the moments
    of a step. `largest`: the largest tensor that a layer makes of a block."""

    fixed: int
    image: int
    moments: tuple[BlockMoment, ...]
    largest: TensorShape

    @property
    def stored(self) -> int:
        """The most that lies between segments at once."""
        return max(moment.stored for moment in self.moments)

    def total(self, in_file: bool) -> int:
        """Return the bytes of a rank's memory, where blocks lie in it, or in a file."""
        if in_file:
            return self.least(True) + max(moment.in_file for moment in self.moments)
        return self.fixed + self.image + max(moment.in_memory for moment in self.moments)

    def least(self, in_file: bool) -> int:
        """Return the bytes that more blocks do not make less."""
        return self.fixed + self.image + (min(MOST_WRITTEN, self.stored) if in_file else self.stored)


def segment_memory(
    graph: Graph,
    bands: int,
    context: tuple[int, int],
    blocks: tuple[int, int],
    bytes_per_value: int = 4,
    trains: bool = True,
    shared: tuple[Partition, Partition] | None = None,
    together: int | None = None,
) -> SegmentMemory:
    """Return the memory of one step, or unless it `trains` of a map, on one context of shape (height, width), in so
    many rows and columns of blocks, or fewer where it is too small.

    `shared`: how ranks own the context along rows and columns, of which that with the most counts. `together`: images
    of a rank that go through a segment before the next one, None where each goes alone: as much more lies between
    segments.
    """
    cut = _BlockCut(graph, bands, context, blocks, bytes_per_value, shared, together)
    moments = (*cut.forward(trains), *(cut.backward() if trains else ()))
    fixed = (fixed_memory if trains else weight_memory)(graph, bands, bytes_per_value)
    return SegmentMemory(fixed, int(cut.images * cut.whole[0]), moments, cut.largest)


def more_time(
    graph: Graph,
    bands: int,
    context: tuple[int, int],
    blocks: tuple[int, int],
    value_bytes: int,
    speed: Speed,
    waited: Callable[[float, float], float] | None,
    shared: tuple[Partition, Partition] | None = None,
    together: bool = False,
) -> float:
    """Return the seconds by which a step in `blocks` is longer, as a share of those of the whole; arguments as those of
    `segment_memory`. `waited`: the seconds for bytes written to a file and read from it; None where blocks lie in
    memory.

    A tensor between segments is written once, and read by each segment that takes it, forward and back; so are
    gradients.
    """
    cut = _BlockCut(graph, bands, context, blocks, value_bytes, shared, 1 if together else None)
    costs = layer_costs(graph, bands, context, value_bytes)
    nodes = [speed.seconds(cost) for cost in costs]
    seconds = written = read = 0.0
    for at, (segment, windows) in enumerate(zip(cut.segments, cut.windows, strict=True)):
        is_last = at + 1 == len(cut.segments)
        run = sum(nodes[k] * _times_made(*each) for k, each in zip(segment.nodes, windows.pairs, strict=True))
        seconds += ((1 if is_last else 2) + BACKWARD) * run
        written += 0 if is_last else costs[segment.leaving[0] - 1].output_bytes
        for tensor in filter(None, segment.entering):
            values: float = costs[tensor - 1].output_bytes
            for intervals, dim in zip(windows.read(tensor), cut.cuts, strict=True):
                values *= sum(one.size for one in intervals) / dim[tensor].size
            read += (2 if is_last else 3) * values  # its values, back and forth, and its gradient
            written += values
    seconds += waited(written, read) if waited else (written + read) / speed.memory_bandwidth
    return seconds / ((1 + BACKWARD) * sum(nodes)) - 1


class _Windows(NamedTuple):
    """The windows of a segment's blocks along rows and along columns: of its nodes, and read of tensors that enter."""

    nodes: tuple[Sequence[NodeWindows], Sequence[NodeWindows]]
    entering: tuple[Mapping[int, Sequence[Interval]], Mapping[int, Sequence[Interval]]]

    @property
    def pairs(self) -> Iterable[tuple[NodeWindows, NodeWindows]]:
        return zip(*self.nodes, strict=True)

    def read(self, tensor: int) -> tuple[Sequence[Interval], Sequence[Interval]]:
        return self.entering[0][tensor], self.entering[1][tensor]


class _BlockCut:
    """A context in blocks: its `segments` with their `windows`; bytes of each tensor `whole`, on the rank with most, of
    each segment's largest block (`sizes`), and that a segment's blocks read of other ones (`strips`)."""

    def __init__(
        self,
        graph: Graph,
        bands: int,
        context: tuple[int, int],
        blocks: tuple[int, int],
        width: int,
        shared: tuple[Partition, Partition] | None,
        together: int | None,
    ) -> None:
        self.graph, self.bands, self.width, self.images = graph, bands, width, together or 1
        ranks = shared or (Partition((0, context[0])), Partition((0, context[1])))
        self.ranks = ranks[0].parts, ranks[1].parts
        self.graphs = graph, graph.along_columns
        dims = zip(self.graphs, ranks, blocks, strict=True)
        self.cuts = tuple(partitions_of(one, block_partition(one, cut, parts)) for one, cut, parts in dims)
        self.segments = segments(graph, together is None and all(cut[0].parts == 1 for cut in self.cuts))
        self.windows = [_windows(self.graphs, self.cuts, segment) for segment in self.segments]
        self.channels = tensor_channels(graph, bands)
        costs = layer_costs(graph, bands, context, width)
        share = math.prod(_most(cut.blocks) / cut.size for cut in ranks)
        self.whole = [share * size for size in (math.prod((bands, *context)) * width, *(c.output_bytes for c in costs))]
        self.pixel = [float(bands * width), *(c.output_bytes / (c.shape[1] * c.shape[2]) for c in costs)]
        measured = {graph.sources[k][0] for k, layer in enumerate(graph.layers) if layer.statistics}
        self.norm_work = {t: self._rows_work(t) if t in measured else 0 for t in range(len(graph) + 1)}
        both = list(zip(self.segments, self.windows, strict=True))
        self.sizes = [self._sizes(*each) for each in both]
        self.strips = [{t: self._foreign(t, *w.read(t)) for t in s.entering if t} for s, w in both]

    @property
    def largest(self) -> TensorShape:
        """The largest tensor that a layer makes of a block."""
        shapes = [
            TensorShape(self.graph.names[k + 1], self.channels[k + 1], _most(row.given), _most(col.given))
            for segment, windows in zip(self.segments, self.windows, strict=True)
            for k, (row, col) in zip(segment.nodes, windows.pairs, strict=True)
        ]
        return max(shapes, key=lambda shape: shape.values)

    def forward(self, keeps: bool) -> Iterator[BlockMoment]:
        """Yield the moments of a forward pass that `keeps` tensors for a backward pass, or of a map: a tensor is then
        freed after the last segment that takes it."""
        ends = {tensor: at for at, segment in enumerate(self.segments) for tensor in segment.entering}
        lives: set[int] = set()
        for at, segment in enumerate(self.segments):
            lives.update(segment.leaving if at + 1 < len(self.segments) else ())
            stored = sum(self.whole[tensor] for tensor in lives)
            yield self._moment(at, self._live(at), stored, self._ahead(at), lives, 0.0)
            lives = lives if keeps else {tensor for tensor in lives if ends[tensor] > at}

    def backward(self) -> Iterator[BlockMoment]:
        """Yield the moments of a backward pass, from the last segment to the first."""
        values = {segment.leaving[0] for segment in self.segments[:-1]}
        gradients: set[int] = set()
        for at in reversed(range(len(self.segments))):
            segment = self.segments[at]
            leaving = set(segment.leaving) if at + 1 < len(self.segments) else set()
            values -= leaving
            before = sum(self.whole[tensor] for tensor in gradients | leaving)
            readers = self.strips[at:]
            gradients = (gradients | set(segment.entering)) - leaving - {0}
            after = sum(self.whole[tensor] for tensor in gradients)  # while the first go block by block, these come
            strips = sum(each[t] for each in readers for t in gradients | leaving if t in each)
            stored = sum(self.whole[tensor] for tensor in values) + max(before, after)
            ahead = 2 * self._ahead(at) + sum(self.sizes[at][tensor] for tensor in segment.leaving)
            yield self._moment(at, self._differentiated(at), stored, ahead, values, strips)

    def _moment(
        self, at: int, working: float, stored: float, ahead: float, values: Iterable[int], gradients: float
    ) -> BlockMoment:
        """Add up a moment's bytes. `working`: of the largest block at work. `ahead`: read from a file for the next one.
        `stored`, and strips of `values` and `gradients` for other blocks: of one image. Segments share strips."""
        segment = self.segments[at]
        read = (*segment.leaving, *(self.graph.sources[k][0] for k in segment.nodes))
        working += max(self.norm_work[tensor] for tensor in read)
        strips = sum(max((each[t] for each in self.strips if t in each), default=0.0) for t in values)
        stored, strips, gradients = (self.images * each for each in (stored, strips, gradients))
        return BlockMoment(int(stored), int(working + stored + gradients), int(working + ahead + strips + gradients))

    def _sizes(self, segment: Segment, windows: _Windows) -> dict[int, float]:
        """Return the bytes of the largest block of each tensor that a segment reads or makes."""
        found = {t: self.pixel[t] * math.prod(map(_most, windows.read(t))) for t in segment.entering}
        for k, (row, col) in zip(segment.nodes, windows.pairs, strict=True):
            found[k + 1] = self.pixel[k + 1] * _most(row.given) * _most(col.given)
        return found

    def _ahead(self, at: int) -> float:
        return sum(self.sizes[at][tensor] for tensor in self.segments[at].entering if tensor)

    def _live(self, at: int) -> float:
        """Return the most bytes at once while a segment runs on a block. A node has its inputs, with the parts that are
        cut or padded of them, its output, and the inputs of later ones."""
        segment, sizes, most = self.segments[at], self.sizes[at], 0.0
        for place, k in enumerate(segment.nodes):
            later = {t for node in segment.nodes[place + 1 :] for t in self.graph.sources[node]} | {*segment.leaving}
            sources = {*self.graph.sources[k]}
            made = (*segment.entering, *(node + 1 for node in segment.nodes[:place]))
            live = {tensor for tensor in made if tensor in later | sources}
            most = max(most, sum(sizes[t] for t in live) + sum(sizes[t] for t in sources) + 2 * sizes[k + 1])
        return most

    def _differentiated(self, at: int) -> float:
        """Return the peak while the largest block of a segment is recomputed and differentiated, with the windows that
        it reads. The loss follows the last segment; other ones are given the gradients of what leaves."""
        segment, graph = self.segments[at], self.graph
        rows, cols = (_largest_block(self.graph, segment, self.windows[at], dim) for dim in (0, 1))
        walk = ForwardWalk(graph, self.bands, 2, self.width)
        overwritten = {graph.origins[graph.sources[k][0]] for k in segment.nodes if graph.layers[k].overwrites}
        read = 0
        for tensor in segment.entering:
            size = rows[0][tensor].size, cols[0][tensor].size
            walk.enter(tensor, size)
            copies = 2 if tensor in overwritten else 1
            read += copies * self.channels[tensor] * size[0] * size[1] * self.width
        for k, row, col in zip(segment.nodes, rows[1], cols[1], strict=True):
            walk.step(k, row, col)
        steps = Graph(tuple(walk.nodes), tuple(walk.made[tensor].name for tensor in segment.leaving))
        given = at + 1 < len(self.segments)
        moments = gradients_by_node(steps, walk.costs, self.width, 0, len(walk.nodes), given)
        loss = 0 if given else loss_bytes([walk.costs[tensor - 1] for tensor in steps.results], self.width)
        return read + peak_of(moments, [cost.kept_bytes for cost in walk.costs], loss)

    def _rows_work(self, tensor: int) -> int:
        height, width = (_most(cut[tensor].blocks) for cut in self.cuts)
        return norm_work_bytes(self.channels[tensor], height, width)

    def _foreign(self, tensor: int, rows: Sequence[Interval], cols: Sequence[Interval]) -> float:
        """Return the bytes that the blocks of the rank with most read of other blocks."""
        total, own = 1.0, 1.0
        for read, cut, ranks in zip((rows, cols), self.cuts, self.ranks, strict=True):
            each = len(read) // ranks
            blocks = list(zip(read, cut[tensor].blocks, strict=True))
            of_ranks = [blocks[first : first + each] for first in range(0, len(blocks), each)]
            most = max(of_ranks, key=lambda of_rank: sum(window.size for window, _ in of_rank))
            total *= sum(window.size for window, _ in most)
            own *= sum(window.clip(block).size for window, block in most)
        return self.pixel[tensor] * (total - own)


def _windows(graphs: Sequence[Graph], cuts: Sequence[Sequence[Partition]], segment: Segment) -> _Windows:
    rows, cols = (segment_windows(graph, cut, segment) for graph, cut in zip(graphs, cuts, strict=True))
    return _Windows((rows[0], cols[0]), (rows[1], cols[1]))


def _largest_block(
    graph: Graph, segment: Segment, windows: _Windows, dim: int
) -> tuple[dict[int, Interval], RankSteps]:
    """Return, along one dim, the positions that the largest block holds of each tensor, and its steps."""
    nodes, entering = windows.nodes[dim], windows.entering[dim]
    count = len(nodes[0].given) if nodes else len(next(iter(entering.values())))
    blocks = []
    for index in range(count):
        held = {tensor: read[index] for tensor, read in entering.items()}
        blocks.append((held, dim_steps(graph, segment.nodes, nodes, held, index)))

    def positions(block: tuple[dict[int, Interval], RankSteps]) -> int:
        return sum(i.size for i in block[0].values()) + sum(n.read for step in block[1] for n in step.inputs)

    return max(blocks, key=positions)


def _times_made(row: NodeWindows, col: NodeWindows) -> float:
    """Return how often a node makes each of its positions, over all blocks."""
    made = [sum(one.size for one in each.given) for each in (row, col)]
    return made[0] * made[1] / (row.output.size * col.output.size)


def _most(intervals: Sequence[Interval]) -> int:
    return max(interval.size for interval in intervals)
