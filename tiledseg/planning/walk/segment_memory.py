"""The memory of a rank that computes its tile in blocks, segment by segment: of one training step, or of a map.

The walk goes from segment to segment, forward and back. It counts the tensors between them (values until the backward
pass of their last reader, gradients until that of their maker), and the largest block at work.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tiledseg.geometry.graph import Graph
from tiledseg.geometry.interval import Interval
from tiledseg.geometry.shapes import tensor_channels
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.geometry.sharing.layer_windows import NodeWindows, block_partition, partitions_of, segment_windows
from tiledseg.geometry.sharing.segments import Segment, segments
from tiledseg.planning.step.backward_walk import BackwardWalk
from tiledseg.planning.step.cost import ForwardWalk, Tensor, layer_costs
from tiledseg.planning.step.rank_steps import RankSteps, dim_steps
from tiledseg.planning.step.tensor_limit import TensorShape
from tiledseg.planning.walk.step_memory import fixed_memory, weight_memory
from tiledseg.units.widths import norm_work_bytes

Windows = tuple[Sequence[NodeWindows], Mapping[int, Sequence[Interval]]]  # of the nodes; read of what enters
MOST_WRITTEN = 32 << 20  # bytes on their way to a file, as `memory.shelf` bounds them


@dataclass(frozen=True)
class Moment:
    """Bytes at once while a segment is run forward or backward: of the largest block at work, of what lies between
    segments, of strips of it for other blocks, as values and as gradients, and of what comes from a file `ahead`, for
    the next block."""

    working: int
    stored: int
    ahead: int
    strips: int
    gradient_strips: int


@dataclass(frozen=True)
class SegmentMemory:
    """Bytes: of weights, their gradients' sums and the optimizer's values; of images as they were read; and the moments
    of a step. `largest`: the largest tensor that a layer makes of a block."""

    fixed: int
    image: int
    moments: tuple[Moment, ...]
    largest: TensorShape

    @property
    def stored(self) -> int:
        """The most that lies between segments at once."""
        return max(moment.stored for moment in self.moments)

    def total(self, in_file: bool) -> int:
        """Of a rank's memory, where blocks lie in it, or in a file."""
        if in_file:
            at_once = max(m.working + m.ahead + m.strips + m.gradient_strips for m in self.moments)
            return self.least(True) + at_once
        return self.fixed + self.image + max(m.working + m.stored + m.gradient_strips for m in self.moments)

    def least(self, in_file: bool) -> int:
        """What more blocks do not make less."""
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
    """Of one step, or unless it `trains` of a map, on one context of shape (height, width), in so many rows and columns
    of blocks, or fewer where it is too small. `shared`: how ranks own the context along rows and columns, of which that
    with the most counts. `together`: so many of a rank's go through a segment before the next one, None where one goes
    alone: as much more lies between segments, and no more is at work."""
    ranks = shared or (Partition((0, context[0])), Partition((0, context[1])))
    walk = _Blocks(graph, bands, context, ranks, blocks, bytes_per_value, together)
    fixed = fixed_memory if trains else weight_memory
    moments = (*walk.forward(trains), *(walk.backward() if trains else ()))
    largest = max(walk.made, key=lambda shape: shape.values)
    return SegmentMemory(fixed(graph, bands, bytes_per_value), int(walk.images * walk.whole[0]), moments, largest)


class _Blocks:
    def __init__(
        self,
        graph: Graph,
        bands: int,
        context: tuple[int, int],
        ranks: tuple[Partition, Partition],
        blocks: tuple[int, int],
        bytes_per_value: int,
        together: int | None,
    ) -> None:
        self.graph, self.ranks = graph, (ranks[0].parts, ranks[1].parts)
        self.graphs = graph, graph.along_columns
        dims = zip(self.graphs, ranks, blocks, strict=True)
        self.cuts = tuple(partitions_of(one, block_partition(one, cut, parts)) for one, cut, parts in dims)
        self.images = together or 1
        self.segments = segments(graph, together is None and all(cut[0].parts == 1 for cut in self.cuts))
        costs = layer_costs(graph, bands, context, bytes_per_value)
        self.bands, self.bytes_per_value = bands, bytes_per_value
        self.names, self.channels = graph.names, tensor_channels(graph, bands)
        share = math.prod(_most(cut.blocks) / cut.size for cut in ranks)
        sizes = [math.prod((bands, *context)) * bytes_per_value, *(cost.output_bytes for cost in costs)]
        self.whole = [size * share for size in sizes]  # of the rank that has most
        self.pixel = [float(bands * bytes_per_value), *(c.output_bytes / (c.shape[1] * c.shape[2]) for c in costs)]
        self.made: list[TensorShape] = []
        measured = {graph.sources[k][0] for k, layer in enumerate(graph.layers) if layer.statistics}
        self.norm_work = {t: self._rows_work(t) if t in measured else 0 for t in range(len(graph) + 1)}
        self.sizes = [self._sizes(segment) for segment in self.segments]
        self.strips = [self._strips_of(segment) for segment in self.segments]

    def forward(self, keeps: bool) -> Iterator[Moment]:
        """`keeps`: for a backward pass; else each tensor goes when the last segment that takes it has."""
        ends = {tensor: at for at, segment in enumerate(self.segments) for tensor in segment.entering}
        lives: set[int] = set()
        for at, (segment, sizes) in enumerate(zip(self.segments, self.sizes, strict=True)):
            lives.update(segment.leaving if at + 1 < len(self.segments) else ())
            working = self._live(segment, sizes) + self._norm_work(segment)
            stored = sum(self.whole[t] for t in lives)
            yield self._moment(working, stored, self._ahead(segment, sizes), lives, 0.0)
            lives = lives if keeps else {tensor for tensor in lives if ends[tensor] > at}

    def backward(self) -> Iterator[Moment]:
        """From the last segment to the first."""
        values = {segment.leaving[0] for segment in self.segments[:-1]}
        gradients: set[int] = set()
        for at in reversed(range(len(self.segments))):
            segment = self.segments[at]
            leaving = set(segment.leaving) if at + 1 < len(self.segments) else set()
            values -= leaving
            before = sum(self.whole[tensor] for tensor in gradients | leaving)
            readers = [self.strips[later] for later in range(at, len(self.segments))]
            gradients = (gradients | set(segment.entering)) - leaving - {0}
            after = sum(self.whole[tensor] for tensor in gradients)  # while the first go block by block, these come
            strips = sum(each[t] for each in readers for t in gradients | leaving if t in each)
            stored = sum(self.whole[tensor] for tensor in values) + max(before, after)
            working = self._differentiated(segment, at + 1 == len(self.segments))
            ahead = 2 * self._ahead(segment, self.sizes[at]) + int(sum(self.sizes[at][t] for t in segment.leaving))
            yield self._moment(working, stored, ahead, values, strips)

    def _moment(self, working: float, stored: float, ahead: int, values: Collection[int], gradients: float) -> Moment:
        """`stored`, strips of `values` and of `gradients`: of one image."""
        several = stored, self._value_strips(values), gradients
        stored, value_strips, gradient_strips = (int(self.images * each) for each in several)
        return Moment(int(working), stored, ahead, value_strips, gradient_strips)

    def _sizes(self, segment: Segment) -> dict[int, float]:
        """Bytes of the largest block of each tensor that a segment reads or makes."""
        rows, cols = self._windows(segment)
        read = {t: self.pixel[t] * _most(rows[1][t]) * _most(cols[1][t]) for t in segment.entering}
        nodes = zip(segment.nodes, rows[0], cols[0], strict=True)
        return read | {k + 1: self._largest(k + 1, row, col) for k, row, col in nodes}

    def _strips_of(self, segment: Segment) -> dict[int, float]:
        """Bytes of what a segment's blocks read of others, by the tensor."""
        rows, cols = self._windows(segment)
        return {t: self._foreign(t, rows[1][t], cols[1][t]) for t in segment.entering if t}

    def _ahead(self, segment: Segment, sizes: Mapping[int, float]) -> int:
        return int(sum(sizes[tensor] for tensor in segment.entering if tensor))

    def _value_strips(self, tensors: Collection[int]) -> int:
        """Of what lies there: those that several segments read alike are there once."""
        return int(sum(max((each[t] for each in self.strips if t in each), default=0.0) for t in tensors))

    def _differentiated(self, segment: Segment, is_last: bool) -> float:
        """Return the peak while the largest block of a segment is recomputed and differentiated, the windows that it
        reads included. The loss follows the last segment; to others the gradient of what leaves is given."""
        held, steps = zip(*map(self._largest_block, [segment] * 2, (0, 1)), strict=True)
        walk = ForwardWalk(self.graph, self.bands, 2, self.bytes_per_value)
        read = 0
        for tensor in segment.entering:
            size = held[0][tensor].size, held[1][tensor].size
            values = self.channels[tensor] * size[0] * size[1]
            walk.enter(tensor, f"entering {tensor}", Tensor(values, True, self.bytes_per_value), size)
            read += values * self.bytes_per_value * (2 if self._is_written_over(segment, tensor) else 1)
        for k, row, col in zip(segment.nodes, *steps, strict=True):
            walk.step(k, row, col)
        results = tuple(walk.made[tensor].name for tensor in segment.leaving)
        kept = [cost.kept_bytes for cost in walk.costs]
        back = BackwardWalk(
            Graph(tuple(walk.nodes), results), walk.costs, self.bytes_per_value, 0, len(walk.nodes), not is_last
        )
        return read + back.run(kept) + self._norm_work(segment)

    def _windows(self, segment: Segment) -> list[Windows]:
        return [segment_windows(g, cut, segment) for g, cut in zip(self.graphs, self.cuts, strict=True)]

    def _largest_block(self, segment: Segment, dim: int) -> tuple[dict[int, Interval], RankSteps]:
        """Return, along one dim, the positions that the largest block holds of each tensor, and its steps."""
        windows, entering = self._windows(segment)[dim]
        count = len(windows[0].given) if windows else len(next(iter(entering.values())))
        blocks = []
        for index in range(count):
            held = {tensor: read[index] for tensor, read in entering.items()}
            blocks.append((held, dim_steps(self.graph, segment.nodes, windows, held, index)))
        return max(
            blocks,
            key=lambda block: sum(i.size for i in block[0].values()) + sum(n.read for s in block[1] for n in s.inputs),
        )

    def _is_written_over(self, segment: Segment, tensor: int) -> bool:
        """True if a layer writes over a tensor that enters, so that a copy is made first."""
        graph = self.graph
        return any(graph.layers[k].overwrites and graph.origins[graph.sources[k][0]] == tensor for k in segment.nodes)

    def _rows_work(self, tensor: int) -> int:
        height, width = (_most(cut[tensor].blocks) for cut in self.cuts)
        return norm_work_bytes(self.channels[tensor], height, width)

    def _norm_work(self, segment: Segment) -> int:
        """Of statistics of what leaves, and of norms."""
        works = [self.norm_work[tensor] for tensor in segment.leaving]
        works += [self.norm_work[self.graph.sources[k][0]] for k in segment.nodes]
        return max(works, default=0)

    def _live(self, segment: Segment, sizes: Mapping[int, float]) -> float:
        """The most bytes at once while a segment is run on a block: of each node its inputs, with what is cut or padded
        of them, its output, and what later ones take."""
        most = 0.0
        for at, k in enumerate(segment.nodes):
            later = {t for node in segment.nodes[at + 1 :] for t in self.graph.sources[node]} | {*segment.leaving}
            sources = {*self.graph.sources[k]}
            live = {t for t in (*segment.entering, *(node + 1 for node in segment.nodes[:at])) if t in later | sources}
            most = max(most, sum(sizes[t] for t in live) + sum(sizes[t] for t in sources) + 2 * sizes[k + 1])
        return most

    def _largest(self, tensor: int, row: NodeWindows, col: NodeWindows) -> float:
        height, width = _most(row.given), _most(col.given)
        self.made.append(TensorShape(self.names[tensor], self.channels[tensor], height, width))
        return self.pixel[tensor] * height * width

    def _foreign(self, tensor: int, rows: Sequence[Interval], cols: Sequence[Interval]) -> float:
        """Of the rank that has most."""
        total, own = 1.0, 1.0
        for read, cut, ranks in zip((rows, cols), self.cuts, self.ranks, strict=True):
            each = len(read) // ranks
            blocks = list(zip(read, cut[tensor].blocks, strict=True))
            of_ranks = [blocks[first : first + each] for first in range(0, len(blocks), each)]
            most = max(of_ranks, key=lambda of_rank: sum(window.size for window, _ in of_rank))
            total *= sum(window.size for window, _ in most)
            own *= sum(window.clip(block).size for window, block in most)
        return self.pixel[tensor] * (total - own)


def _most(intervals: Sequence[Interval]) -> int:
    return max(interval.size for interval in intervals)
