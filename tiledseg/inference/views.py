"""The mean of a network's probabilities over reflections, and quarter turns, of a raster.

Each view is mapped as the whole changed raster would be, and brought back. One rank maps a tile's pixels in every view,
so the mean depends on no grid and no number of ranks, to the last bit. Sums are float64, in the order of the views.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from affine import Affine
from numpy.typing import NDArray

from tiledseg.execution.halo_modes import Part
from tiledseg.execution.part_passes import Passes
from tiledseg.geometry.box import Box, Interval
from tiledseg.geometry.halo import Footprint
from tiledseg.geometry.tiling import Tiling, make_tiling, tile_around
from tiledseg.raster.places import View
from tiledseg.raster.samples.dataset import Sample

CHOICES = NONE, REFLECTIONS, TURNS = ("none", "reflections", "turns")
"""The raster alone; it and its three reflections; these and their transposes, which are all quarter turns too."""

Window = tuple[Box, torch.Tensor, NDArray]
"""A place of the raster, each class's score or probability there (K, H, W), and which pixels have data."""


def views_of(kind: str, shape: tuple[int, int]) -> tuple[View, ...]:
    """Return the views of a raster of `shape` (height, width), the unchanged one first."""
    lines = [[(1, 0), (-1, size - 1)] if kind != NONE else [(1, 0)] for size in shape]
    pairs = [(row, col) for row in lines[0] for col in lines[1]]
    views = [View(shape, Affine(down, 0, row, 0, right, col)) for (down, row), (right, col) in pairs]
    if kind == TURNS:
        views += [View(shape[::-1], Affine(0, down, row, right, 0, col)) for (down, row), (right, col) in pairs]
    return tuple(views)


def tilings_of(views: Sequence[View], tiling: Tiling) -> tuple[Tiling, ...]:
    """Return the tiling of each view: that of the raster, or the same with rows for columns."""
    turned = make_tiling(tiling.raster[::-1], tiling.grid[::-1], tiling.footprint)
    same = turned if tiling.raster != tiling.raster[::-1] else tiling
    return tuple(same if view.is_transposed else tiling for view in views)


def parts_of_views(parts: Sequence[Part], views: Sequence[View], footprint: Footprint) -> tuple[Part, ...]:
    """Return, for each part of the raster, the same pixels of each view, which is the image of its number."""
    return tuple(
        Part(number, tile_around(_core_in(view, part.tile.core), view.shape, footprint))
        for part in parts
        for number, view in enumerate(views)
    )


def shares_of(scores_KHW: torch.Tensor) -> torch.Tensor:
    """Return each class's probability, in the dtype of the scores."""
    # Over the last dim: over another one, a pixel's last bit depends on where its tile ends (vectors, then remainders).
    return scores_KHW.permute(1, 2, 0).contiguous().softmax(-1).permute(2, 0, 1)


def windows_of(
    passes: Passes, samples: Iterator[Sample], parts: Sequence[Part], views: Sequence[View]
) -> Iterator[Window]:
    """Yield each window's scores, or, of several `views`, the mean of its probabilities (`parts_of_views`)."""
    outputs = passes.outputs(samples, parts)
    for sample, piece in outputs:
        scores_KHW = piece.logits_BKHW[0]
        if len(views) > 1:
            scores_KHW = shares_of(scores_KHW).double()
            for view in views[1:]:
                scores_KHW += _back(view, shares_of(next(outputs)[1].logits_BKHW[0]))
            scores_KHW /= len(views)
        yield piece.core, scores_KHW, sample.valid_HW[piece.in_part.slices]
        del piece, scores_KHW  # the GPU needs the memory for the next window


def _core_in(view: View, core: Box) -> Box:
    """Return the place in a view of a box of the raster."""
    ends = view.find(core.row.start, core.col.start), view.find(core.row.stop - 1, core.col.stop - 1)
    rows, cols = (Interval(int(min(side)), int(max(side)) + 1) for side in zip(*ends, strict=True))
    return Box(rows, cols)


def _back(view: View, values_KHW: torch.Tensor) -> torch.Tensor:
    """Return values of a box of a view in the order of the raster's pixels."""
    if view.is_transposed:
        values_KHW = values_KHW.transpose(1, 2)
    down, across, _, up, right, _ = view.to_raster[:6]
    dims = [dim for dim, step in ((1, down + across), (2, up + right)) if step < 0]
    return values_KHW.flip(dims) if dims else values_KHW
