"""The time of a training step in blocks, as a share of the step on the whole: an additive model, as that of `memory`.

Each segment but the last is run forward, and each is run once more and differentiated; what nodes make for the halo of
a segment counts at each of its blocks. What lies between segments is written once and read by each segment that takes
it, forward and back, and so are gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tiledseg.geometry.graph import Graph
from tiledseg.geometry.interval import Interval
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.geometry.sharing.layer_windows import NodeWindows, block_partition, partitions_of, segment_windows
from tiledseg.geometry.sharing.segments import segments
from tiledseg.planning.memory.choice import BACKWARD
from tiledseg.planning.memory.store import Store
from tiledseg.planning.step.cost import layer_costs

Windows = tuple[Sequence[NodeWindows], Mapping[int, Sequence[Interval]]]  # of the nodes; read of what enters


def more_time(
    graph: Graph,
    bands: int,
    context: tuple[int, int],
    blocks: tuple[int, int],
    value_bytes: int,
    store: Store,
    in_file: bool,
    shared: tuple[Partition, Partition] | None = None,
    together: bool = False,
) -> float:
    """The seconds by which a step in `blocks` is longer, as a share of those of the whole. Arguments as those of
    `segment_memory.segment_memory`; `store`: the rates of a file, and of the rank; `together`: with other images, for
    each of which it is the same."""
    ranks = shared or (Partition((0, context[0])), Partition((0, context[1])))
    graphs = graph, graph.along_columns
    cuts = [
        partitions_of(one, block_partition(one, cut, parts))
        for one, cut, parts in zip(graphs, ranks, blocks, strict=True)
    ]
    costs = layer_costs(graph, bands, context, value_bytes)
    nodes = [store.speed.seconds(cost) for cost in costs]
    found = segments(graph, not together and all(cut[0].parts == 1 for cut in cuts))
    seconds, written, read = 0.0, 0.0, 0.0
    for at, segment in enumerate(found):
        is_last = at + 1 == len(found)
        rows, cols = (segment_windows(one, cut, segment) for one, cut in zip(graphs, cuts, strict=True))
        run = sum(nodes[k] * _times(rows[0][n], cols[0][n]) for n, k in enumerate(segment.nodes))
        seconds += ((1 if is_last else 2) + BACKWARD) * run
        written += 0 if is_last else costs[segment.leaving[0] - 1].output_bytes
        for tensor in segment.entering:
            if tensor:
                sides = zip((rows[1][tensor], cols[1][tensor]), cuts, strict=True)
                values = costs[tensor - 1].output_bytes
                for intervals, cut in sides:
                    values = values * sum(one.size for one in intervals) // cut[tensor].size
                read += (2 if is_last else 3) * values  # its values, back and forth, and its gradient
                written += values
    if in_file:
        seconds += store.waited(written, read)
    else:
        seconds += (written + read) / store.speed.memory_bandwidth
    return seconds / ((1 + BACKWARD) * sum(nodes)) - 1


def _times(row: NodeWindows, col: NodeWindows) -> float:
    """How often a node makes each of its positions, over all blocks."""
    made = [sum(one.size for one in each.given) for each in (row, col)]
    return made[0] * made[1] / (row.output.size * col.output.size)
