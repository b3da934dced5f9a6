"""The memory of a segment on one block, while it is run once more and differentiated: walked as `step_memory` does.

What `layer_memory` says of a rank's block holds here too; but nothing is exchanged, and what enters is read as a window
that is there until the end, as its gradient is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tiledseg.geometry.graph import Graph
from tiledseg.geometry.interval import Interval
from tiledseg.geometry.sharing.layer_windows import NodeWindows
from tiledseg.geometry.sharing.segments import Segment
from tiledseg.planning.step.backward_walk import BackwardWalk
from tiledseg.planning.step.cost import Tensor
from tiledseg.planning.step.rank_steps import DimStep, input_step
from tiledseg.planning.walk.layer_memory import RankWalk

Windows = tuple[Sequence[NodeWindows], Mapping[int, Sequence[Interval]]]  # of the nodes; read of what enters


def differentiated(
    graph: Graph, bands: int, segment: Segment, rows: Windows, cols: Windows, value_bytes: int, is_last: bool
) -> int:
    """Bytes at the worst moment of the largest block, the windows that it reads included. The loss follows where the
    segment `is_last`, else a gradient of what leaves is there before."""
    row, col = (_largest(graph, segment, each) for each in (rows, cols))
    walk = RankWalk(graph, bands, 2, value_bytes)
    read = 0
    for tensor in segment.entering:
        sizes = row.held[tensor].size, col.held[tensor].size
        made = Tensor(walk.channels[tensor] * sizes[0] * sizes[1], kept=True, value_bytes=value_bytes)
        walk.enter(tensor, f"entering {tensor}", made, sizes)
        read += made.bytes * (2 if _written_over(graph, segment, tensor) else 1)
    for k, r, c in zip(segment.nodes, row.steps, col.steps, strict=True):
        walk.made[k + 1] = walk.step(k, r, c)
    results = tuple(walk.made[tensor].name for tensor in segment.leaving)
    kept = [cost.kept_bytes for cost in walk.costs]
    back = BackwardWalk(Graph(tuple(walk.nodes), results), walk.costs, value_bytes, 0, len(walk.nodes))
    if is_last:
        back.begin(sum(kept))
    else:
        back.receive(sum(kept))
    for k in reversed(range(len(kept))):
        back.step(k, kept[k])
    return read + back.peak


class _Block:
    """One dim of a block: what it holds of each tensor, and the steps of the segment's nodes."""

    def __init__(self, graph: Graph, segment: Segment, windows: Windows, index: int) -> None:
        self.held = {tensor: read[index] for tensor, read in windows[1].items()}
        self.steps: list[DimStep] = []
        for k, at in zip(segment.nodes, windows[0], strict=True):
            taken = [input_step(at, n, index, self.held[t], None) for n, t in enumerate(graph.sources[k])]
            given = at.given[index]
            whole = at.output.parts == 1
            computed = given.size if whole else at.node.layer.computed(taken[0].read, given.size)
            self.steps.append(DimStep(tuple(taken), computed, given.size))
            self.held[k + 1] = given

    @property
    def positions(self) -> int:
        """Of all that it holds and reads."""
        return sum(i.size for i in self.held.values()) + sum(one.read for s in self.steps for one in s.inputs)


def _largest(graph: Graph, segment: Segment, windows: Windows) -> _Block:
    count = len(windows[0][0].given) if windows[0] else len(next(iter(windows[1].values())))
    return max((_Block(graph, segment, windows, index) for index in range(count)), key=lambda b: b.positions)


def _written_over(graph: Graph, segment: Segment, tensor: int) -> bool:
    """Whether a layer writes over what enters, so that a copy is made first."""
    return any(graph.layers[k].overwrites and graph.origins[graph.sources[k][0]] == tensor for k in segment.nodes)
