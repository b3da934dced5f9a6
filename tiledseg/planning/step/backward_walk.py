"""The gradients of a backward pass, walked node by node: of a whole network, or of a run of its nodes, a stage.

The walk is checked against PyTorch's allocations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tiledseg.geometry.graph import Graph
from tiledseg.planning.step.cost import INDEX_BYTES, LayerCost, unfolded_bytes
from tiledseg.units import wide_bytes

FURTHER_OUTPUT = 3  # sizes of it that a loss of several outputs keeps: measured of `training.objective`


class Gradients(NamedTuple):
    """Bytes of gradients at a node: at its worst moment, before its own ones are made, and the most once what the node
    keeps is freed."""

    peak: int
    before: int
    after: int


class _Made(NamedTuple):
    """A gradient of a tensor: bytes allocated while it is made, and bytes that are then held for it alone."""

    tensor: int
    allocated: int
    held: int


def gradients_by_node(
    graph: Graph, costs: Sequence[LayerCost], bytes_per_value: int, first: int, stop: int, given: bool = False
) -> list[Gradients]:
    """Return the gradients of the nodes `first` to `stop`; last those of the loss, without what this keeps, or those
    that arrive from later stages. `given`: gradients of the results are given, in place of a loss.

    The gradients of a tensor's several readers are added up in a new one. A stage receives a gradient of what it has
    sent from each node that reads it, as if all were on stages of their own, and holds their sum until the end. It
    holds the gradients of what it received likewise.
    """
    walk = _BackwardWalk(graph, costs, bytes_per_value, first, stop)
    moments = [Gradients(walk.begin(given), 0, 0)]
    moments += [walk.step(k) for k in reversed(range(first, stop))]
    return moments[::-1]


class _BackwardWalk:
    def __init__(self, graph: Graph, costs: Sequence[LayerCost], bytes_per_value: int, first: int, stop: int) -> None:
        self.graph, self.costs, self.bytes_per_value = graph, costs, bytes_per_value
        self.first, self.stop = first, stop
        self.waiting: dict[int, int] = {}  # of each tensor with a gradient, the bytes that this holds alone
        self.scattered: set[int] = set()  # tensors whose gradients are views of larger ones, or the loss's
        self.sums = 0  # of gradients that later stages send

    def begin(self, given: bool) -> int:
        """Differentiate the loss, or receive the gradients of results or of later stages; return the bytes at once."""
        graph = self.graph
        if given or self.stop == len(graph):
            self.waiting = {tensor: self._bytes(tensor) for tensor in graph.results}
            if given:
                return sum(self.waiting.values())
            self.scattered.update(graph.results)
            return loss_peak([self.costs[tensor - 1] for tensor in graph.results], self.bytes_per_value)
        leaving = [tensor for tensor in graph.leaving(self.first, self.stop) if graph.wants_gradient[tensor]]
        readers = {tensor: sum(reader >= self.stop for reader in graph.readers[tensor]) for tensor in leaving}
        self.sums = sum(map(self._bytes, leaving))
        self.waiting = dict.fromkeys(leaving, 0)
        received = sum(count * self._bytes(tensor) for tensor, count in readers.items())
        return received + max((self._bytes(tensor) for tensor, count in readers.items() if count > 1), default=0)

    def step(self, k: int) -> Gradients:
        """Run a node's backward pass."""
        graph, before = self.graph, self._all
        gradient, made = self.waiting.pop(k + 1, 0), []
        if graph.wants_gradient[k + 1]:
            made = list(self._gradients(k, gradient))
        weights = self.costs[k].trained * wide_bytes(self.bytes_per_value)
        own = gradient + weights + sum(each.allocated for each in made) + max(-gradient, self._transient(k))
        if k + 1 in self.scattered and graph.layers[k].straightens_gradient:
            own += self._bytes(k + 1)  # a copy of the output's gradient that lies channels last
        peak, after = self._all + own, 0
        for tensor, allocated, held in made:
            if graph.layers[k].gradient == "parts" and not allocated:
                self.scattered.add(tensor)
            if tensor in self.waiting:
                self.scattered.discard(tensor)
                after = max(after, self._all + held + self._bytes(tensor))
                held = self._bytes(tensor)
            self.waiting[tensor] = held
        if k == self.first:  # what entered and no gradient depends on has one of zeros
            entered = graph.entering(self.first, self.stop) if self.first else ()
            zeros = [t for t in entered if graph.wants_gradient[t] and t not in self.waiting]
            after = max(after, self._all + sum(map(self._bytes, zeros)))
        return Gradients(peak, before, after)

    @property
    def _all(self) -> int:
        return self.sums + sum(self.waiting.values())

    def _bytes(self, tensor: int) -> int:
        return self.costs[tensor - 1].output_bytes

    def _transient(self, k: int) -> int:
        cost, layer = self.costs[k], self.graph.layers[k]
        unfolded = unfolded_bytes(layer, cost, self.bytes_per_value) if self.graph.wants_gradient[k + 1] else 0
        return layer.transient_bytes(cost.input_bytes, cost.shape) + unfolded

    def _gradients(self, k: int, gradient: int) -> Iterator[_Made]:
        """Yield those of a node's inputs, made of that of its output. One that shares the output's memory holds it,
        which counts for the tensor that is needed longest."""
        layer, cost = self.graph.layers[k], self.costs[k]
        for index, tensor in sorted(enumerate(self.graph.sources[k]), key=lambda entry: entry[1]):
            if not self.graph.wants_gradient[tensor]:
                continue
            size = cost.input_bytes[index]
            if layer.gradient == "new":
                yield _Made(tensor, self._allocated(k, index, gradient), layer.held_bytes(size, cost.shape))
            elif layer.crop(index):
                yield _Made(tensor, size, size)
            else:
                yield _Made(tensor, 0, gradient)
                gradient = 0

    def _allocated(self, k: int, index: int, gradient: int) -> int:
        size, source = self.costs[k].input_bytes[index], self.graph.origins[self.graph.sources[k][index]]
        if self.graph.overwrites[k] and source > self.first and self.graph.layers[source - 1].returns_view:
            # Written over a view: autograd copies the gradient, and twice more; a received one stays beside its copy.
            return (3 if gradient else 4) * size
        return self.graph.layers[k].gradient_bytes(size, self.costs[k].shape)


def loss_bytes(results: Sequence[LayerCost], bytes_per_value: int) -> int:
    """Return the bytes that the loss of a network's outputs keeps. The first one's cross-entropy keeps
    log-probabilities, sum of weights, and labels. Further ones keep a measured multiple of their size. Those of another
    loss are added."""
    channels, height, width = results[0].shape
    logits = channels * height * width
    further = sum(FURTHER_OUTPUT * result.output_bytes for result in results[1:])
    further += math.ceil(results[0].loss.kept * height * width)
    return (logits + 1) * wide_bytes(bytes_per_value) + height * width * INDEX_BYTES + further


def loss_peak(results: Sequence[LayerCost], bytes_per_value: int) -> int:
    """Return the bytes on top of what the loss keeps while its gradients are made, once the labels are freed. They are
    the outputs' gradients and a copy of the first one's, in the loss's width, and those of another loss."""
    channels, height, width = results[0].shape
    loss = results[0].loss
    made = height * width * (2 * channels * wide_bytes(bytes_per_value) - INDEX_BYTES)
    made += sum(result.output_bytes for result in results[1:])
    return max(0, made + math.ceil((loss.peak - loss.kept) * height * width))
