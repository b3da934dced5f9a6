"""Halo widths: the paper's formula, the exact minimum, and the halo of tiles.

Symbols as in the paper (doi 10.1145/3404397.3404468): L levels, n_c convolutions a level, K kernel, S stride,
P padding, N image side, d what one convolution takes off, epsilon the halo.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from tiledseg.errors import GeometryError
from tiledseg.geometry.box import Interval
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.shapes import is_legal_size, output_size, required_input, scales, tensor_sizes, total_stride


def paper_shrink(kernel: int, stride: int = 1, padding: int = 0, size: int = 0) -> float:
    """Return the paper's d = (N(S-1) + K - 2P)/S - 1: the pixels by which a convolution shrinks a side of N pixels."""
    return (size * (stride - 1) + kernel - 2 * padding) / stride - 1


def paper_halo(levels: int, convs_per_level: int, shrink: float) -> float:
    """Return the paper's epsilon = (3 * 2^(L-2) - 1) * d * n_c, 0 to 2 pixels short of `minimum_halo`."""
    return (3 * 2.0 ** (levels - 2) - 1) * shrink * convs_per_level


def paper_efficiency(size: tuple[int, int], grid: tuple[int, int], halo: float) -> float:
    """Return the paper's efficiency E = T^2 / T'^2 with T = T' + 2 epsilon, for sides that may differ."""
    tiles = [side / q for side, q in zip(size, grid, strict=True)]
    return math.prod((tile + 2 * halo) / tile for tile in tiles)


def paper_efficiency_linear(size: tuple[int, int], grid: tuple[int, int], halo: float) -> float:
    """Return the linear form of the paper's efficiency, E ~ 1 + q * 4 epsilon / N."""
    return 1 + 2 * halo * sum(q / side for side, q in zip(size, grid, strict=True))


@dataclass(frozen=True)
class Footprint:
    """The pixels around a tile that a network needs, along either dim.

    Core edges lie on multiples of `alignment`; the context begins `before` pixels before the aligned core and ends
    `after` pixels after it. `offset`: the first output's position, counted from the context's first pixel (0 for a
    padded network). `mirror`: the context is mirrored at the raster's border (unpadded networks) instead of clipped
    there, where the network's own padding applies as on the whole raster. `unit`: in a coarse enough grid, edges lie on
    its multiples, so that crops of tiles fill batches.
    """

    alignment: int
    before: int
    after: int
    offset: int = 0
    mirror: bool = False
    unit: int = 1


def is_padded(graph: Graph) -> bool:
    """Return True if the output has the input's size, for sizes that are multiples of the alignment."""
    size = total_stride(graph) * 64
    return is_legal_size(graph, size) and all(output_size(each, size) == size for each in _dims(graph))


@lru_cache(maxsize=64)
def minimum_halo(graph: Graph) -> tuple[int, int]:
    """Return the exact halo (before, after) of any core whose edges are multiples of the alignment.

    The law: with one pixel less, an output of some core depends on a pixel outside its context.
    """
    alignment, offset = total_stride(graph), 0 if is_padded(graph) else _lost(graph) // 2
    core = Interval(64 * alignment, 128 * alignment)
    needs = [(core, required_input(each, core).shift(-offset)) for each in _dims(graph)]
    if any(layer.padding_after and layer.clamps for each in _dims(graph) for layer in each.layers):
        first = 128 * alignment  # also test the ends of an image, where pixels are mirrored
        for each in _dims(graph):
            sizes = tensor_sizes(each, next(n for n in range(first, first + 4 * alignment) if is_legal_size(each, n)))
            size = sizes[graph.results[0]]
            for least in (Interval(0, alignment), Interval(size - alignment, size)):
                needs.append((least, required_input(each, least, sizes).shift(-offset)))
    return max(core.start - need.start for core, need in needs), max(need.stop - core.stop for core, need in needs)


@lru_cache(maxsize=64)
def network_footprint(graph: Graph, halo: int | None = None, exact: bool = True) -> Footprint:
    """Return the footprint of a network, with its smallest legal halo or at least `halo` pixels a side.

    Raises GeometryError if `halo` is less than the exact minimum (unless `exact` is False), or if the output's
    resolution differs from the input's: the same edges cut both into tiles.
    """
    for each in _dims(graph):
        scale = scales(each)[each.results[0]]
        if scale != 1:
            raise GeometryError(
                f"the network turns {scale.numerator} pixels of input into {scale.denominator}; resize its output to "
                "the size of the input"
            )
    sides = minimum_halo(graph)
    minimum = max(sides)
    if halo is not None and halo < 0:
        raise GeometryError(f"halo {halo} is negative; give 0 or more pixels, or auto")
    if halo is not None and exact and halo < minimum:
        raise GeometryError(
            f"halo {halo} is less than the {minimum} pixels that this network needs; set tiling.halo to auto, "
            f"or to {minimum} or more"
        )
    alignment = total_stride(graph)
    before, after = sides if halo is None else (halo, halo)
    if is_padded(graph):
        width = round_up(max(before, after), alignment)
        return Footprint(alignment, width, width, unit=max(layer.usual_grid for layer in graph.layers))
    lost = _lost(graph)
    offset = lost // 2
    before = offset + round_up(max(0, before - offset), alignment)
    after = max(after, lost - offset)
    while not is_legal_size(graph, before + 64 * alignment + after):
        after += 1
    return Footprint(alignment, before, after, offset, mirror=True)


def _lost(graph: Graph) -> int:
    """Return the pixels by which the network shrinks a side. Raises GeometryError if rows and columns differ."""
    lost = set()
    for each in _dims(graph):
        stride = total_stride(each)
        # The first output needs this many inputs, less a coarse pixel for each level whose bilinear upsampling clamps.
        first = max(1, required_input(each, Interval(0, 1)).stop - 2 * stride)
        size = next((n for n in range(first, first + 4 * stride) if is_legal_size(each, n)), None)
        if size is None:
            raise GeometryError(
                f"no input of {first} to {first + 4 * stride} pixels is legal for this network; change it"
            )
        lost.add(size - output_size(each, size))
    if len(lost) > 1:
        raise GeometryError(
            f"the network takes off {min(lost)} pixels along one dim and {max(lost)} along the other; pad its kernels"
        )
    return lost.pop()


def _dims(graph: Graph) -> tuple[Graph, ...]:
    """Return the network along rows, and along columns if it differs."""
    return (graph,) if graph.along_columns is graph else (graph, graph.along_columns)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple
