"""A graph cut into segments: the tensors that are stored whole, and the nodes that make each from those stored before.

A block of a stored tensor is computed from windows of others, and nothing that lies between them is kept; the backward
pass computes it once more. So few tensors are stored, and each segment computes the cheap ones that it takes. A norm
and an activation after a convolution are computed in the encoder and again in the decoder: the skip needs no room.

A tensor is stored if statistics are taken of it, since these want the whole of it. So is the output of each convolution
that sees neighbours, after the pixelwise layers that follow it, since halos would add up over several. So is a tensor
that several nodes take, since each would compute it again, unless pixelwise layers alone make it. Integers are stored,
since they are small.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from tiledseg.geometry.box import Interval
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.layers.layer import Layer

MOST_WEIGHTED = 3  # layers with weights in a segment: what a block keeps of them is live at once


@dataclass(frozen=True)
class Segment:
    """`nodes` in order, which make the tensors `leaving` of the tensors `entering`: those are stored, or the input."""

    nodes: tuple[int, ...]
    entering: tuple[int, ...]
    leaving: tuple[int, ...]


@lru_cache(maxsize=16)
def segments(graph: Graph, once: bool = False) -> tuple[Segment, ...]:
    """Return a segment for each stored tensor, in their order, and a last one for the outputs.

    `once`: no node is in two, as where an image is one block: all that several nodes take is stored. Gradients are then
    added up as those of the whole image are, to the last bit.
    """
    measured = {graph.sources[k][0] for k, layer in enumerate(graph.layers) if layer.statistics}
    stored: list[int] = []  # besides the input, in their order

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
    """The way from stored tensors to a later one: its layers with weights; `wide`: one of them sees neighbours;
    `branched`: there is more than pixelwise layers, one after the other."""

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
    """Return True if a tensor is stored, of which no statistics are taken."""
    readers = [k for k in graph.readers[tensor] if k < len(graph)]
    if not readers:
        return False
    if graph.layers[tensor - 1].gradient == "none" or (len(graph.readers[tensor]) > 1 and way.branched):
        return True
    layer = graph.layers[readers[0]]
    fewer = layer.arity == 1 and not _is_weighted(layer) and layer.output_size(_SIDE) < _SIDE
    if len(readers) == 1 and layer.statistics is None and (_is_cheap(layer) or fewer):
        return False  # after that node, where it is no larger
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
    return layer.multiply_adds(1) > 0


def _is_cheap(layer: Layer) -> bool:
    """Return True if it takes one tensor, pixel by pixel, without weights but a norm's."""
    return layer.arity == 1 and not _is_weighted(layer) and layer.required_input(_PIXEL) == _PIXEL


_SIDE = 64
_PIXEL = Interval(_SIDE, _SIDE + 1)
