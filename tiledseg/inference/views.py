"""The mean of a network's probabilities over reflections, and quarter turns, of a raster.

Each view is mapped as the whole changed raster would be, and brought back, so the mean depends on no grid and no number
of ranks, to the last bit. In halo mode read, a tile's pixels are mapped in every view by one rank. Where ranks share an
image, each maps its block of one view after the other, and hands probabilities to the owner of the pixels. An exchange
follows all passes of its view, and no pass waits for one (docs/communication.md). Sums are float64, in the order of
the views.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from tiledseg.comm.axes import Axes
from tiledseg.comm.transports.point_to_point import Message
from tiledseg.comm.watching.doing import ticking
from tiledseg.execution.halos.halo_modes import SharedMode
from tiledseg.execution.halos.part import Part
from tiledseg.execution.passes.part_passes import Passes
from tiledseg.geometry.box import Box
from tiledseg.geometry.halo import Footprint
from tiledseg.geometry.interval import Interval
from tiledseg.geometry.sharing.handing_over import hand_over
from tiledseg.geometry.tiling import Tiling, make_tiling, tile_around
from tiledseg.raster.samples.dataset import Sample
from tiledseg.raster.samples.views import Line, View

CHOICES = NONE, REFLECTIONS, TURNS = ("none", "reflections", "turns")
"""The raster alone; it and its three reflections; these and their transposes, which are all quarter turns too."""

Window = tuple[Box, torch.Tensor, NDArray[np.bool_]]
"""A place of the raster, each class's score or probability there (K, H, W), and which pixels have data."""


def views_of(kind: str, shape: tuple[int, int]) -> tuple[View, ...]:
    """Return the views of a raster of `shape` (height, width), the unchanged one first."""
    lines = [[Line(0, 1), Line(size - 1, -1)] for size in shape]
    found = [View(shape, row, col) for row in lines[0] for col in lines[1]]
    if kind == TURNS:
        found += [View((shape[1], shape[0]), view.row, view.col, transposed=True) for view in found]
    return tuple(found) if kind != NONE else (found[0],)


def tilings_of(views: Sequence[View], tiling: Tiling, cut: bool) -> tuple[Tiling, ...]:
    """Return the tiling of each view, of which the first is the raster that is cut by `tiling`.

    With `cut` the others are cut into the same tiles, or theirs with rows for columns; else each is one tile.
    """
    if not cut:
        return tiling, *(make_tiling(view.shape, (1, 1), tiling.footprint) for view in views[1:])
    turned = make_tiling(tiling.raster[::-1], tiling.grid[::-1], tiling.footprint)
    same = turned if tiling.raster != tiling.raster[::-1] else tiling
    return tuple(same if view.transposed else tiling for view in views)


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


def means(passes: Passes, samples: Iterator[Sample], parts: Sequence[Part], views: Sequence[View]) -> Iterator[Window]:
    """Yield the mean over views of `parts`, which are those of `parts_of_views`."""
    outputs = ticking(passes.outputs(samples, parts))
    for sample, piece in outputs:
        total_KHW = shares_of(piece.logits_BKHW[0]).double()
        for view in views[1:]:
            _, other = next(outputs)
            total_KHW += _back(view, shares_of(other.logits_BKHW[0]))
        yield piece.core, total_KHW / len(views), sample.valid_HW


def shared_means(
    passes: Passes, axes: Axes, samples: Iterator[Sample], parts: Sequence[Part], views: Sequence[View]
) -> Iterator[Window]:
    """Yield the mean on this rank's block of the raster, where it is an end of the passes. Collective over all ranks.

    `parts` are this rank's blocks of each view, the image of its number.
    """
    mode = passes.mode
    assert isinstance(mode, SharedMode), "the mode deals tiles out"
    total_KHW, first = None, None
    for number, view in enumerate(views):
        own = [part for part in parts if part.image == number]
        made_KHW, box = None, Box.of_shape((0, 0))
        for sample, piece in ticking(passes.outputs(islice(samples, len(own)), own)):
            shares_KHW = _back(view, shares_of(piece.logits_BKHW[0]))
            if made_KHW is None:
                first, box = first or sample, _core_of(view, sample.tile.core)
                made_KHW = shares_KHW.new_empty((len(shares_KHW), *box.shape))
            _cut(made_KHW, box, _core_of(view, piece.core)).copy_(shares_KHW)
        if made_KHW is None:  # no end of the passes, or outside the mesh
            continue
        boxes = {rank: _core_of(view, core) for rank, core in mode.cores(number).items()}
        block_KHW = _exchanged(made_KHW, boxes, mode.cores(0), axes)
        total_KHW = block_KHW.double() if total_KHW is None else total_KHW.add_(block_KHW)
    if total_KHW is not None:
        assert first is not None, "the block is of a sample"
        yield first.tile.core, total_KHW / len(views), first.valid_HW


def _exchanged(made_KHW: torch.Tensor, made: dict[int, Box], owned: dict[int, Box], axes: Axes) -> torch.Tensor:
    """Return the probabilities on this rank's box of `owned`, from the ranks that made them on theirs.

    Collective over the ranks of the boxes: every message is posted before one is waited for.
    """
    assert axes.position is not None, "ranks outside the mesh make nothing"
    rank = axes.rank_at(axes.position.row, axes.position.col)
    sides, ours, box = hand_over(made, owned, rank), made[rank], owned[rank]
    if ours == box and not sides.gives and not sides.takes:
        return made_KHW
    owned_KHW = made_KHW.new_empty((len(made_KHW), *box.shape))
    sends = [Message(to, _cut(made_KHW, ours, part).contiguous()) for to, part in sides.gives]
    receives = [Message(of, made_KHW.new_empty((len(made_KHW), *part.shape))) for of, part in sides.takes]
    work = axes.point_to_point.start(sends, receives)
    if sides.keeps is not None:
        _cut(owned_KHW, box, sides.keeps).copy_(_cut(made_KHW, ours, sides.keeps))
    work.wait()
    for (_, part), message in zip(sides.takes, receives, strict=True):
        _cut(owned_KHW, box, part).copy_(message.tensor)
    return owned_KHW


def _core_in(view: View, core: Box) -> Box:
    """Return the place in a view of a box of the raster."""
    rows, cols = _positions(view.row, core.row), _positions(view.col, core.col)
    return Box(cols, rows) if view.transposed else Box(rows, cols)


def _core_of(view: View, core: Box) -> Box:
    """Return the place in the raster of a box of a view."""
    rows, cols = (core.col, core.row) if view.transposed else (core.row, core.col)
    return Box(view.row.source(rows), view.col.source(cols))


def _back(view: View, values_KHW: torch.Tensor) -> torch.Tensor:
    """Return values of a box of a view in the order of the raster's pixels."""
    if view.transposed:
        values_KHW = values_KHW.transpose(1, 2)
    dims = [dim for dim, line in ((1, view.row), (2, view.col)) if line.step < 0]
    return values_KHW.flip(dims) if dims else values_KHW


def _positions(line: Line, pixels: Interval) -> Interval:
    """Return the positions of pixels: the inverse of a line on pixels."""
    ends = [int((pixel - line.start) / line.step) for pixel in (pixels.start, pixels.stop - 1)]
    return Interval(min(ends), max(ends) + 1)


def _cut(values_KHW: torch.Tensor, box: Box, part: Box) -> torch.Tensor:
    """Return the pixels of `part` of values on `box`."""
    rows, cols = part.relative_to(box).slices
    return values_KHW[:, rows, cols]
