"""The memory of one training step of one rank in layer mode: its block of every tensor, walked as `step_memory` does.

What differs from a context of the same size: an exchange makes a new tensor, block and halo, which the convolution
after it keeps; where an activation comes between, the window is its output. Padding at the image's border makes one
too. Each place of an exchange holds its strips, the parts that do not lie in one piece in memory or are made of others,
from the first step on.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from tiledseg.geometry.graph import INPUT, Graph, Node
from tiledseg.geometry.layers.layer import Layer, Shape
from tiledseg.geometry.shapes import tensor_channels
from tiledseg.planning.step.backward_walk import Moved, Passed
from tiledseg.planning.step.cost import LayerCost, Tensor, keep, keep_for_backward
from tiledseg.planning.step.halo_traffic import (
    area,
    given_back_in_place,
    inputs_by_node,
    made_by_activation,
    received,
    sent,
    tensors_of,
)
from tiledseg.planning.step.rank_steps import DimStep, InputStep, RankSteps
from tiledseg.units.widths import SINGLE_BYTES, copy_bytes


def rank_walk(graph: Graph, bands: int, row: RankSteps, col: RankSteps, ranks: int, value_bytes: int) -> RankWalk:
    """The walk of a rank's whole block."""
    walk = RankWalk(graph, bands, ranks, value_bytes)
    first = row[0].inputs[0], col[0].inputs[0]
    tensor = Tensor(bands * first[0].held * first[1].held, value_bytes=value_bytes)
    walk.made[0] = _Made(INPUT, tensor, (first[0].held, first[1].held))
    for k, (r, c) in enumerate(zip(row, col, strict=True)):
        walk.made[k + 1] = walk.step(k, r, c)
    return walk


def strip_bytes(
    graph: Graph, bands: int, row: RankSteps, col: RankSteps, value_bytes: int, training: bool = True
) -> int:
    """Bytes of the strips that a rank's exchanges hold between steps; fewer where a whole narrow block is sent."""
    inputs = inputs_by_node(graph, row, col, tensors_of(graph, bands, value_bytes))
    return sum(
        _strip_pixels(r, c, training and t.has_gradient, made_by_activation(graph, k, r, c)) * t.pixel_bytes
        for k, r, c, t in inputs
    )


def _strip_pixels(row: InputStep, col: InputStep, comes_back: bool, is_made: bool) -> int:
    """Channels last: whole rows, and parts of one, travel as they lie; what is added to others, or `is_made` of a
    gradient, does not."""
    out = sent(row.swap, col.swap)
    lying = [(height, width) for height, width in out if height == 1 or width == col.held]
    taken = [(height, width) for height, width in received(row.swap, col.swap) if height > 1 and width != col.window]
    forward = area(out) - area(lying) + area(taken)
    back = received(row.swap, col.swap) if is_made else taken
    return forward + (area(out) + area(back)) * comes_back


class _Made(NamedTuple):
    """A tensor of the network as the rank has it: the step that made it, and its rows and columns."""

    name: str
    tensor: Tensor
    size: tuple[int, int]


class Ran(NamedTuple):
    """A node of the network on a rank: its moments, what it computes from, and what it makes. `moment`: of itself;
    `first`: of the first step that is done for it. `fresh`: bytes of what is made for it alone, of which `noted` have
    come from others."""

    first: int
    moment: int
    brought: tuple[Tensor, ...]
    made: Tensor
    shape: Shape
    fresh: int
    noted: int
    over_ranks: bool


class RankWalk:
    """The nodes of the network and what is done between them, as nodes of a graph, with the cost of each."""

    def __init__(self, graph: Graph, bands: int, ranks: int, value_bytes: int) -> None:
        self.graph, self.ranks, self.value_bytes = graph, ranks, value_bytes
        self.channels = tensor_channels(graph, bands)
        self.made: dict[int, _Made] = {}
        self.nodes: list[Node] = []
        self.costs: list[LayerCost] = []
        self.ran: list[Ran] = []
        self._fresh = self._noted = 0  # of the node that is walked now

    @property
    def walked(self) -> Graph:
        """All steps, as a graph."""
        return Graph(tuple(self.nodes), tuple(self.made[tensor].name for tensor in self.graph.results))

    def enter(self, tensor: int, name: str, values: Tensor, size: tuple[int, int]) -> None:
        """A tensor that others have made, whose gradient is wanted where theirs is, and held until the end."""
        wants = self.graph.wants_gradient[tensor]
        shape = self.channels[tensor], *size
        self._add(Node(name, Moved(0, int(wants)), (INPUT,)), shape, (0,), 0, 0, values, 0)
        self.made[tensor] = _Made(name, values, size)

    def step(self, k: int, row: DimStep, col: DimStep) -> _Made:
        node, sources = self.graph.nodes[k], self.graph.sources[k]
        first, self._fresh, self._noted = len(self.nodes), 0, 0
        brought = [
            self._bring(k, f"{node.name}.{index}", self.made[source], self.channels[source], r, c)
            for index, (source, r, c) in enumerate(zip(sources, row.inputs, col.inputs, strict=True))
        ]
        shape = self.channels[k + 1], row.computed, col.computed
        work = node.layer.multiply_adds(self.channels[sources[0]]) * row.computed * col.computed
        parameters = node.layer.parameters(self.channels[sources[0]])
        before = tuple(_bytes(b, self.channels[source]) for b, source in zip(brought, sources, strict=True))
        layer, kept, tensor = self._kept(k, [b.tensor for b in brought], shape)
        if made_by_activation(self.graph, k, row.inputs[0], col.inputs[0]):
            size = before[0] // (brought[0].size[0] * brought[0].size[1]) * row.inputs[0].source * col.inputs[0].source
            layer = Moved(size, held=size)
        given, over_ranks = tuple(b.tensor for b in brought), self._over_ranks(k)
        self.ran.append(Ran(first, len(self.nodes), given, tensor, shape, self._fresh, self._noted, over_ranks))
        walked = Node(node.name, layer, tuple(b.name for b in brought), frozen=node.frozen, loss=node.loss)
        self._add(walked, shape, before, parameters, work, tensor, kept)
        computed = _Made(node.name, tensor, (row.computed, col.computed))
        return self._cut(f"{node.name}: given", computed, shape[0], (row.given, col.given))

    def _kept(self, k: int, given: list[Tensor], shape: Shape) -> tuple[Layer, int, Tensor]:
        """How a node counts, the bytes that it keeps, and what it makes."""
        layer = self.graph.layers[k]
        if self._over_ranks(k):
            kept = 0
            if self.graph.wants_gradient[k + 1]:
                inputs = sum(keep(given[index]) for index in layer.kept_inputs)
                kept = layer.kept_besides(shape, self.value_bytes) + inputs
            width = layer.output_width(given[0].value_bytes, self.value_bytes)
            moved = Moved(self._statistics_gradient(layer, given[0], shape), layer.parameters(shape[0]))
            return moved, kept, Tensor(math.prod(shape), value_bytes=width)
        kept, tensor = keep_for_backward(self.graph, k, given, shape, self.value_bytes)
        return layer.uncropped, kept, tensor

    def _over_ranks(self, k: int) -> bool:
        return self.graph.layers[k].statistics is not None and self.ranks > 1

    def _statistics_gradient(self, layer: Layer, tensor: Tensor, shape: Shape) -> int:
        """What the backward pass of a norm over all ranks allocates: its input's gradient; of narrow values that and
        a factor in float32, before it is cast."""
        narrow = copy_bytes(tensor.value_bytes) > 0
        return layer.gradient_bytes(2 * SINGLE_BYTES * tensor.values if narrow else tensor.bytes, shape)

    def _bring(self, k: int, name: str, made: _Made, channels: int, row: InputStep, col: InputStep) -> _Made:
        """From what the rank holds to what node `k` reads."""
        made = self._cut(f"{name}: cut", made, channels, (row.source, col.source))
        if row.moves or col.moves:
            pixel = channels * made.tensor.value_bytes
            self._noted += pixel * area(received(row.swap, col.swap))
            is_part = given_back_in_place(self.graph, k, row, col)
            passed = is_part or made_by_activation(self.graph, k, row, col)
            layer = Passed(is_part) if passed else Moved(pixel * row.source * col.source)
            made = self._move(f"{name}: exchange", made, channels, (row.window, col.window), layer)
        if (row.read, col.read) != (row.window, col.window):
            back = Moved(_bytes(made, channels))
            made = self._move(f"{name}: padding", made, channels, (row.read, col.read), back)
        return made

    def _cut(self, name: str, made: _Made, channels: int, after: tuple[int, int]) -> _Made:
        """A view: the tensor stays whole in memory."""
        if made.size == after:
            return made
        return self._moved(name, made, (channels, *after), Moved(_bytes(made, channels)), made.tensor)

    def _move(self, name: str, made: _Made, channels: int, after: tuple[int, int], layer: Layer) -> _Made:
        """A new tensor of another size."""
        tensor = Tensor(channels * after[0] * after[1], value_bytes=made.tensor.value_bytes)
        self._fresh += tensor.bytes
        return self._moved(name, made, (channels, *after), layer, tensor)

    def _moved(self, name: str, made: _Made, shape: Shape, layer: Layer, tensor: Tensor) -> _Made:
        self._add(Node(name, layer, (made.name,)), shape, (_bytes(made, shape[0]),), 0, 0, tensor, 0)
        return _Made(name, tensor, (shape[1], shape[2]))

    def _add(
        self, node: Node, shape: Shape, before: tuple[int, ...], parameters: int, work: int, tensor: Tensor, kept: int
    ) -> None:
        after = math.prod(shape) * tensor.value_bytes
        kind = type(node.layer).__name__
        self.nodes.append(node)
        sizes = work, before, after, kept
        self.costs.append(LayerCost(node.name, kind, shape, parameters, *sizes, node.frozen, node.loss))


def _bytes(made: _Made, channels: int) -> int:
    """Of the part of a tensor that the rank has at hand, which may be a view of more."""
    return channels * made.size[0] * made.size[1] * made.tensor.value_bytes
