"""The shapes of a network's tensors, from the descriptions of its layers alone."""

from __future__ import annotations

from functools import lru_cache

from tiledseg.errors import GeometryError
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.layers.layer import Shape


@lru_cache(maxsize=64)
def tensor_channels(graph: Graph, bands: int) -> tuple[int, ...]:
    """Return the channels of each tensor, the input first. Raises GeometryError, naming the node, where some do not
    fit."""

    def step(k: int, inputs: list[int]) -> int:
        try:
            return graph.layers[k].output_channels(*inputs)
        except GeometryError as error:
            raise GeometryError(f"layer '{graph.nodes[k].name}': {error}") from None

    return tuple(graph.fold(bands, step))


def tensor_shapes(graph: Graph, bands: int, height: int, width: int) -> tuple[Shape, ...]:
    """Return (channels, height, width) of each tensor, the input (`bands` x `height` x `width`) first."""
    channels = tensor_channels(graph, bands)
    rows, cols = _sizes(graph, height), _sizes(graph.along_columns, width)
    return tuple(zip(channels, rows, cols, strict=True))


@lru_cache(maxsize=1024)
def _sizes(graph: Graph, size: int) -> tuple[int, ...]:
    return tuple(graph.fold(size, lambda k, sizes: graph.layers[k].output_size(*sizes)))


@lru_cache(maxsize=64)
def count_parameters(graph: Graph, bands: int) -> int:
    """Count the weights of all layers."""
    channels = tensor_channels(graph, bands)
    nodes = zip(graph.layers, graph.sources, strict=True)
    return sum(layer.parameters(channels[sources[0]]) for layer, sources in nodes)


@lru_cache(maxsize=64)
def count_trained(graph: Graph, bands: int) -> int:
    """Count the weights of the layers that are not frozen."""
    channels = tensor_channels(graph, bands)
    nodes = zip(graph.nodes, graph.sources, strict=True)
    return sum(node.layer.parameters(channels[sources[0]]) for node, sources in nodes if not node.frozen)
