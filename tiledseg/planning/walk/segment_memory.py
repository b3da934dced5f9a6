"""The memory and the time of a rank that computes its tile in blocks, segment by segment: of a training step or a map.

A segment is a run of nodes, walked on its largest block as a stage is on a tile. Between segments lie tensors: values
until the backward pass of their last reader, gradients until that of their maker. Each segment but the last is run
forward, and each is run once more and differentiated; a node makes the halo of a segment at each of its blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from tiledseg.geometry.box import Interval
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.shapes import tensor_channels
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.geometry.sharing.layer_windows import NodeWindows, block_partition, partitions_of, segment_windows
from tiledseg.geometry.sharing.segments import Segment, segments
from tiledseg.planning.walk.cost import ForwardWalk, tile_walk
from tiledseg.planning.walk.cost_model import Machine
from tiledseg.planning.walk.items import BACKWARD
from tiledseg.planning.walk.rank_steps import RankSteps, TensorShape, dim_steps
from tiledseg.planning.walk.step_memory import block_peak, weight_memory
from tiledseg.units import norm_work_bytes

MOST_WRITTEN = 32 << 20  # bytes on their way to a file, as `memory.file_store` bounds them


class BlockedStep:
    """A training step, or a map unless it `trains`, on a context of (height, width), in `blocks` (rows, cols) or fewer
    where the context is too small.

    `shared`: the ranks' parts of the context along rows and columns; the rank with the most pixels counts. `together`:
    images of a rank that go through a segment before the next one, all of which lie between segments; None where each
    goes alone. Bytes: `fixed` ones of weights, their gradients' sums and the optimizer's values; of the `image` as it
    was read; the most `stored` between segments at once.
    """

    def __init__(
        self,
        graph: Graph,
        bands: int,
        context: tuple[int, int],
        blocks: tuple[int, int],
        value_bytes: int = 4,
        trains: bool = True,
        shared: tuple[Partition, Partition] | None = None,
        together: int | None = None,
    ) -> None:
        self.graph, self.bands, self.width, self.images = graph, bands, value_bytes, together or 1
        ranks = shared or (Partition((0, context[0])), Partition((0, context[1])))
        self.ranks = ranks[0].parts, ranks[1].parts
        graphs = graph, graph.along_columns
        dims = zip(graphs, ranks, blocks, strict=True)
        self.cuts = tuple(partitions_of(one, block_partition(one, cut, parts)) for one, cut, parts in dims)
        self.segments = segments(graph, together is None and all(cut[0].parts == 1 for cut in self.cuts))
        self.windows = [  # of each segment's blocks along rows and columns: of its nodes, and of tensors that enter it
            tuple(segment_windows(one, cut, segment) for one, cut in zip(graphs, self.cuts, strict=True))
            for segment in self.segments
        ]
        channels = tensor_channels(graph, bands)
        self.costs = tile_walk(graph, bands, context, value_bytes).costs
        share = math.prod(_longest(cut.blocks) / cut.size for cut in ranks)
        sizes = math.prod((bands, *context)) * value_bytes, *(cost.output_bytes for cost in self.costs)
        self.whole = [share * size for size in sizes]  # bytes of each tensor on the rank with most
        self.pixel = [float(bands * value_bytes), *(c.output_bytes / (c.shape[1] * c.shape[2]) for c in self.costs)]
        self.blocks = math.prod(len(cut[0].blocks) for cut in self.cuts)
        measured = {graph.sources[k][0] for k, layer in enumerate(graph.layers) if layer.statistics}
        largest = ([_longest(cut[t].blocks) for cut in self.cuts] for t in range(len(graph) + 1))
        self.norm_work = [norm_work_bytes(channels[t], *at) * (t in measured) for t, at in enumerate(largest)]
        places = range(len(self.segments))
        self.walks = [self._walk(at) for at in places]  # of each segment's largest block
        # By segment, bytes of its largest block's tensors, of those that enter, and of their strips from other blocks.
        self.sizes = [{tensor: made.bytes for tensor, made in walk.made.items()} for walk in self.walks]
        self.ahead = [sum(self.sizes[at][t] for t in self.segments[at].entering if t) for at in places]
        self.strips = [{t: self._foreign_bytes(at, t) for t in self.segments[at].entering if t} for at in places]
        self.fixed = sum(weight_memory(graph, bands, value_bytes)[: 3 if trains else 1])
        self.image = int(self.images * self.whole[0])
        moments = self._backward() if trains else self._forward()
        self.stored, self._in_memory, self._in_file = (max(bytes_at) for bytes_at in zip(*moments, strict=True))

    def total(self, in_file: bool) -> int:
        """Return the bytes of a rank's memory, where blocks lie in it, or in a file."""
        return self.least(True) + self._in_file if in_file else self.fixed + self.image + self._in_memory

    def least(self, in_file: bool) -> int:
        """Return the bytes that any number of blocks needs."""
        return self.fixed + self.image + (min(MOST_WRITTEN, self.stored) if in_file else self.stored)

    def more_time(self, machine: Machine, waited: Callable[[float, float], float] | None) -> float:
        """Return the seconds by which a step is longer than on the whole, as a share of that. `waited`: the seconds for
        bytes written to a file and read from it; None where blocks lie in memory.

        A tensor between segments is written once, and read by each segment that takes it, forward and back; so are
        gradients.
        """
        seconds = written = read = 0.0
        for at, segment in enumerate(self.segments):
            is_last = at + 1 == len(self.segments)
            run = self.blocks * sum(machine.node(cost)[0] for cost in self.walks[at].costs)
            seconds += ((1 if is_last else 2) + BACKWARD) * run
            written += 0 if is_last else self.costs[segment.leaving[0] - 1].output_bytes
            values = self.blocks * self.ahead[at]
            read += (2 if is_last else 3) * values  # its values, back and forth, and its gradient
            written += values
        seconds += waited(written, read) if waited else (written + read) / machine.memory_bandwidth
        return seconds / ((1 + BACKWARD) * sum(machine.node(cost)[0] for cost in self.costs)) - 1

    @property
    def largest(self) -> TensorShape:
        """The largest tensor that a layer makes of a block."""
        names = self.graph.names
        shapes = [TensorShape(names[k + 1], *ran.shape) for walk in self.walks for k, ran in walk.ran.items()]
        return max(shapes, key=lambda shape: shape.values)

    def _forward(self) -> Iterator[tuple[int, int, int]]:
        """Yield the moments of a map: a tensor is freed after the last segment that takes it. The worst moment of a
        block holds a node's inputs, their cut or padded parts, its output, and the inputs of later nodes."""
        ends = {tensor: at for at, segment in enumerate(self.segments) for tensor in segment.entering}
        lives: set[int] = set()
        for at, segment in enumerate(self.segments):
            lives.update(segment.leaving if at + 1 < len(self.segments) else ())
            stored, sizes, most = sum(self.whole[tensor] for tensor in lives), self.sizes[at], 0
            for place, k in enumerate(segment.nodes):
                later = {t for node in segment.nodes[place + 1 :] for t in self.graph.sources[node]}
                later, sources = {*later, *segment.leaving}, {*self.graph.sources[k]}
                made = {*segment.entering, *(node + 1 for node in segment.nodes[:place])} & (later | sources)
                most = max(most, sum(sizes[t] for t in (*made, *sources)) + 2 * sizes[k + 1])
            yield self._moment(at, most, stored, self.ahead[at], lives, 0.0)
            lives = {tensor for tensor in lives if ends[tensor] > at}

    def _backward(self) -> Iterator[tuple[int, int, int]]:
        """Yield the moments of a backward pass, from the last segment to the first: they need more than those of the
        forward pass before it."""
        values = {segment.leaving[0] for segment in self.segments[:-1]}
        gradients: set[int] = set()
        for at in reversed(range(len(self.segments))):
            segment = self.segments[at]
            leaving = set(segment.leaving) if at + 1 < len(self.segments) else set()
            values -= leaving
            before = sum(self.whole[tensor] for tensor in gradients | leaving)
            readers = self.strips[at:]
            gradients = (gradients | set(segment.entering)) - leaving - {0}
            after = sum(self.whole[tensor] for tensor in gradients)  # made block by block, as those before are freed
            strips = sum(each[t] for each in readers for t in gradients | leaving if t in each)
            stored = sum(self.whole[tensor] for tensor in values) + max(before, after)
            sizes, layers, origins = self.sizes[at], self.graph.layers, self.graph.origins
            ahead = 2 * self.ahead[at] + sum(sizes[tensor] for tensor in segment.leaving)
            overwritten = {origins[self.graph.sources[k][0]] for k in segment.nodes if layers[k].overwrites}
            working = sum((2 if tensor in overwritten else 1) * sizes[tensor] for tensor in segment.entering)
            working += block_peak(self.walks[at], at + 1 == len(self.segments))
            yield self._moment(at, working, stored, ahead, values, strips)

    def _moment(
        self, at: int, working: float, stored: float, ahead: float, values: Iterable[int], gradients: float
    ) -> tuple[int, int, int]:
        """Return a moment's bytes: stored between segments, and in all but the fixed ones, in memory or in a file.

        `working`: of the largest block at work. `ahead`: read from a file for the next one. `stored`, and strips of
        `values` and `gradients` for other blocks: of one image. Segments share strips.
        """
        segment = self.segments[at]
        read = (*segment.leaving, *(self.graph.sources[k][0] for k in segment.nodes))
        working += max(self.norm_work[tensor] for tensor in read)
        strips = sum(max((each[t] for each in self.strips if t in each), default=0.0) for t in values)
        stored, strips, gradients = (self.images * each for each in (stored, strips, gradients))
        return int(stored), int(working + stored + gradients), int(working + ahead + strips + gradients)

    def _walk(self, at: int) -> ForwardWalk:
        """Walk the largest block of a segment, from the windows that it reads."""
        segment, graph = self.segments[at], self.graph
        rows, cols = (_largest_block(graph, segment, *windows) for windows in self.windows[at])
        walk = ForwardWalk(graph, self.bands, 2, self.width, segment.leaving)
        for tensor in segment.entering:
            walk.enter(tensor, (rows[0][tensor].size, cols[0][tensor].size))
        for k, row, col in zip(segment.nodes, rows[1], cols[1], strict=True):
            walk.step(k, row, col)
        return walk

    def _foreign_bytes(self, at: int, tensor: int) -> float:
        """Return the bytes that blocks read of other blocks, on the rank whose blocks read most."""
        total, own = 1.0, 1.0
        for (_, entering), cut, ranks in zip(self.windows[at], self.cuts, self.ranks, strict=True):
            read = entering[tensor]
            each = len(read) // ranks
            blocks = list(zip(read, cut[tensor].blocks, strict=True))
            of_ranks = [blocks[first : first + each] for first in range(0, len(blocks), each)]
            most = max(of_ranks, key=lambda of_rank: sum(window.size for window, _ in of_rank))
            total *= sum(window.size for window, _ in most)
            own *= sum(window.clip(block).size for window, block in most)
        return self.pixel[tensor] * (total - own)


def _largest_block(
    graph: Graph, segment: Segment, nodes: Sequence[NodeWindows], entering: Mapping[int, Sequence[Interval]]
) -> tuple[dict[int, Interval], RankSteps]:
    """Return, along one dim, the positions that the largest block holds of each tensor, and its steps."""
    count = len(nodes[0].given) if nodes else len(next(iter(entering.values())))
    blocks = []
    for index in range(count):
        held = {tensor: read[index] for tensor, read in entering.items()}
        blocks.append((held, dim_steps(graph, segment.nodes, nodes, held, index, {})))

    def positions(block: tuple[dict[int, Interval], RankSteps]) -> int:
        return sum(i.size for i in block[0].values()) + sum(n.read for step in block[1] for n in step.inputs)

    return max(blocks, key=positions)


def _longest(intervals: Sequence[Interval]) -> int:
    return max(interval.size for interval in intervals)
