"""What a node of a network does on so many pixels: its class, channels, multiply-adds, and bytes that it moves.

Counted from what layers say of themselves. How fast a machine does it is another matter (`rates`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from tiledseg.geometry.graph import Graph
from tiledseg.geometry.shapes import tensor_channels, tensor_shapes
from tiledseg.planning.step.cost import backward_passes
from tiledseg.planning.step.halo_traffic import TensorAt, tensors_of

CONVOLUTIONS = ("convolution", "wide convolution", "pointwise", "transposed")  # their rates are operations a second
MEMORY_BOUND = (  # theirs are bytes a second
    "activation", "batch norm", "image norm", "pixel norm", "concatenate", "pool", "nearest", "bilinear", "elementwise",
    "loss", "copy", "entering",
)  # fmt: skip
CLASSES = (*CONVOLUTIONS, *MEMORY_BOUND)


class LayerWork(NamedTuple):
    """One node on one rank: its class, the output's `channels`, channels of its first input / of the output, `pixels`
    of the output; `multiply_adds` of a forward pass, and how often the backward pass makes them (`passes`, 0 where
    nobody wants a gradient); bytes read and written, forward and backward; bytes of a value."""

    kind: str
    channels: int
    ratio: float
    pixels: int
    multiply_adds: int
    passes: int
    forward_bytes: int
    backward_bytes: int
    width: int


NOTHING = LayerWork("elementwise", 1, 1.0, 0, 0, 0, 0, 0, 4)  # of a node that hands its input on


def graph_work(graph: Graph, bands: int, context: tuple[int, int], value_bytes: int) -> list[LayerWork]:
    """Of each node on a context of shape (height, width)."""
    pixels = [height * width for _, height, width in tensor_shapes(graph, bands, *context)]
    given = [[pixels[source] for source in sources] for sources in graph.sources]
    return nodes_work(graph, bands, pixels[1:], given, value_bytes)


def nodes_work(
    graph: Graph, bands: int, computed: Sequence[int], given: Sequence[Sequence[int]], value_bytes: int
) -> list[LayerWork]:
    """The same of nodes that compute so many pixels each, of inputs of so many."""
    channels, tensors = tensor_channels(graph, bands), tensors_of(graph, bands, value_bytes)
    return [
        _node_work(graph, k, channels, tensors, computed[k], given[k], value_bytes) for k in range(len(graph.layers))
    ]


def _node_work(
    graph: Graph,
    k: int,
    channels: Sequence[int],
    tensors: Sequence[TensorAt],
    computed: int,
    given: Sequence[int],
    value_bytes: int,
) -> LayerWork:
    layer, sources, wants = graph.layers[k], graph.sources[k], graph.wants_gradient[k + 1]
    if layer.hands_on:
        return NOTHING
    out = computed * tensors[k + 1].pixel_bytes
    taken = [pixels * tensors[source].pixel_bytes for source, pixels in zip(sources, given, strict=True)]
    kept = out * layer.keeps_output + sum(taken[index] for index in layer.kept_inputs)
    weighs = layer.multiply_adds(channels[sources[0]])
    return LayerWork(
        kind=layer.speed,
        channels=channels[k + 1],
        ratio=channels[sources[0]] / channels[k + 1],
        pixels=computed,
        multiply_adds=weighs * computed,
        passes=backward_passes(graph, k) if weighs else int(wants),
        forward_bytes=out + sum(taken),
        backward_bytes=(out + sum(taken) + kept) * wants,
        width=value_bytes,
    )


def values_work(kind: str, channels: int, pixels: int, width: int, forward: float, backward: float = 0.0) -> LayerWork:
    """Of something that is no node: bytes a value that it moves, forward and backward; `width`: of a value."""
    moved = [math.ceil(each * channels * pixels) for each in (forward, backward)]
    return LayerWork(kind, channels, 1.0, pixels, 0, int(backward > 0), moved[0], moved[1], width)
