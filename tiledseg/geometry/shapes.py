"""The shapes of a network's tensors, from its layers alone; and `PooledBranch`, a layer that contains a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import lcm
from typing import NamedTuple

from tiledseg.errors import ConfigError, GeometryError
from tiledseg.geometry.box import Interval
from tiledseg.geometry.graph import Graph, Node
from tiledseg.geometry.layers.joins import ImageLayer
from tiledseg.geometry.layers.layer import Layer, LayerCounts, LayerWindow, Shape
from tiledseg.geometry.layers.pixelwise import Mark
from tiledseg.geometry.layers.resampling import Border, Enlarging, Upsample


@lru_cache(maxsize=64)
def tensor_channels(graph: Graph, bands: int) -> tuple[int, ...]:
    """Return the channels of each tensor, the input first. Raises GeometryError, with the node, if they do not fit."""
    channels = [bands]
    for node, sources in zip(graph.nodes, graph.sources, strict=True):
        try:
            channels.append(node.layer.output_channels(*[channels[source] for source in sources]))
        except GeometryError as error:
            raise GeometryError(f"layer '{node.name}': {error}") from None
    return tuple(channels)


def tensor_shapes(graph: Graph, bands: int, height: int, width: int) -> tuple[Shape, ...]:
    """Return (channels, height, width) of each tensor, the input (`bands` x `height` x `width`) first."""
    channels = tensor_channels(graph, bands)
    rows, cols = _sizes(graph, height), _sizes(graph.along_columns, width)
    return tuple(zip(channels, rows, cols, strict=True))


@lru_cache(maxsize=1024)
def _sizes(graph: Graph, size: int) -> tuple[int, ...]:
    return tuple(graph.fold(size, lambda k, sizes: graph.layers[k].output_size(*sizes)))


@lru_cache(maxsize=64)
def count_parameters(graph: Graph, bands: int, trained: bool = False) -> int:
    """Count the weights of all layers, or (`trained`) of those that are not frozen."""
    channels = tensor_channels(graph, bands)
    nodes = ((node, channels[sources[0]]) for node, sources in zip(graph.nodes, graph.sources, strict=True))
    return sum(node.layer.counts(count).weights for node, count in nodes if not (trained and node.frozen))


def required_input(graph: Graph, out: Interval, sizes: Sequence[int] | None = None) -> Interval:
    """Return the input positions on which the positions `out` of the outputs depend. `sizes`: of all tensors, to which
    positions are clipped or mirrored; None: of unlimited tensors."""
    need: dict[int, Interval] = dict.fromkeys(graph.results, out)
    for k in reversed(range(len(graph))):
        for index, source in enumerate(graph.sources[k]):
            read = graph.layers[k].required_input(need[k + 1], index)
            read = read if sizes is None else graph.layers[k].within(read, sizes[source])
            need[source] = read.hull(need.get(source, read))
    return need[0]


@lru_cache(maxsize=1024)
def tensor_sizes(graph: Graph, size: int) -> tuple[int, ...]:
    """Return the size of each tensor along one dim for `size` input positions.

    Raises GeometryError if a pooling drops a remainder, a size falls to 0, or joined tensors differ: at such sizes the
    network is not the same function everywhere on the raster.
    """
    made = [size]
    for node, sources in zip(graph.nodes, graph.sources, strict=True):
        layer, sizes, source = node.layer, [made[source] for source in sources], sources[0]
        spare = graph.layers[source - 1].padding_after if source else 0  # padding at the end, which may be dropped
        try:
            following = layer.output_size(*sizes)
            shrunk = layer.required_input(Interval(0, max(following, 1))).size
            # Strided windows of kernel 1 skip pixels everywhere, so pixels skipped at the end are no remainder.
            # Positions that a layer loses which pads, or crops itself, are no remainder either.
            fits = layer.window.padding > 0 or layer.arity > 1 or isinstance(layer, Border)
            fits = fits or sizes[0] == following * _step(layer)
            if following < 1 or (following < sizes[0] and not (fits or shrunk <= sizes[0] <= shrunk + spare)):
                words = f"it would turn {sizes[0]} pixels into {following} with a remainder; choose another size"
                raise GeometryError(words)
        except GeometryError as error:
            raise GeometryError(f"input size {size} is not legal: layer '{node.name}': {error}") from None
        made.append(following)
    return tuple(made)


def output_size(graph: Graph, size: int) -> int:
    """Return the size of the first output. Raises GeometryError as `tensor_sizes`."""
    return tensor_sizes(graph, size)[graph.results[0]]


def is_legal_size(graph: Graph, size: int) -> bool:
    """Return True if the network takes `size` pixels along rows and columns without dropping a remainder."""
    try:
        output_size(graph, size)
        output_size(graph.along_columns, size)
    except GeometryError:
        return False
    return True


@lru_cache(maxsize=64)
def total_stride(graph: Graph) -> int:
    """Return the coarsest grid of the network, in input pixels: tiles that start on it have the image's windows."""
    found = list[int]()
    for each in dict.fromkeys((graph, graph.along_columns)):
        steps = scales(each)
        found.append(max(1, *map(int, steps)))
        pairs = zip(each.layers, each.sources, strict=True)
        found += [(layer.window_grid * steps[s[0]]).numerator for layer, s in pairs if layer.window_grid > 1]
    return lcm(*found)


def scales(graph: Graph) -> list[Fraction]:
    """Return the input pixels per pixel of each tensor."""
    return graph.fold(Fraction(1), lambda k, inputs: graph.layers[k].scale(*inputs) * _step(graph.layers[k]))


def _step(layer: Layer) -> Fraction:
    """Return the input positions per output position of a layer; 1 of one that gives 2 n - 1 outputs of n, say."""
    at: LayerWindow = layer.window
    if not at.transposed:
        return Fraction(at.stride)
    return Fraction(1, at.stride if layer.output_size(*(64,) * layer.arity) == 64 * at.stride else 1)


def resized(nodes: Sequence[Node], name: str, source: str, like: str, mode: str = "bilinear") -> Node:
    """Return a node, after `nodes`, that upsamples the tensor `source` to the size of the tensor `like`.

    Raises ConfigError unless that is a whole number of times as large for any input.
    """
    graph = Graph(tuple(nodes), tuple(node.name for node in nodes))
    steps = dict(zip(graph.names, scales(graph), strict=True))
    factor = steps[source] / steps[like]
    if factor.denominator > 1:
        raise ConfigError(
            f"node '{name}' would resize '{source}' by {factor} to the size of '{like}'; only whole factors fall on "
            "the ranks' edges"
        )
    return Node(name, Upsample(mode, int(factor)) if factor > 1 else Mark(), (source,))


class ContextPart(NamedTuple):
    """The positions `at` of a tile's tensor along one dim, and the tensor's `size` for the whole image."""

    at: Interval
    size: int


@lru_cache(maxsize=256)
def parts(graph: Graph, whole: Interval, context: Interval) -> tuple[ContextPart, ...]:
    """Return the part of each tensor that a network computes from `context` along rows, in the image `whole`. For
    columns pass `graph.along_columns`.

    Raises GeometryError unless the context begins a whole number of coarse pixels after the image.
    """
    ahead = context.start - whole.start
    sizes, own = _sizes(graph, whole.size), _sizes(graph, context.size)
    parts = []
    for name, step, size, count in zip(graph.names, scales(graph), sizes, own, strict=True):
        start = ahead / step
        if start.denominator > 1:
            raise GeometryError(
                f"a tile begins {ahead} pixels after the image, which is no whole number of pixels of '{name}', each "
                f"{step} wide; begin tiles at multiples of the network's alignment"
            )
        parts.append(ContextPart(Interval(int(start), int(start) + count), size))
    return tuple(parts)


@dataclass(frozen=True)
class PooledBranch(ImageLayer, Enlarging):
    """A branch of a pyramid: means over `bins` parts a dim of the image, `inner` nodes on these, and bilinear resizing,
    with corners `aligned` or not, to `factor` times the size of the input.

    Bin i of a dim of N positions is [floor(i N / bins), ceil((i + 1) N / bins)), as in torch's adaptive pooling.
    `cells`: the number of bins over both dims.
    """

    bins: int
    cells: int
    inner: Graph
    aligned: bool
    factor: int = 1

    takes = "means of parts of an image"

    def output_channels(self, channels: int, *others: int) -> int:
        return tensor_channels(self.inner, channels)[self.inner.results[0]]

    def counts(self, channels: int) -> LayerCounts:
        return LayerCounts(count_parameters(self.inner, channels))

    def shared_values(self, channels: int, ranks: int) -> tuple[int, int]:
        """Count the partial means; backward their gradients."""
        return channels * self.cells, channels * self.cells

    def computed(self, read: int, given: int) -> int:
        return given
