"""The bytes of a backward pass on top of all that is kept for it: gradients, walked node by node.

The walk covers a whole network, or a run of its nodes, a stage. It is checked against PyTorch's allocations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tiledseg.geometry.graph import Graph
from tiledseg.planning.step.cost import LayerCost, loss_bytes, loss_peak, unfolded_bytes
from tiledseg.units.widths import wide_bytes


def backward_peak(
    graph: Graph, costs: Sequence[LayerCost], kept: Sequence[int], bytes_per_value: int, first: int = 0
) -> int:
    """Return the peak bytes of the backward pass of the nodes from `first` on, on top of what they keep.

    `kept`: bytes of each node of the run; the loss is the last node's. Counted at each node are what this and earlier
    ones keep, the gradients of its output, inputs and weights, and those that wait for the maker of their tensor. The
    gradients of a tensor's several readers are added up in a new one.

    A stage receives a gradient of what it has sent from each node that takes it, as if all were on stages of their own,
    and holds their sum until the end. It holds the gradients of what it received likewise.
    """
    walk = BackwardWalk(graph, costs, bytes_per_value, first, first + len(kept))
    return walk.run(kept) - walk.at_first


class Gradients(NamedTuple):
    """Bytes of gradients at a node: at its worst moment, before its own ones are made, and the most once what it keeps
    is let go."""

    peak: int
    before: int
    after: int


def gradients_by_node(
    graph: Graph, costs: Sequence[LayerCost], bytes_per_value: int, first: int, stop: int
) -> list[Gradients]:
    """Return the gradients of the nodes `first` to `stop`; last those of the loss, without what this keeps, or those
    that arrive from later stages."""
    walk = BackwardWalk(graph, costs, bytes_per_value, first, stop)
    walk.begin(0)
    last = Gradients(walk.peak - walk.at_first, 0, 0)
    moments = [last]
    for k in reversed(range(first, stop)):
        before = walk.live + sum(walk.waiting.values())
        walk.during = walk.after = 0
        walk.step(k, 0)
        if k == first:
            walk.end()
        moments.append(Gradients(walk.during, before, walk.after))
    return moments[::-1]


class BackwardWalk:
    """A backward pass from the last node of a run to the first, in bytes. `given`: it begins with gradients of the
    results, in place of a loss."""

    def __init__(
        self,
        graph: Graph,
        costs: Sequence[LayerCost],
        bytes_per_value: int,
        first: int,
        stop: int,
        given: bool = False,
    ) -> None:
        self.graph, self.costs, self.bytes_per_value = graph, costs, bytes_per_value
        self.first, self.stop, self.given = first, stop, given
        self.waiting: dict[int, int] = {}  # of each tensor with a gradient, the bytes that this holds alone
        self.scattered: set[int] = set()  # whose gradients are views of larger ones, or the loss has made
        self.live = self.at_first = 0
        self.during = self.after = 0  # the most while nodes run backward, and once they have let go what they keep

    @property
    def peak(self) -> int:
        return max(self.during, self.after)

    def run(self, kept: Sequence[int]) -> int:
        """Walk all nodes, which keep so many bytes each, and return the peak."""
        self.begin(sum(kept))
        for k in reversed(range(self.first, self.stop)):
            self.step(k, kept[k - self.first])
        self.end()
        return self.peak

    def begin(self, kept: int) -> None:
        """Differentiate the loss, or receive gradients of the results, or those of later stages."""
        self.at_first = self.live = kept
        if self.given:
            self.waiting = {tensor: self._bytes(tensor) for tensor in self.graph.results}
            self.during = kept + sum(self.waiting.values())
            return
        if self.stop == len(self.graph):
            results = [self.costs[tensor - 1] for tensor in self.graph.results]
            self.at_first = kept + loss_bytes(results, self.bytes_per_value)
            self.during = self.at_first + loss_peak(results, self.bytes_per_value)
            self.waiting = {tensor: self._bytes(tensor) for tensor in self.graph.results}
            self.scattered.update(self.graph.results)
            return
        leaving = [t for t in self.graph.leaving(self.first, self.stop) if self.graph.wants_gradient[t]]
        received = sum(self._later_readers(tensor) * self._bytes(tensor) for tensor in leaving)
        summed = max((self._bytes(tensor) for tensor in leaving if self._later_readers(tensor) > 1), default=0)
        self.during = kept + received + summed
        self.live = kept + sum(map(self._bytes, leaving))
        self.waiting = dict.fromkeys(leaving, 0)

    def _later_readers(self, tensor: int) -> int:
        return sum(reader >= self.stop for reader in self.graph.readers[tensor])

    def step(self, k: int, kept: int) -> None:
        """A node's backward pass; after it, what the node keeps is let go."""
        gradient = self.waiting.pop(k + 1, 0)
        made = self._gradients(k, gradient)
        weights = self.costs[k].trained * wide_bytes(self.bytes_per_value)
        own = gradient + weights + sum(each.allocated for each in made) + max(-gradient, self._transient(k))
        self.during = max(self.during, self._lying + own + self._straightened(k))
        self.live -= kept
        hands_parts = self.graph.layers[k].gradient == "parts"
        for each in made:
            held = each.held
            if hands_parts and not each.allocated:
                self.scattered.add(each.tensor)
            if each.tensor in self.waiting:
                self.scattered.discard(each.tensor)
                self._reach(held + self._bytes(each.tensor))
                held = self._bytes(each.tensor)
            self.waiting[each.tensor] = held

    def end(self) -> None:
        """What came in and no gradient depends on has one of zeros."""
        entered = self.graph.entering(self.first, self.stop) if self.first else ()
        zeros = [t for t in entered if self.graph.wants_gradient[t] and t not in self.waiting]
        self._reach(sum(map(self._bytes, zeros)))

    @property
    def _lying(self) -> int:
        return self.live + sum(self.waiting.values())

    def _reach(self, more: int) -> None:
        self.after = max(self.after, self._lying + more)

    def _transient(self, k: int) -> int:
        cost, layer, measured = self.costs[k], self.graph.layers[k], self.graph.nodes[k].measured
        unfolded = unfolded_bytes(layer, cost, self.bytes_per_value) if self.graph.wants_gradient[k + 1] else 0
        if measured is not None:
            return measured.bytes_of(measured.transient, cost.shape, self.bytes_per_value) + unfolded
        return layer.transient_bytes(cost.input_bytes, cost.shape) + unfolded

    def _straightened(self, k: int) -> int:
        """The copy of an output's gradient that does not lie channels last, where a node computes from such."""
        return self._bytes(k + 1) if k + 1 in self.scattered and self.graph.layers[k].straightens_gradient else 0

    def _bytes(self, tensor: int) -> int:
        return self.costs[tensor - 1].output_bytes

    def _gradients(self, k: int, gradient: int) -> list[_Gradient]:
        """Those of a node's inputs, made of that of its output; who shares the output's memory holds it together, which
        counts for the tensor that is needed longest."""
        layer, sources, sizes = self.graph.layers[k], self.graph.sources[k], self.costs[k].input_bytes
        made: list[_Gradient] = []
        if not self.graph.wants_gradient[k + 1]:
            return made
        for index, tensor in sorted(enumerate(sources), key=lambda entry: entry[1]):
            if not self.graph.wants_gradient[tensor]:
                continue
            if (measured := self.graph.nodes[k].measured) is not None and (
                each := measured.gradients[index]
            ) is not None:
                held = measured.bytes_of(each, self.costs[k].shape, self.bytes_per_value)
                made.append(_Gradient(tensor, held, held))
            elif measured is None and layer.gradient == "new":
                held = layer.held_bytes(sizes[index], self.costs[k].shape)
                made.append(_Gradient(tensor, self._allocated(k, index, gradient), held))
            elif layer.crop(index):
                made.append(_Gradient(tensor, sizes[index], sizes[index]))
            else:
                made.append(_Gradient(tensor, 0, gradient))
                gradient = 0
        return made

    def _allocated(self, k: int, index: int, gradient: int) -> int:
        size, source = self.costs[k].input_bytes[index], self.graph.origins[self.graph.sources[k][index]]
        if self.graph.overwrites[k] and source > self.first and self.graph.layers[source - 1].returns_view:
            # Written over a view: autograd copies the gradient, and twice more; a received one stays beside its copy.
            return (3 if gradient else 4) * size
        return self.graph.layers[k].gradient_bytes(size, self.costs[k].shape)


class _Gradient(NamedTuple):
    """Of a tensor: bytes allocated while it is made, and bytes that are then held for it alone."""

    tensor: int
    allocated: int
    held: int
