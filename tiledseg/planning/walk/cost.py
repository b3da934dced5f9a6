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
from typing import Any, NamedTuple

from tiledseg.geometry.graph import INPUT, Graph, Node
from tiledseg.geometry.layers.declared import WholeLeaf
from tiledseg.geometry.layers.joins import ImageAttention, Join
from tiledseg.geometry.layers.layer import NO_MEMORY, Layer, LayerMemory, Shape
from tiledseg.geometry.shapes import tensor_channels
from tiledseg.planning.walk.rank_steps import DimStep, InputStep, RankSteps, pieces, whole_steps
from tiledseg.units import SINGLE_BYTES, copy_bytes, wide_bytes

FLOPS_PER_MULTIPLY_ADD = 2
INDEX_BYTES = 8  # labels of a loss


@dataclass(frozen=True)
class LayerCost:
    """One layer on one context: output `shape` (channels, height, width), and what it costs; bytes of each input.
    `passes`: how often its backward pass makes the multiply-adds; `reread`: bytes of kept tensors that it reads.
    `looks`: how often it goes through its tensors, 0 where it hands one on. `frozen`: its parameters are not
    trained. `memory`: of its gradients."""

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
    memory: LayerMemory = NO_MEMORY


@dataclass
class Tensor:
    """A tensor of a forward walk. `memory`: its bytes there, fewer where values repeat; `home`: its number in the graph
    (`Graph.homes`), None for a copy that one node reads; `counted`: a node that keeps it counts its bytes."""

    values: int
    value_bytes: int
    memory: int
    home: int | None = None
    counted: bool = False

    @property
    def bytes(self) -> int:
        return self.values * self.value_bytes


class NodeRun(NamedTuple):
    """A node of a forward walk. `first`, `moment`: numbers of its first and of its last step. `fresh`: bytes that its
    steps make for it alone. `received`: those of them that arrive from other ranks.

    `kept`: tensors that autograd keeps for its backward pass, each with its number in the graph. `large`, `small`:
    further bytes that it keeps, as many as a tensor has, or few. `copies`: the large ones are more than windows.
    """

    first: int
    moment: int
    made: Tensor
    shape: Shape
    fresh: int
    received: int
    kept: tuple[tuple[Tensor, int], ...]
    large: int
    small: int
    copies: bool


@dataclass(frozen=True)
class MovedLayer(Layer):
    """A step of a rank that shares an image: a cut, padding or exchange of a tensor, or a layer with statistics over
    all ranks. Its `gradient` is new, or parts of its output's: a view."""

    gradient: str = "new"  # type: ignore[misc]
    weights: int = 0
    arity: int = 1  # type: ignore[misc]


MOVED = MovedLayer()


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
    between, the window is its output. Padding at the image's border makes a new tensor too. `sent`, `returned`: bytes
    of each message of exchanges, forward and backward.
    """

    def __init__(
        self, graph: Graph, bands: int, ranks: int, value_bytes: int, results: Sequence[int] | None = None
    ) -> None:
        self.graph, self.bands, self.ranks, self.value_bytes = graph, bands, ranks, value_bytes
        self.results = graph.results if results is None else results
        self.channels, self._homes = tensor_channels(graph, bands), graph.homes
        self.made: dict[int, _Present] = {}
        self.nodes: list[Node] = []
        self.costs: list[LayerCost] = []
        self.ran: dict[int, NodeRun] = {}
        self._precisions = {"run": value_bytes, "wide": wide_bytes(value_bytes), "byte": 1}
        self._fresh = self._received = 0  # of the present node
        self.work = 0  # multiply-adds of the forward pass, those of pixels that are cropped after a layer included
        self.sent: list[int] = []
        self.returned: list[int] = []
        self.besides = 0  # bytes of all strips that a step sends and receives: the most that are alive at once

    @cached_property
    def walked(self) -> Graph:
        """All steps as a graph: the network's own where nothing is done between its nodes."""
        if self.ranks == 1 and len(self.nodes) == len(self.graph):
            return self.graph
        names = tuple(self.made[tensor].name for tensor in self.results)
        return Graph(tuple(self.nodes), names, loss=self.graph.loss)

    @property
    def input_bytes(self) -> int:
        return self.made[0].tensor.bytes

    def tensor_bytes(self, tensor: int) -> int:
        """Return the bytes of a tensor of the network, whole: its reader crops it."""
        return self.costs[tensor - 1].output_bytes if tensor else self.input_bytes

    def received(self, first: int, stop: int) -> int:
        """Return the bytes that a stage of the nodes `first` to `stop` receives in a forward pass."""
        return sum(map(self.tensor_bytes, self.graph.entering(first, stop))) if first else 0

    def enter(self, tensor: int, size: tuple[int, int]) -> None:
        """Add a tensor that another segment made and counts. Its gradient, if any, is held until the end."""
        channels, name = self.channels[tensor], f"entering {tensor}"
        made = Tensor(channels * size[0] * size[1], self.value_bytes, memory=0, home=self._homes[tensor])
        layer = MovedLayer(weights=int(self.graph.wants_gradient[tensor]))
        self._add(Node(name, layer, (INPUT,)), (channels, *size), (0,), made, looks=0)
        self.made[tensor] = _Present(name, made, channels, size)

    def step(self, k: int, row: DimStep, col: DimStep) -> None:
        """Run node `k`, after the steps that bring its inputs."""
        graph, width, node, sources = self.graph, self.value_bytes, self.graph.nodes[k], self.graph.sources[k]
        first, self._fresh, self._received, layer = len(self.nodes), 0, 0, node.layer
        inputs, before, names, crops = list[Tensor](), list[int](), list[str](), False
        for index, (of_row, of_col) in enumerate(zip(row.inputs, col.inputs, strict=True)):
            present = self._bring(k, index, of_row, of_col)
            inputs.append(present.tensor)
            before.append(present.bytes)
            names.append(present.name)
            crops = crops or of_row.source < of_row.held or of_col.source < of_col.held
        shape = self.channels[k + 1], row.computed, col.computed
        weights, each = layer.counts(self.channels[sources[0]])
        differentiated, over_ranks = graph.wants_gradient[k + 1], layer.statistics is not None and self.ranks > 1
        if over_ranks and isinstance(layer, ImageAttention):
            layer = replace(layer, passing=self.ranks)
        each += sum(tensor.values for tensor in inputs[1:]) * self.ranks if layer.sees_all else 0
        each *= self.ranks if isinstance(layer, WholeLeaf) else 1
        work = each * row.computed * col.computed
        self.work += work
        memory = layer.memory(before, shape, width, work)
        kept, copies, besides = list[tuple[Tensor, int]](), 0, 0
        shares = layer.hands_on or (differentiated and graph.overwrites[k])  # the output has the input's memory
        if differentiated and shares and not layer.hands_on:
            kept.append((inputs[0], sources[0]))
        elif differentiated and not shares:
            for index in layer.kept_inputs:
                at_hand = inputs[index].value_bytes
                needed = at_hand if over_ranks else self._precisions.get(layer.computes_in, at_hand)
                if needed == at_hand:
                    kept.append((inputs[index], sources[index]))
                else:
                    copies += inputs[index].values * needed  # a cast copy
            besides = memory.kept
        made = inputs[0]
        if not shares:
            value_bytes = self._precisions.get(layer.gives_in, made.value_bytes)
            stored = shape[0] if layer.is_flat and not over_ranks else math.prod(shape)
            made = Tensor(math.prod(shape), value_bytes, stored * value_bytes)
            kept += [(made, k + 1)] * (differentiated and layer.keeps_output)
        kept_bytes = copies + besides
        for tensor, _ in kept:
            kept_bytes += 0 if tensor.counted else tensor.memory
            tensor.counted = True
        passes = int(differentiated)  # the network's input counts as if a gradient were made of it
        if differentiated and work:
            passes = any(not source or graph.wants_gradient[source] for source in sources) + (not node.frozen)
        reread = sum([before[index] for index in layer.kept_inputs]) + made.bytes * layer.keeps_output
        looks = 0 if layer.hands_on or not math.prod(shape) else 1 + over_ranks  # a norm over ranks reads twice
        if over_ranks and not isinstance(layer, ImageAttention):
            # Of narrow values the gradient and a factor are made in float32, before the gradient is cast.
            narrow = copy_bytes(inputs[0].value_bytes) > 0
            size = 2 * SINGLE_BYTES * inputs[0].values if narrow else inputs[0].bytes
            memory = LayerMemory(gradient=layer.memory([size], shape, width, work).gradient or size)
            layer = MovedLayer(weights=layer.counts(shape[0]).weights, arity=layer.arity)
        if crops and isinstance(layer, Join):
            layer = replace(layer, crops=(0,) * layer.arity)
        walked = node
        if self.ranks > 1 or len(self.nodes) > k:
            walked = Node(node.name, layer, tuple(names), None, node.frozen)
        figures = {"parameters": weights, "multiply_adds": work, "kept_bytes": kept_bytes, "passes": passes}
        self._add(walked, shape, before, made, reread=reread, looks=looks, memory=memory, **figures)
        if made.home is None:
            made.home = self._homes[k + 1]
        windows = sum([tensor.memory for tensor, _ in kept if tensor.home is None])
        is_large = besides >= INDEX_BYTES * min(math.prod(shape), max([tensor.values for tensor in inputs]))
        large, small = copies + windows + besides * is_large, besides * (not is_large)
        stays = tuple([pair for pair in kept if pair[0].home is not None])
        fresh = self._fresh + memory.unfolded
        moment = len(self.nodes) - 1
        self.ran[k] = NodeRun(first, moment, made, shape, fresh, self._received, stays, large, small, large > windows)
        present, name = _Present(node.name, made, shape[0], shape[1:]), f"{node.name}: given"
        self.made[k + 1] = self._move(name, present, (row.given, col.given), view=True)

    def _bring(self, k: int, index: int, row: InputStep, col: InputStep) -> _Present:
        """Cut, exchange and pad a tensor that the rank has to the window that node `k` reads."""
        name, layer = f"{self.graph.nodes[k].name}.{index}", self.graph.layers[k]
        source = self.graph.sources[k][index]
        made, passes = self.made[source], int(self.graph.wants_gradient[source])
        made = self._move(f"{name}: cut", made, (row.source, col.source), view=True)
        whole = (row.read, col.read) == (row.window, col.window)
        if row.moves or col.moves:
            kept = row.swap.kept, col.swap.kept
            out = pieces((kept[0], *row.swap.sent), (kept[1], *col.swap.sent))
            back = pieces((kept[0], *row.swap.received), (kept[1], *col.swap.received))
            # The network's input, which has no gradient, is not cast before.
            pixel = made.channels * (made.tensor.value_bytes if source else wide_bytes(self.value_bytes))
            self.sent += [pixels * pixel for pixels in out]
            self.returned += [pixels * pixel for pixels in back if passes]
            self.besides += (sum(out) + sum(back)) * (1 + passes) * pixel
            self._received += made.channels * made.tensor.value_bytes * sum(back)
            # The gradient of the block may be a part of the window's.
            in_place = layer.owns_gradient and whole and kept == (row.source, col.source)
            window = MovedLayer(gradient="parts" if in_place else "new")
            made = self._move(f"{name}: exchange", made, (row.window, col.window), window, passes=passes)
        return made if whole else self._move(f"{name}: padding", made, (row.read, col.read), passes=passes)

    def _move(
        self,
        name: str,
        made: _Present,
        size: tuple[int, int],
        layer: Layer = MOVED,
        view: bool = False,
        passes: int = 0,
    ) -> _Present:
        """Add a step that makes a tensor of another size, or a view of it: the tensor then stays whole in memory."""
        if view and made.size == size:
            return made
        tensor, shape = made.tensor, (made.channels, *size)
        if not view:
            tensor = Tensor(math.prod(shape), tensor.value_bytes, math.prod(shape) * tensor.value_bytes)
            self._fresh += tensor.bytes
        node = Node(name, layer, (made.name,))
        self._add(node, shape, (made.bytes,), tensor, passes=passes, looks=int(not view))
        return _Present(name, tensor, made.channels, size)

    def _add(self, node: Node, shape: Shape, before: Sequence[int], made: Tensor, **figures: Any) -> None:
        kind, after = type(node.layer).__name__, math.prod(shape) * made.value_bytes
        self.nodes.append(node)
        self.costs.append(LayerCost(node.name, kind, shape, tuple(before), after, frozen=node.frozen, **figures))


@lru_cache(maxsize=256)
def rank_walk(graph: Graph, bands: int, row: RankSteps, col: RankSteps, ranks: int, value_bytes: int) -> ForwardWalk:
    """Walk the block of a rank with these steps, one of `ranks` that share the image. `besides` also counts the block
    of the input, where the first layer keeps another tensor."""
    walk, first = ForwardWalk(graph, bands, ranks, value_bytes), (row[0].inputs[0], col[0].inputs[0])
    held = first[0].held, first[1].held
    values = bands * held[0] * held[1]
    walk.made[0] = _Present(INPUT, Tensor(values, value_bytes, values * value_bytes, home=0), bands, held)
    for k, (r, c) in enumerate(zip(row, col, strict=True)):
        walk.step(k, r, c)
    if first[0].moves or first[1].moves or held != (first[0].read, first[1].read):  # the first layer keeps another
        walk.besides += held[0] * held[1] * bands * wide_bytes(value_bytes)
    return walk


@lru_cache(maxsize=256)
def tile_walk(graph: Graph, bands: int, context: tuple[int, int], value_bytes: int = 4) -> ForwardWalk:
    """Walk a tile with a context of (height, width). Raises GeometryError where that is no legal size."""
    rows, cols = whole_steps(graph, context[0]), whole_steps(graph.along_columns, context[1])
    return rank_walk(graph, bands, rows, cols, 1, value_bytes)
