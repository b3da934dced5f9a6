"""The forward walk of a network: output sizes, weights, multiply-adds, and the bytes that autograd keeps, node by node.

One walk serves a tile, a rank's block and a block of a tile. They differ in the sizes of each step (`rank_steps`).
Where a tensor is shared, it is also cut, exchanged and padded between nodes, and these three are steps too.

Autograd keeps for the backward pass of a layer (batch of one tile):

- convolution, transposed convolution: its input;
- leaky ReLU: its output, which it writes over its input, so a convolution's output is not kept a second time;
- max pooling: its input;
- norm: its input and a few statistics: pixel norm two a pixel, others some a channel or group;
- dropout: one value a channel; concatenation and upsampling: nothing, their outputs are kept by the layer after;
- the loss: the log-probabilities (4 bytes or more each) and an 8-byte label for each output pixel.

A tensor that several layers keep counts once, and nothing is kept for a tensor that needs no gradient. With 2-byte
values (bf16 autocast) group and pixel norm compute in 4 bytes, so their 4-byte input and output count, and the 2-byte
copy that the next convolution takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from tiledseg.geometry.graph import INPUT, USUAL_LOSS, Graph, LossBytes, Node
from tiledseg.geometry.layers.layer import Layer, Shape
from tiledseg.geometry.memory_policy import homes
from tiledseg.geometry.shapes import output_size, tensor_channels
from tiledseg.planning.step.rank_steps import (
    DimStep,
    InputStep,
    RankSteps,
    Traffic,
    exchange_bytes,
    given_back_in_place,
    received,
    whole_steps,
)
from tiledseg.units import DOUBLE_BYTES, SINGLE_BYTES, copy_bytes, wide_bytes

FLOPS_PER_MULTIPLY_ADD = 2
INDEX_BYTES = 8  # labels of a loss


@dataclass(frozen=True)
class LayerCost:
    """One layer on one context: output `shape` (channels, height, width), and what it costs; bytes of each input.
    `passes`: how often its backward pass makes the multiply-adds; `reread`: bytes of kept tensors that it reads.
    `looks`: how often it goes through its tensors, 0 where it hands one on. `frozen`: its parameters are not trained.
    `loss`: see `geometry.graph.Node`."""

    name: str
    kind: str
    shape: Shape
    input_bytes: tuple[int, ...]
    output_bytes: int
    parameters: int = 0
    multiply_adds: int = 0
    kept_bytes: int = 0
    passes: int = 0
    reread: int = 0
    looks: int = 1
    frozen: bool = False
    loss: LossBytes = USUAL_LOSS

    @property
    def trained(self) -> int:
        """Parameters that have gradients."""
        return 0 if self.frozen else self.parameters

    @property
    def moved(self) -> int:
        """Bytes that its forward pass reads and writes."""
        return self.looks * (sum(self.input_bytes) + self.output_bytes)


@dataclass
class Tensor:
    """A tensor of a forward walk. `stored`: values in memory, where they are fewer than it shows; `home`: its number in
    the graph (`memory_policy.homes`), None for a copy that one node reads."""

    values: int
    value_bytes: int
    stored: int | None = None
    home: int | None = None

    @property
    def bytes(self) -> int:
        return self.values * self.value_bytes

    @property
    def memory(self) -> int:
        return self.value_bytes * (self.values if self.stored is None else self.stored)


class KeptData(NamedTuple):
    """Data that autograd keeps for a node: `inputs` by their index and its `output`, as they are; bytes of `copies` of
    inputs in another width, and of other things `besides`."""

    inputs: tuple[int, ...] = ()
    output: bool = False
    copies: int = 0
    besides: int = 0


class Ran(NamedTuple):
    """A node of a forward walk: the tensors that it computes from and makes. `moment`: its number among all steps;
    `first`: that of the first step done for it. `fresh`: bytes that are made for it alone, `noted` of which arrive from
    other ranks."""

    first: int
    moment: int
    brought: tuple[Tensor, ...]
    made: Tensor
    shape: Shape
    fresh: int
    noted: int
    kept: KeptData


@dataclass(frozen=True)
class MovedLayer(Layer):
    """A step of a rank that shares an image: a cut, padding or exchange of a tensor, or a norm over all ranks.

    `allocated`: bytes that its backward pass allocates for the gradient of its input; None where it hands a part of a
    gradient on, a view. `weights`: of a norm.
    """

    allocated: int | None
    weights: int = 0

    @property
    def gradient(self) -> str:
        return "parts" if self.allocated is None else super().gradient

    def parameters(self, channels: int) -> int:
        return self.weights

    def gradient_bytes(self, input_bytes: int, shape: Shape) -> int:
        return self.allocated or 0


class _Present(NamedTuple):
    """A tensor as the rank has it: the step that made it, its channels, and its rows and columns."""

    name: str
    tensor: Tensor
    channels: int
    size: tuple[int, int]

    @property
    def bytes(self) -> int:
        """Bytes of the rank's part, which may be a view of more."""
        return self.channels * self.size[0] * self.size[1] * self.tensor.value_bytes


class ForwardWalk:
    """A forward pass, node by node, with the cost of each step.

    An exchange makes a new tensor, block and halo, which the convolution after it keeps. Where an activation comes
    between, the window is its output. Padding at the image's border makes a new tensor too.
    """

    def __init__(
        self, graph: Graph, bands: int, ranks: int, value_bytes: int, results: Sequence[int] | None = None
    ) -> None:
        self.graph, self.bands, self.ranks, self.value_bytes = graph, bands, ranks, value_bytes
        self.results = graph.results if results is None else results
        self.channels, self._homes = tensor_channels(graph, bands), homes(graph)
        self.made: dict[int, _Present] = {}
        self.nodes: list[Node] = []
        self.costs: list[LayerCost] = []
        self.ran: dict[int, Ran] = {}
        self._seen: set[int] = set()  # tensors that are kept already
        self._fresh = self._noted = 0  # of the present node
        self.traffic = Traffic()  # messages of exchanges
        self.besides = 0  # bytes of the strips of a step, one for each message: no more are alive at once

    @cached_property
    def walked(self) -> Graph:
        """All steps as a graph: the network's own where nothing is done between its nodes."""
        if self.ranks == 1 and len(self.nodes) == len(self.graph):
            return self.graph
        return Graph(tuple(self.nodes), tuple(self.made[tensor].name for tensor in self.results))

    @property
    def input_bytes(self) -> int:
        return self.made[0].tensor.bytes

    @property
    def owned(self) -> int:
        """Pixels of the last tensor."""
        return math.prod(self.made[len(self.graph)].size)

    @property
    def work(self) -> int:
        """Multiply-adds of the forward pass; those of pixels that are cropped after a layer count too."""
        return sum(cost.multiply_adds for cost in self.costs)

    def begin(self, height: int, width: int) -> None:
        """Start from the network's input."""
        tensor = Tensor(self.bands * height * width, self.value_bytes, home=0)
        self.made[0] = _Present(INPUT, tensor, self.bands, (height, width))

    def enter(self, tensor: int, size: tuple[int, int]) -> None:
        """Add a tensor made elsewhere, whose bytes count there. Its gradient is held until the end, if it needs one."""
        channels, name = self.channels[tensor], f"entering {tensor}"
        made = Tensor(channels * size[0] * size[1], self.value_bytes, 0, home=self._homes[tensor])
        layer = MovedLayer(0, int(self.graph.wants_gradient[tensor]))
        self._add(Node(name, layer, (INPUT,)), (channels, *size), (0,), made, looks=0)
        self.made[tensor] = _Present(name, made, channels, size)

    def step(self, k: int, row: DimStep, col: DimStep) -> None:
        """Run node `k`, after the steps that bring its inputs."""
        graph, node = self.graph, self.graph.nodes[k]
        first, self._fresh, self._noted = len(self.nodes), 0, 0
        given = [self._bring(k, index, *steps) for index, steps in enumerate(zip(row.inputs, col.inputs, strict=True))]
        tensors, shape = tuple(each.tensor for each in given), (self.channels[k + 1], row.computed, col.computed)
        over_ranks = node.layer.statistics is not None and self.ranks > 1
        kept = kept_data(graph, k, tensors, shape, self.value_bytes, over_ranks)
        made = made_tensor(graph, k, tensors, shape, self.value_bytes, over_ranks)
        layer = node.layer
        if over_ranks:
            # Of narrow values the gradient and a factor are made in float32, before the gradient is cast.
            narrow = copy_bytes(tensors[0].value_bytes) > 0
            size = 2 * SINGLE_BYTES * tensors[0].values if narrow else tensors[0].bytes
            layer = MovedLayer(layer.gradient_bytes(size, shape), layer.parameters(shape[0]))
        if any(r.source < r.held or c.source < c.held for r, c in zip(row.inputs, col.inputs, strict=True)):
            layer = layer.uncropped
        channels, before = self.channels[graph.sources[k][0]], tuple(each.bytes for each in given)
        work = node.layer.multiply_adds(channels) * row.computed * col.computed
        walked = replace(node, layer=layer, cols=None, inputs=tuple(each.name for each in given))
        cost = self._add(
            walked,
            shape,
            before,
            made,
            kept_bytes=self._kept_bytes(tensors, made, kept),
            parameters=node.layer.parameters(channels),
            multiply_adds=work,
            passes=_backward_passes(graph, k) if work else int(graph.wants_gradient[k + 1]),
            reread=sum(before[i] for i in node.layer.kept_inputs) + made.bytes * node.layer.keeps_output,
            looks=0 if node.layer.hands_on or not math.prod(shape) else 1 + over_ranks,
        )
        fresh = self._fresh + unfolded_bytes(layer, cost, self.value_bytes)
        self.ran[k] = Ran(first, len(self.nodes) - 1, tensors, made, shape, fresh, self._noted, kept)
        made.home = self._homes[k + 1] if made.home is None else made.home
        present = _Present(node.name, made, shape[0], shape[1:])
        self.made[k + 1] = self._move(f"{node.name}: given", present, (row.given, col.given), view=True)

    def _kept_bytes(self, brought: Sequence[Tensor], made: Tensor, kept: KeptData) -> int:
        """Return the bytes that autograd keeps for a node besides the tensors that it keeps already."""
        total = kept.copies + kept.besides
        for tensor in (*(brought[index] for index in kept.inputs), *([made] if kept.output else [])):
            if id(tensor) not in self._seen:
                self._seen.add(id(tensor))
                total += tensor.memory
        return total

    def _bring(self, k: int, index: int, row: InputStep, col: InputStep) -> _Present:
        """Cut, exchange and pad a tensor that the rank has to the window that node `k` reads."""
        name = f"{self.graph.nodes[k].name}.{index}"
        source = self.graph.sources[k][index]
        made, passes = self.made[source], int(self.graph.wants_gradient[source])
        made = self._move(f"{name}: cut", made, (row.source, col.source), view=True)
        if row.moves or col.moves:
            pixel = made.channels * (made.tensor.value_bytes if source else wide_bytes(self.value_bytes))
            traffic, strips = exchange_bytes(row.swap, col.swap, pixel, passes)
            self.traffic, self.besides = self.traffic + traffic, self.besides + strips
            self._noted += made.channels * made.tensor.value_bytes * sum(received(row.swap, col.swap))
            layer = MovedLayer(None if given_back_in_place(self.graph, k, row, col) else made.bytes)
            made = self._move(f"{name}: exchange", made, (row.window, col.window), layer, passes=passes)
        if (row.read, col.read) != (row.window, col.window):
            made = self._move(f"{name}: padding", made, (row.read, col.read), passes=passes)
        return made

    def _move(
        self,
        name: str,
        made: _Present,
        size: tuple[int, int],
        layer: Layer | None = None,
        view: bool = False,
        passes: int = 0,
    ) -> _Present:
        """Add a step that makes a tensor of another size, or a view of it: the tensor then stays whole in memory."""
        if view and made.size == size:
            return made
        tensor, shape = made.tensor, (made.channels, *size)
        if not view:
            tensor = Tensor(math.prod(shape), tensor.value_bytes)
            self._fresh += tensor.bytes
        node = Node(name, layer or MovedLayer(made.bytes), (made.name,))
        self._add(node, shape, (made.bytes,), tensor, passes=passes, looks=int(not view))
        return _Present(name, tensor, made.channels, size)

    def _add(self, node: Node, shape: Shape, before: tuple[int, ...], made: Tensor, **figures: int) -> LayerCost:
        kind, after = type(node.layer).__name__, math.prod(shape) * made.value_bytes
        cost = LayerCost(node.name, kind, shape, before, after, frozen=node.frozen, loss=node.loss, **figures)
        self.nodes.append(node)
        self.costs.append(cost)
        return cost


def rank_walk(graph: Graph, bands: int, row: RankSteps, col: RankSteps, ranks: int, value_bytes: int) -> ForwardWalk:
    """Walk the block of a rank with these steps, one of `ranks` that share the image. `besides` also counts the block
    of the input, where that is held for itself."""
    walk, first = ForwardWalk(graph, bands, ranks, value_bytes), (row[0].inputs[0], col[0].inputs[0])
    walk.begin(first[0].held, first[1].held)
    for k, (r, c) in enumerate(zip(row, col, strict=True)):
        walk.step(k, r, c)
    if any(step.held != step.read or step.moves for step in first):  # the first layer keeps another tensor
        walk.besides += first[0].held * first[1].held * bands * wide_bytes(value_bytes)
    return walk


@lru_cache(maxsize=256)
def tile_walk(graph: Graph, bands: int, context: tuple[int, int], value_bytes: int = 4) -> ForwardWalk:
    """Walk a tile with a context of (height, width). Raises GeometryError where that is no legal size."""
    for size in context:
        output_size(graph, size)
    rows, cols = whole_steps(graph, context[0]), whole_steps(graph.along_columns, context[1])
    return rank_walk(graph, bands, rows, cols, 1, value_bytes)


def layer_costs(graph: Graph, bands: int, context: tuple[int, int], bytes_per_value: int = 4) -> tuple[LayerCost, ...]:
    """Return the cost of each layer for one context of (height, width) with `bands` channels.

    Raises GeometryError where the context is no legal size for the network.
    """
    return tuple(tile_walk(graph, bands, context, bytes_per_value).costs)


def kept_data(
    graph: Graph, k: int, given: Sequence[Tensor], shape: Shape, width: int, over_ranks: bool = False
) -> KeptData:
    """Return the data that autograd keeps for node `k`."""
    layer = graph.layers[k]
    if layer.hands_on or not graph.wants_gradient[k + 1]:
        return KeptData()
    if graph.overwrites[k]:
        return KeptData((0,))
    inputs, copies = [], 0
    for index in layer.kept_inputs:
        at_hand = given[index].value_bytes
        needed = at_hand if over_ranks else layer.input_width(at_hand, width)
        if needed == at_hand:
            inputs.append(index)
        else:
            copies += given[index].values * needed
    return KeptData(tuple(inputs), layer.keeps_output, copies, layer.kept_besides(shape, width))


def made_tensor(
    graph: Graph, k: int, given: Sequence[Tensor], shape: Shape, width: int, over_ranks: bool = False
) -> Tensor:
    """Return the tensor that node `k` makes, or hands on."""
    layer = graph.layers[k]
    if layer.hands_on or (graph.overwrites[k] and graph.wants_gradient[k + 1]):
        return given[0]
    values = shape[0] if layer.is_flat and not over_ranks else None
    return Tensor(math.prod(shape), layer.output_width(given[0].value_bytes, width), values)


def unfolded_bytes(layer: Layer, cost: LayerCost, bytes_per_value: int) -> int:
    """Return the bytes that a convolution's kernel lays out for the moment, forward and backward alike.

    oneDNN has no float64 kernels, so PyTorch copies every window of the input into a matrix: of a kernel of 3 x 3 nine
    times the input. So on a CPU; on a GPU nothing has been measured.
    """
    if bytes_per_value != DOUBLE_BYTES:
        return 0
    return layer.unfolded(cost.multiply_adds, cost.shape) * bytes_per_value


def _backward_passes(graph: Graph, k: int) -> int:
    """Return how often node `k` makes its forward multiply-adds once more in the backward pass: for the gradients of
    its inputs, and for those of its weights. The network's input counts as if one were made of it."""
    if not graph.wants_gradient[k + 1]:
        return 0
    back = any(source == 0 or graph.wants_gradient[source] for source in graph.sources[k])
    return int(back) + (not graph.nodes[k].frozen)
