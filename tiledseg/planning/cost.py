"""What a network costs on one context: parameters, multiply-adds, output shapes, bytes kept.

Counted from the layer descriptions alone. What autograd keeps for the backward pass, a layer (batch of one tile):

- convolution, transposed convolution: its input;
- leaky ReLU: its output, which it writes over its input, so a convolution's output is not kept a second time;
- max pooling: its input, and an 8-byte index for each output;
- norm: its input and a few statistics: pixel norm two a pixel, others some a channel or group;
- dropout: one value a channel; concatenation and upsampling: nothing, their outputs are kept by the layer behind;
- the loss: the log-probabilities (4 bytes or more each) and an 8-byte label for each output pixel.

A tensor that several layers keep counts once. With 2-byte values (bf16 autocast) group and pixel norm compute in
4 bytes, so their 4-byte input and output count, and the 2-byte copy that the next convolution takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tiledseg.geometry.layer import (
    Activation,
    Convolution,
    Dropout,
    Layer,
    MaxPool,
    Norm,
    PopConcatenate,
    TransposedConvolution,
)
from tiledseg.geometry.receptive_field import output_size
from tiledseg.geometry.shapes import layer_shapes
from tiledseg.widths import DOUBLE_BYTES, SINGLE_BYTES, norm_bytes, wide_bytes

INDEX_BYTES = 8  # indices of a max pooling, labels of a loss


@dataclass(frozen=True)
class LayerCost:
    """One layer on one context: output `shape` (channels, height, width), and what it costs."""

    name: str
    kind: str
    shape: tuple[int, int, int]
    parameters: int
    multiply_adds: int
    input_bytes: int
    output_bytes: int
    kept_bytes: int


@dataclass
class Tensor:
    """The tensor between two layers while their costs are walked; `kept`: whether autograd keeps it already."""

    values: int
    kept: bool = False
    value_bytes: int = SINGLE_BYTES

    @property
    def bytes(self) -> int:
        return self.values * self.value_bytes


def layer_costs(
    layers: Sequence[Layer], bands: int, context: tuple[int, int], bytes_per_value: int = 4
) -> tuple[LayerCost, ...]:
    """The cost of each layer for one context of shape (height, width) with `bands` channels.

    Raises GeometryError where the context is no legal size for the network.
    """
    for size in context:
        output_size(layers, size)
    return tuple(_walk(layers, bands, context, bytes_per_value))


def _walk(layers: Sequence[Layer], bands: int, context: tuple[int, int], bytes_per_value: int) -> Iterator[LayerCost]:
    channels = bands
    tensor = Tensor(bands * context[0] * context[1], value_bytes=bytes_per_value)
    for layer, shape in zip(layers, layer_shapes(layers, bands, *context), strict=True):
        parameters, work = layer.parameters(channels), layer.multiply_adds(channels) * shape[1] * shape[2]
        channels = shape[0]
        before = tensor
        kept, tensor = keep_for_backward(layer, tensor, shape, bytes_per_value)
        kind = type(layer).__name__
        yield LayerCost(layer.name, kind, shape, parameters, work, before.bytes, tensor.bytes, kept)


def keep_for_backward(
    layer: Layer, tensor: Tensor, shape: tuple[int, int, int], bytes_per_value: int
) -> tuple[int, Tensor]:
    """Bytes that autograd keeps for this layer and no earlier one, and the tensor of `shape` that it hands on."""
    channels, height, width = shape
    values = channels * height * width
    match layer:
        case Convolution() | TransposedConvolution():
            return keep(tensor, bytes_per_value), Tensor(values, value_bytes=bytes_per_value)
        case MaxPool():
            return keep(tensor) + INDEX_BYTES * values, Tensor(values, value_bytes=tensor.value_bytes)
        case Activation():
            return keep(tensor), tensor
        case Norm(kind=kind) if kind != "none":
            inner = norm_bytes(kind, bytes_per_value)
            return keep(tensor, inner) + statistics_bytes(layer, shape, inner), Tensor(values, value_bytes=inner)
        case Dropout(probability=p) if p > 0:
            return bytes_per_value * channels, Tensor(values, value_bytes=bytes_per_value)
        case PopConcatenate():
            return 0, Tensor(values, value_bytes=bytes_per_value)
    if values != tensor.values:
        return 0, Tensor(values, value_bytes=tensor.value_bytes)
    return 0, tensor


def keep(tensor: Tensor, value_bytes: int | None = None) -> int:
    """Bytes to keep the tensor in `value_bytes`: 0 where it is kept already, a copy's where the widths differ."""
    width = tensor.value_bytes if value_bytes is None else value_bytes
    if width != tensor.value_bytes:
        return tensor.values * width
    if tensor.kept:
        return 0
    tensor.kept = True
    return tensor.values * width


def statistics_bytes(norm: Norm, shape: tuple[int, int, int], value_bytes: int) -> int:
    """Bytes that a norm keeps besides its input: pixel norm a mean and a deviation a pixel; others, in float64, a scale
    a channel, a mean and a deviation a channel or group, and their count."""
    channels, height, width = shape
    if norm.kind == "pixel":
        return 2 * height * width * value_bytes
    return DOUBLE_BYTES * (channels + 2 * (norm.groups if norm.kind == "group" else channels) + 1)


def loss_bytes(costs: Sequence[LayerCost], bytes_per_value: int) -> int:
    """What the cross-entropy of the last layer's logits keeps: log-probabilities, sum of weights, and labels."""
    channels, height, width = costs[-1].shape
    logits = channels * height * width
    return (logits + 1) * wide_bytes(bytes_per_value) + height * width * INDEX_BYTES
