"""The mean of a network's probabilities over reflections, and quarter turns, of a raster.

Each is that of the whole changed raster: a tile's pixels are mapped in a context that is cut of the changed raster by
its own alignment, and brought back. So the mean depends on no grid and no number of ranks, to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from tiledseg.execution.halos.part import Part, Piece
from tiledseg.geometry.box import Box
from tiledseg.geometry.halo import Footprint
from tiledseg.geometry.interval import Interval
from tiledseg.geometry.tiling import Tiling, make_tiling, tile_around
from tiledseg.raster.samples.dataset import Sample
from tiledseg.raster.samples.views import Line, View

CHOICES = NONE, REFLECTIONS, TURNS = ("none", "reflections", "turns")
"""The raster alone; it and its three reflections; these and their transposes, which are all quarter turns too."""


class Mean(NamedTuple):
    """On the pixels of `core`: each class's mean probability, and the sample of the unchanged raster."""

    core: Box
    shares_KHW: torch.Tensor
    sample: Sample


def views_of(kind: str, shape: tuple[int, int]) -> tuple[View, ...]:
    """The ways to look at a raster of `shape` (height, width), the unchanged one first."""
    lines = [[Line(0, 1), Line(size - 1, -1)] for size in shape]
    found = [View(shape, row, col) for row in lines[0] for col in lines[1]]
    if kind == TURNS:
        found += [View((shape[1], shape[0]), view.row, view.col, transposed=True) for view in found]
    return tuple(found) if kind != NONE else (found[0],)


def tilings_of(views: Sequence[View], tiling: Tiling, cut: bool) -> tuple[Tiling, ...]:
    """Of each view, of which the first is the raster that is cut by `tiling`: the same tiles, or theirs with rows for
    columns, where they are to be `cut` too; else one tile."""
    if not cut:
        return tiling, *(make_tiling(view.shape, (1, 1), tiling.footprint) for view in views[1:])
    turned = make_tiling(tiling.raster[::-1], tiling.grid[::-1], tiling.footprint)
    same = turned if tiling.raster != tiling.raster[::-1] else tiling
    return tuple(same if view.transposed else tiling for view in views)


def parts_of_views(parts: Sequence[Part], views: Sequence[View], footprint: Footprint) -> tuple[Part, ...]:
    """For each part of the raster, image 0, the same pixels of each view, which is the image of its number."""
    return tuple(
        Part(number, tile_around(core_in(view, part.tile.core), view.shape, footprint))
        for part in parts
        for number, view in enumerate(views)
    )


def core_in(view: View, core: Box) -> Box:
    """Where a box of the raster lies in a view that shows each pixel once."""
    rows, cols = _positions(view.row, core.row), _positions(view.col, core.col)
    return Box(cols, rows) if view.transposed else Box(rows, cols)


def core_of(view: View, core: Box) -> Box:
    """Where a box of a view that shows each pixel once lies in the raster."""
    rows, cols = (core.col, core.row) if view.transposed else (core.row, core.col)
    return Box(view.row.source(rows), view.col.source(cols))


def back(view: View, values_KHW: torch.Tensor) -> torch.Tensor:
    """Values of a box of a view, as the raster has its pixels."""
    if view.transposed:
        values_KHW = values_KHW.transpose(1, 2)
    dims = [dim for dim, line in ((1, view.row), (2, view.col)) if line.step < 0]
    return values_KHW.flip(dims) if dims else values_KHW


def means(outputs: Iterator[tuple[Sample, Piece]], views: Sequence[View]) -> Iterator[Mean]:
    """Of outputs on `parts_of_views`, in their order; float64."""
    for sample, piece in outputs:
        total_KHW = shares_of(piece.logits_BKHW[0]).double()
        for view in views[1:]:
            _, other = next(outputs)
            total_KHW += back(view, shares_of(other.logits_BKHW[0]))
        yield Mean(piece.core, total_KHW / len(views), sample)


def shares_of(scores_KHW: torch.Tensor) -> torch.Tensor:
    """Each class's probability, in the dtype of the scores."""
    # Over the last dim: over another one, a pixel's last bit depends on where its tile ends (vectors, then remainders).
    return scores_KHW.permute(1, 2, 0).contiguous().softmax(-1).permute(2, 0, 1)


def _positions(line: Line, pixels: Interval) -> Interval:
    """Where pixels are shown: the inverse of a line on pixels."""
    ends = [int((pixel - line.start) / line.step) for pixel in (pixels.start, pixels.stop - 1)]
    return Interval(min(ends), max(ends) + 1)
