"""What a network costs on one context: parameters, multiply-adds, output shapes, bytes kept.

Counted from what layers say of themselves. What autograd keeps for the backward pass, a layer (batch of one tile):

- convolution, transposed convolution: its input;
- leaky ReLU: its output, which it writes over its input, so a convolution's output is not kept a second time;
- max pooling: its input;
- norm: its input and a few statistics: pixel norm two a pixel, others some a channel or group;
- dropout: one value a channel; concatenation and upsampling: nothing, their outputs are kept by the layer after;
- the loss: the log-probabilities (4 bytes or more each) and an 8-byte label for each output pixel.

A tensor that several layers keep counts once, and nothing is kept for a tensor whose gradient nobody
wants. With 2-byte values (bf16 autocast) group and pixel norm compute in 4 bytes, so their 4-byte input and output
count, and the 2-byte copy that the next convolution takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from tiledseg.geometry.graph import INPUT, Graph, Node
from tiledseg.geometry.layers.layer import Layer, Shape
from tiledseg.geometry.memory_policy import homes
from tiledseg.geometry.memory_words import USUAL_LOSS, LossBytes
from tiledseg.geometry.receptive_field import output_size
from tiledseg.geometry.shapes import tensor_channels
from tiledseg.planning.step.halo_traffic import area, given_back_in_place, received
from tiledseg.planning.step.rank_steps import DimStep, InputStep, RankSteps, whole_steps
from tiledseg.units.widths import DOUBLE_BYTES, SINGLE_BYTES, copy_bytes, wide_bytes

FURTHER_OUTPUT = 3  # sizes of it that a loss of several outputs keeps: measured of `training.losses.edge_objective`
INDEX_BYTES = 8  # labels of a loss


@dataclass(frozen=True)
class LayerCost:
    """One layer on one context: output `shape` (channels, height, width), and what it costs; bytes of each input.
    `frozen`: its parameters are not trained. `loss`: see `geometry.graph.Node`."""

    name: str
    kind: str
    shape: Shape
    parameters: int
    multiply_adds: int
    input_bytes: tuple[int, ...]
    output_bytes: int
    kept_bytes: int
    frozen: bool = False
    loss: LossBytes = USUAL_LOSS

    @property
    def trained(self) -> int:
        """Parameters that have gradients."""
        return 0 if self.frozen else self.parameters


@dataclass
class Tensor:
    """A tensor of a forward walk; `kept`: autograd keeps it already. `stored`: values in memory, where they are fewer
    than it shows; `view_of`: the tensor whose memory it is. `home`: its number in the graph (`memory_policy.homes`),
    None where it was made for one node alone."""

    values: int
    kept: bool = False
    value_bytes: int = SINGLE_BYTES
    stored: int | None = None
    view_of: Tensor | None = None
    home: int | None = None

    @property
    def bytes(self) -> int:
        return self.values * self.value_bytes

    @property
    def in_memory(self) -> int:
        """Values in memory."""
        return self.values if self.stored is None else self.stored


@dataclass(frozen=True)
class MovedLayer(Layer):
    """A step of a rank that shares an image: a cut, padding or exchange of a tensor, or a norm over all ranks.

    `allocated`: bytes that its backward pass allocates for the gradient of its input. `weights`: of a norm.
    """

    allocated: int
    weights: int = 0

    def parameters(self, channels: int) -> int:
        return self.weights

    def gradient_bytes(self, input_bytes: int, shape: Shape) -> int:
        return self.allocated


@dataclass(frozen=True)
class Passed(Layer):
    """A window of whose gradient a part is handed on, a view."""

    @property
    def gradient(self) -> str:
        return "parts"


class Ran(NamedTuple):
    """A node in a forward pass: what it computes from, and what it makes. `moment`: its number among all steps;
    `first`: of the first step done for it. `fresh`: bytes of what is made for it alone, `noted` of which arrive from
    other ranks. `over_ranks`: its statistics are of several ranks."""

    first: int
    moment: int
    brought: tuple[Tensor, ...]
    made: Tensor
    shape: Shape
    fresh: int
    noted: int
    over_ranks: bool


class _Made(NamedTuple):
    """A tensor as the rank has it: the step that made it, and its rows and columns."""

    name: str
    tensor: Tensor
    size: tuple[int, int]


class ForwardWalk:
    """A forward pass, node by node, with the cost of each step: of a tile, or of a rank's block or a segment's block,
    where tensors are also cut, exchanged and padded between nodes. These three are steps too.

    An exchange makes a new tensor, block and halo, which the convolution after it keeps. Where an activation comes
    between, the window is its output. Padding at the image's border makes a new tensor too.
    """

    def __init__(self, graph: Graph, bands: int, ranks: int, value_bytes: int) -> None:
        self.graph, self.ranks, self.value_bytes = graph, ranks, value_bytes
        self.channels, self._homes = tensor_channels(graph, bands), homes(graph)
        self.made: dict[int, _Made] = {}
        self.nodes: list[Node] = []
        self.costs: list[LayerCost] = []
        self.ran: list[Ran] = []
        self._fresh = self._noted = 0  # of the present node

    @cached_property
    def walked(self) -> Graph:
        """All steps as a graph: the network's own where nothing is done between its nodes."""
        if self.ranks == 1 and len(self.nodes) == len(self.graph):
            return self.graph
        return Graph(tuple(self.nodes), tuple(self.made[tensor].name for tensor in self.graph.results))

    @property
    def input_bytes(self) -> int:
        return self.made[0].tensor.bytes

    def begin(self, values: int, size: tuple[int, int]) -> None:
        """Start from the network's input of so many values."""
        self.made[0] = _Made(INPUT, Tensor(values, value_bytes=self.value_bytes, home=0), size)

    def enter(self, tensor: int, name: str, values: Tensor, size: tuple[int, int]) -> None:
        """Add a tensor made elsewhere, which is held until the end, as its gradient is where it wants one."""
        wants = self.graph.wants_gradient[tensor]
        shape = self.channels[tensor], *size
        self._add(Node(name, MovedLayer(0, int(wants)), (INPUT,)), shape, (0,), 0, 0, values, 0)
        self.made[tensor] = _Made(name, values, size)

    def step(self, k: int, row: DimStep, col: DimStep) -> None:
        """Run node `k`, after the steps that bring its inputs."""
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
        if any(r.source < r.held or c.source < c.held for r, c in zip(row.inputs, col.inputs, strict=True)):
            layer = layer.uncropped
        measured = node.measured
        walked = replace(node, layer=layer, cols=None, inputs=tuple(b.name for b in brought), measured=measured)
        self._add(walked, shape, before, parameters, work, tensor, kept)
        fresh = self._fresh + unfolded_bytes(layer, self.costs[-1], self.value_bytes)
        taken, over_ranks = tuple(b.tensor for b in brought), self._over_ranks(k)
        self.ran.append(Ran(first, len(self.nodes) - 1, taken, tensor, shape, fresh, self._noted, over_ranks))
        tensor.home = self._homes[k + 1] if tensor.home is None else tensor.home
        made = _Made(node.name, tensor, (row.computed, col.computed))
        self.made[k + 1] = self._cut(f"{node.name}: given", made, shape[0], (row.given, col.given))

    def _kept(self, k: int, given: list[Tensor], shape: Shape) -> tuple[Layer, int, Tensor]:
        """Return the layer that node `k` counts as, the bytes that it keeps, and the tensor that it makes."""
        layer = self.graph.layers[k]
        if not self._over_ranks(k):
            return layer, *keep_for_backward(self.graph, k, given, shape, self.value_bytes)
        kept = 0
        if self.graph.wants_gradient[k + 1]:
            kept = layer.kept_besides(shape, self.value_bytes) + sum(keep(given[i]) for i in layer.kept_inputs)
        width = layer.output_width(given[0].value_bytes, self.value_bytes)
        # Of narrow values the gradient and a factor are made in float32, before the gradient is cast.
        narrow = copy_bytes(given[0].value_bytes) > 0
        size = 2 * SINGLE_BYTES * given[0].values if narrow else given[0].bytes
        moved = MovedLayer(layer.gradient_bytes(size, shape), layer.parameters(shape[0]))
        return moved, kept, Tensor(math.prod(shape), value_bytes=width)

    def _over_ranks(self, k: int) -> bool:
        return self.graph.layers[k].statistics is not None and self.ranks > 1

    def _bring(self, k: int, name: str, made: _Made, channels: int, row: InputStep, col: InputStep) -> _Made:
        """Cut, exchange and pad a tensor that the rank has to the window that node `k` reads."""
        made = self._cut(f"{name}: cut", made, channels, (row.source, col.source))
        if row.moves or col.moves:
            pixel = channels * made.tensor.value_bytes
            self._noted += pixel * area(received(row.swap, col.swap))
            is_part = given_back_in_place(self.graph, k, row, col)
            layer = Passed() if is_part else MovedLayer(pixel * row.source * col.source)
            made = self._move(f"{name}: exchange", made, channels, (row.window, col.window), layer)
        if (row.read, col.read) != (row.window, col.window):
            back = MovedLayer(_bytes(made, channels))
            made = self._move(f"{name}: padding", made, channels, (row.read, col.read), back)
        return made

    def _cut(self, name: str, made: _Made, channels: int, after: tuple[int, int]) -> _Made:
        """Take a view: the tensor stays whole in memory."""
        if made.size == after:
            return made
        return self._moved(name, made, (channels, *after), MovedLayer(_bytes(made, channels)), made.tensor)

    def _move(self, name: str, made: _Made, channels: int, after: tuple[int, int], layer: Layer) -> _Made:
        """Make a new tensor of another size."""
        tensor = Tensor(channels * after[0] * after[1], value_bytes=made.tensor.value_bytes)
        self._fresh += tensor.bytes
        return self._moved(name, made, (channels, *after), layer, tensor)

    def _moved(self, name: str, made: _Made, shape: Shape, layer: Layer, tensor: Tensor) -> _Made:
        self._add(Node(name, layer, (made.name,)), shape, (_bytes(made, shape[0]),), 0, 0, tensor, 0)
        return _Made(name, tensor, (shape[1], shape[2]))

    def _add(
        self, node: Node, shape: Shape, before: tuple[int, ...], parameters: int, work: int, tensor: Tensor, kept: int
    ) -> None:
        after, kind = math.prod(shape) * tensor.value_bytes, type(node.layer).__name__
        self.nodes.append(node)
        sizes = work, before, after, kept
        self.costs.append(LayerCost(node.name, kind, shape, parameters, *sizes, node.frozen, node.loss))


def _bytes(made: _Made, channels: int) -> int:
    """Return the bytes of the part of a tensor that the rank has, which may be a view of more."""
    return channels * made.size[0] * made.size[1] * made.tensor.value_bytes


def rank_walk(graph: Graph, bands: int, row: RankSteps, col: RankSteps, ranks: int, value_bytes: int) -> ForwardWalk:
    """Walk the block of a rank with these steps, one of `ranks` that share the image."""
    walk = ForwardWalk(graph, bands, ranks, value_bytes)
    size = row[0].inputs[0].held, col[0].inputs[0].held
    walk.begin(bands * size[0] * size[1], size)
    for k, (r, c) in enumerate(zip(row, col, strict=True)):
        walk.step(k, r, c)
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


def unfolded_bytes(layer: Layer, cost: LayerCost, bytes_per_value: int) -> int:
    """Return the bytes that a convolution's kernel lays out for the moment, forward and backward alike.

    oneDNN has no float64 kernels, so PyTorch copies every window of the input into a matrix: of a kernel of 3 x 3 nine
    times the input. So on a CPU; on a GPU nothing has been measured.
    """
    if bytes_per_value != DOUBLE_BYTES:
        return 0
    return layer.unfolded(cost.multiply_adds, cost.shape) * bytes_per_value


def backward_passes(graph: Graph, k: int) -> int:
    """How often node `k` makes its forward multiply-adds once more in the backward pass: for the gradients of its
    inputs, and for those of its weights. The network's input counts as if one were made of it."""
    if not graph.wants_gradient[k + 1]:
        return 0
    back = any(source == 0 or graph.wants_gradient[source] for source in graph.sources[k])
    return int(back) + (not graph.nodes[k].frozen)


def step_work(graph: Graph, costs: Sequence[LayerCost]) -> int:
    """Multiply-adds of a training step, forward and backward."""
    return sum(cost.multiply_adds * (1 + backward_passes(graph, k)) for k, cost in enumerate(costs))


def copied(graph: Graph, parameters: Sequence[int]) -> list[int]:
    """Of each node's parameters those whose cast copies are held, where autocast makes some: they are trained, or the
    gradient of an input is made by them. Of others it makes a copy for the moment."""
    nodes = zip(parameters, graph.nodes, graph.sources, strict=True)
    wants = graph.wants_gradient
    return [count if not node.frozen or any(wants[t] for t in given) else 0 for count, node, given in nodes]


def keep_for_backward(
    graph: Graph, k: int, given: Sequence[Tensor], shape: Shape, bytes_per_value: int
) -> tuple[int, Tensor]:
    """Bytes that autograd keeps for node `k` and no earlier one, and the tensor of `shape` that it hands on."""
    layer = graph.layers[k]
    if layer.hands_on:
        return 0, given[0]
    width, measured = layer.output_width(given[0].value_bytes, bytes_per_value), graph.nodes[k].measured
    flat = layer.is_flat if measured is None else measured.flat
    made = Tensor(math.prod(shape), value_bytes=width, stored=shape[0] if flat else None)
    if measured is not None and measured.view_of is not None:
        made.view_of = given[measured.view_of]
    if not graph.wants_gradient[k + 1]:
        return 0, made
    if measured is not None:
        kept = measured.bytes_of(measured.besides, shape, bytes_per_value)
        kept += sum(keep(given[index]) for index in measured.kept_inputs)
        return kept + (keep(made) if measured.keeps_output else 0), made
    if graph.overwrites[k]:
        return keep(given[0]), given[0]
    kept = layer.kept_besides(shape, bytes_per_value)
    for index in layer.kept_inputs:
        kept += keep(given[index], layer.input_width(given[index].value_bytes, bytes_per_value))
    return kept + (keep(made) if layer.keeps_output else 0), made


def keep(tensor: Tensor, value_bytes: int | None = None) -> int:
    """Bytes to keep the tensor in `value_bytes`: 0 where it is kept already, a copy's where the widths differ."""
    width = tensor.value_bytes if value_bytes is None else value_bytes
    if width != tensor.value_bytes:
        return tensor.values * width
    if tensor.view_of is not None:
        return keep(tensor.view_of)
    if tensor.kept:
        return 0
    tensor.kept = True
    return tensor.in_memory * width


def loss_bytes(results: Sequence[LayerCost], bytes_per_value: int) -> int:
    """What the loss of a network's outputs keeps: of the first one's cross-entropy log-probabilities, sum of weights,
    and labels; of further ones so many times their size, measured; and what another loss keeps more."""
    channels, height, width = results[0].shape
    logits = channels * height * width
    further = sum(FURTHER_OUTPUT * result.output_bytes for result in results[1:])
    further += math.ceil(results[0].loss.kept * height * width)
    return (logits + 1) * wide_bytes(bytes_per_value) + height * width * INDEX_BYTES + further


def loss_peak(results: Sequence[LayerCost], bytes_per_value: int) -> int:
    """What is there on top of what the loss keeps while its gradients are made: these, the outputs' own and a copy of
    the first one's, in the loss's width, once the labels are let go; and what another loss makes more."""
    channels, height, width = results[0].shape
    loss = results[0].loss
    made = height * width * (2 * channels * wide_bytes(bytes_per_value) - INDEX_BYTES)
    made += sum(result.output_bytes for result in results[1:])
    return max(0, made + math.ceil((loss.peak - loss.kept) * height * width))
