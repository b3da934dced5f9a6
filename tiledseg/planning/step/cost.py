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
from functools import lru_cache

from tiledseg.geometry.graph import Graph
from tiledseg.geometry.layers.layer import Shape
from tiledseg.geometry.memory_words import USUAL_LOSS, LossBytes
from tiledseg.geometry.receptive_field import output_size
from tiledseg.geometry.shapes import tensor_shapes
from tiledseg.records import dataclass
from tiledseg.units.widths import SINGLE_BYTES, wide_bytes

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
    """A tensor while the costs of a network are walked; `kept`: whether autograd keeps it already. `stored`: values in
    memory, where they are fewer than it shows; `view_of`: the tensor whose memory it is."""

    values: int
    kept: bool = False
    value_bytes: int = SINGLE_BYTES
    stored: int | None = None
    view_of: Tensor | None = None

    @property
    def bytes(self) -> int:
        return self.values * self.value_bytes

    @property
    def in_memory(self) -> int:
        """Values in memory."""
        return self.values if self.stored is None else self.stored


@lru_cache(maxsize=256)
def layer_costs(graph: Graph, bands: int, context: tuple[int, int], bytes_per_value: int = 4) -> tuple[LayerCost, ...]:
    """The cost of each layer for one context of shape (height, width) with `bands` channels.

    Raises GeometryError where the context is no legal size for the network.
    """
    for size in context:
        output_size(graph, size)
    shapes = tensor_shapes(graph, bands, *context)
    costs: list[LayerCost] = []

    def step(k: int, given: list[Tensor]) -> Tensor:
        layer, shape = graph.layers[k], shapes[k + 1]
        channels = shapes[graph.sources[k][0]][0]
        work = layer.multiply_adds(channels) * shape[1] * shape[2]
        before = tuple(tensor.bytes for tensor in given)
        kept, made = keep_for_backward(graph, k, given, shape, bytes_per_value)
        kind = type(layer).__name__
        node, parameters = graph.nodes[k], layer.parameters(channels)
        sizes = work, before, made.bytes, kept
        costs.append(LayerCost(node.name, kind, shape, parameters, *sizes, node.frozen, node.loss))
        return made

    graph.fold(Tensor(math.prod(shapes[0]), value_bytes=bytes_per_value), step)
    return tuple(costs)


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
