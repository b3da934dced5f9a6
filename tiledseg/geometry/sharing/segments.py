"""Segments of a graph: the tensors that are stored, and the nodes that compute each from those stored before.

A block of a stored tensor is computed from windows of earlier ones. Tensors in between are not kept; the backward pass
recomputes them. So few tensors are stored, and segments may repeat cheap nodes: a norm and an activation after a
convolution are computed in the encoder and again in the decoder, and the skip is not stored.

Stored tensors are: those with statistics of the image, which need all blocks; the output of each convolution with a
halo, after the pixelwise layers that follow it, since halos of several would add up; tensors that several nodes read,
unless pixelwise layers alone compute them; integers, since they are small.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from tiledseg.geometry.box import Interval
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.layers.layer import Layer

MOST_WEIGHTED = 3  # most layers with weights in a segment: a block keeps the tensors of all of them at once


@dataclass(frozen=True)
class Segment:
    """The `nodes`, in order, that compute the tensors `leaving` from `entering`: stored tensors, or the input."""

    nodes: tuple[int, ...]
    entering: tuple[int, ...]
    leaving: tuple[int, ...]


@lru_cache(maxsize=16)
def segments(graph: Graph, once: bool = False) -> tuple[Segment, ...]:
    """Return a segment for each stored tensor, in order, and a last one for the outputs.

    `once`: no node is in two segments (every tensor that several nodes read is stored), for an image of one block.
    Gradients are then summed as those of the whole image, to the last bit.
    """
    measured = {graph.sources[k][0] for k, layer in enumerate(graph.layers) if layer.statistics}
    stored: list[int] = []  # in order, without the input

    def step(k: int, inputs: list[_SegmentWay]) -> _SegmentWay:
        way = _SegmentWay.through(graph.layers[k], inputs)
        if k + 1 in measured or _ends(graph, k + 1, way) or (once and len(graph.readers[k + 1]) > 1):
            stored.append(k + 1)
            return _SegmentWay()
        return way

    graph.fold(_SegmentWay(), step)
    every = {0, *stored}
    return (*(_segment(graph, (tensor,), every - {tensor}) for tensor in stored), _segment(graph, graph.results, every))


class _SegmentWay(NamedTuple):
    """The path from stored tensors to a later one. `weighted`: its number of layers with weights; `wide`: one of them
    has a halo; `branched`: it is more than a chain of pixelwise layers."""

    weighted: int = 0
    wide: bool = False
    branched: bool = False

    @staticmethod
    def through(layer: Layer, inputs: list[_SegmentWay]) -> _SegmentWay:
        weighted, wide = _is_weighted(layer), layer.required_input(_PIXEL).size > 1
        own = _SegmentWay(weighted, weighted and wide, not _is_cheap(layer))
        counts, wides, branched = zip(own, *inputs, strict=True)
        return _SegmentWay(sum(counts), any(wides), any(branched))


def _ends(graph: Graph, tensor: int, way: _SegmentWay) -> bool:
    """Return True if a tensor without statistics is stored."""
    readers = [k for k in graph.readers[tensor] if k < len(graph)]
    if not readers:
        return False
    if graph.layers[tensor - 1].gradient == "none" or (len(graph.readers[tensor]) > 1 and way.branched):
        return True
    layer = graph.layers[readers[0]]
    fewer = layer.arity == 1 and not _is_weighted(layer) and layer.output_size(_SIDE) < _SIDE
    if len(readers) == 1 and layer.statistics is None and (_is_cheap(layer) or fewer):
        return False  # the next node's output, which is no larger, may be stored instead
    return way.wide or way.weighted >= MOST_WEIGHTED


def _segment(graph: Graph, leaving: tuple[int, ...], stored: set[int]) -> Segment:
    nodes, entering, ahead = set[int](), set[int](), list(leaving)
    while ahead:
        tensor = ahead.pop()
        if tensor in stored:
            entering.add(tensor)
        elif tensor - 1 not in nodes:
            nodes.add(tensor - 1)
            ahead.extend(graph.sources[tensor - 1])
    return Segment(tuple(sorted(nodes)), tuple(sorted(entering)), leaving)


def _is_weighted(layer: Layer) -> bool:
    return layer.counts(1).work > 0


def _is_cheap(layer: Layer) -> bool:
    """Return True for a pixelwise layer of one input without weights other than a norm's."""
    return layer.arity == 1 and not _is_weighted(layer) and layer.required_input(_PIXEL) == _PIXEL


_SIDE = 64
_PIXEL = Interval(_SIDE, _SIDE + 1)
