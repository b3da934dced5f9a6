"""The memory of one training step of a rank that computes its tile in blocks, segment by segment.

An upper bound: of a segment all tensors of a block count as live at once, with the gradients of what it reads, and of
its largest node twice. What lies between segments is walked: values up to the backward pass of those who take them,
gradients up to that of who made them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiledseg.geometry.decomposition import Partition
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.interval import Interval
from tiledseg.geometry.layer_windows import NodeWindows, block_partition, partitions_of, segment_windows
from tiledseg.geometry.segments import Segment, segments
from tiledseg.geometry.shapes import tensor_channels
from tiledseg.planning.cost import layer_costs
from tiledseg.planning.step_memory import fixed_memory
from tiledseg.planning.tensor_limit import TensorShape

FILE_BUFFERS = 192 << 20  # on their way to a file and back


@dataclass(frozen=True)
class SegmentMemory:
    """Bytes: of weights, their gradients' sums and the optimizer's values; of the image as it was read; of
    the largest block at work; of strips for other blocks; and of all blocks that lie between segments at once.
    `largest`: the largest tensor that a layer makes of a block."""

    fixed: int
    image: int
    working: int
    strips: int
    stored: int
    largest: TensorShape

    def total(self, in_file: bool) -> int:
        """Of a rank's memory, where blocks lie in it, or in a file."""
        held = self.fixed + self.image + self.working
        return held + (self.strips + FILE_BUFFERS if in_file else self.stored)


def segment_memory(
    graph: Graph, bands: int, context: tuple[int, int], blocks: tuple[int, int], bytes_per_value: int = 4
) -> SegmentMemory:
    """Of one step on one context of shape (height, width), in so many rows and columns of blocks, or fewer where it is
    too small."""
    image = bands * context[0] * context[1] * bytes_per_value
    walk = _Blocks(graph, bands, context, blocks, bytes_per_value)
    found = [walk.segment(segment) for segment in segments(graph)]
    return SegmentMemory(
        fixed_memory(graph, bands, bytes_per_value),
        image,
        max(working for working, _ in found),
        sum(strips for _, strips in found) * 2,
        walk.stored(),
        max(walk.made, key=lambda shape: shape.values),
    )


class _Blocks:
    def __init__(
        self, graph: Graph, bands: int, context: tuple[int, int], blocks: tuple[int, int], bytes_per_value: int
    ) -> None:
        self.graphs = graph, graph.along_columns
        dims = zip(self.graphs, context, blocks, strict=True)
        self.cuts = tuple(partitions_of(one, block_partition(one, size, parts)) for one, size, parts in dims)
        costs = layer_costs(graph, bands, context, bytes_per_value)
        self.names = graph.names
        self.channels = tensor_channels(graph, bands)
        self.made: list[TensorShape] = []
        self.whole = [0, *(cost.output_bytes for cost in costs)]
        self.pixel = [float(bands * bytes_per_value), *(c.output_bytes / (c.shape[1] * c.shape[2]) for c in costs)]

    def segment(self, segment: Segment) -> tuple[int, int]:
        """Bytes of its largest block at work, and of what its blocks read of others."""
        rows, cols = (segment_windows(g, cut, segment) for g, cut in zip(self.graphs, self.cuts, strict=True))
        nodes = zip(segment.nodes, rows[0], cols[0], strict=True)
        made = {k + 1: self._largest(k + 1, row, col) for k, row, col in nodes}
        read = {t: self.pixel[t] * _most(rows[1][t]) * _most(cols[1][t]) for t in segment.entering}
        sizes = made | read
        inputs = [sum(sizes[source] for source in self.graphs[0].sources[k]) for k in segment.nodes]
        most = max((size + made[k + 1] for k, size in zip(segment.nodes, inputs, strict=True)), default=0.0)
        leaving = sum(sizes[tensor] for tensor in segment.leaving)
        strips = sum(self._foreign(t, rows[1][t], cols[1][t]) for t in segment.entering if t)
        return int(2 * sum(read.values()) + sum(made.values()) + 2 * most + leaving), int(strips)

    def _largest(self, tensor: int, row: NodeWindows, col: NodeWindows) -> float:
        height, width = _most(row.given), _most(col.given)
        self.made.append(TensorShape(self.names[tensor], self.channels[tensor], height, width))
        return self.pixel[tensor] * height * width

    def _foreign(self, tensor: int, rows: Sequence[Interval], cols: Sequence[Interval]) -> float:
        total = sum(i.size for i in rows) * sum(i.size for i in cols)
        own = _own(rows, self.cuts[0][tensor]) * _own(cols, self.cuts[1][tensor])
        return self.pixel[tensor] * (total - own)

    def stored(self) -> int:
        """The most bytes of values and gradients at once, in the backward pass."""
        *inner, last = segments(self.graphs[0])
        values = {segment.leaving[0]: self.whole[segment.leaving[0]] for segment in inner}
        most = sum(values.values())
        gradients = {tensor: self.whole[tensor] for tensor in last.entering if tensor}
        for segment in reversed(inner):
            most = max(most, sum(values.values()) + sum(gradients.values()))
            (tensor,) = segment.leaving
            del values[tensor]
            gradients.update({entering: self.whole[entering] for entering in segment.entering if entering})
            most = max(most, sum(values.values()) + sum(gradients.values()))
            gradients.pop(tensor, None)
        return most


def _most(intervals: Sequence[Interval]) -> int:
    return max(interval.size for interval in intervals)


def _own(intervals: Sequence[Interval], cut: Partition) -> int:
    return sum(interval.clip(block).size for interval, block in zip(intervals, cut.blocks, strict=True))
