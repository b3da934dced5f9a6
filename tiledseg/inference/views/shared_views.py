"""The mean over reflections and turns where ranks own parts of one image: in halo modes `exchange` and `layer`.

A rank's part of a reflected raster is another rank's part of the raster. So after each view, when all ranks have made
theirs, each hands its probabilities to those who own the pixels: one exchange, whose messages follow from integers that
all ranks share. An owner adds up the views in their order, in float64, as in mode `read`: the same bits on any number
of ranks.

Nothing waits forever: an exchange comes after all passes of its view on the ranks that take part in it (of the last
stage, where there are several), and no pass waits for one (docs/communication.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import torch

from tiledseg.comm.axes import Axes
from tiledseg.comm.transports.point_to_point import Message
from tiledseg.comm.watching.doing import ticking
from tiledseg.execution.halos.halo_modes import SharedMode
from tiledseg.execution.halos.part import Part, Piece
from tiledseg.execution.passes.part_passes import Passes
from tiledseg.geometry.box import Box
from tiledseg.geometry.sharing.handing_over import hand_over
from tiledseg.inference.views.reflections import Mean, back, core_of, shares_of
from tiledseg.raster.samples.dataset import Sample
from tiledseg.raster.samples.views import View


def unseen(core: Box) -> None:
    """Nobody looks."""


def shared_means(
    passes: Passes,
    axes: Axes,
    samples: Iterator[Sample],
    parts: Sequence[Part],
    views: Sequence[View],
    seen: Callable[[Box], None],
) -> Iterator[Mean]:
    """The mean on this rank's block of the raster, where it is an end of the passes. `samples`: of `parts`, which are
    this rank's blocks of each view, the image of its number. `seen`: told of each piece's core. Collective over
    all ranks."""
    mode = passes.mode
    assert isinstance(mode, SharedMode), "the mode deals tiles out"
    mean: Mean | None = None
    for number, view in enumerate(views):
        own = [part for part in parts if part.image == number]
        outputs = ticking(passes.outputs(islice(samples, len(own)), own))
        made = _Made(view)
        for sample, piece in outputs:
            made.add(sample, piece)
            seen(piece.core)
        if made.shares_KHW is None:  # no end of the passes, or outside the mesh
            continue
        boxes = {rank: made.in_raster(core) for rank, core in mode.cores(number).items()}
        block_KHW = _brought(made.shares_KHW, boxes, mode.cores(0), axes)
        if mean is None:
            assert made.sample is not None, "it is that of a piece"
            mean = Mean(made.sample.tile.core, block_KHW.double(), made.sample)
        else:
            mean.shares_KHW.add_(block_KHW)
    if mean is not None:
        yield mean._replace(shares_KHW=mean.shares_KHW / len(views))


class _Made:
    """The probabilities of a rank's block of a view, as the raster has its pixels."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._box = Box.of_shape((0, 0))
        self.sample: Sample | None = None
        self.shares_KHW: torch.Tensor | None = None

    def add(self, sample: Sample, piece: Piece) -> None:
        found_KHW = back(self._view, shares_of(piece.logits_BKHW[0]))
        if self.shares_KHW is None:
            self.sample, self._box = sample, self.in_raster(sample.tile.core)
            self.shares_KHW = found_KHW.new_empty((len(found_KHW), *self._box.shape))
        rows, cols = self.in_raster(piece.core).relative_to(self._box).slices
        self.shares_KHW[:, rows, cols] = found_KHW

    def in_raster(self, core: Box) -> Box:
        """Where a box of the view lies in the raster."""
        return core_of(self._view, core)


def _brought(made_KHW: torch.Tensor, made: dict[int, Box], owned: dict[int, Box], axes: Axes) -> torch.Tensor:
    """The probabilities on this rank's box of `owned`, from the ranks that have made them on theirs. Collective over
    the ranks of the boxes: every message is posted before one is waited for."""
    rank = axes.rank_at(*_place(axes))
    sides, ours, box = hand_over(made, owned, rank), made[rank], owned[rank]
    if ours == box and not sides.gives and not sides.takes:
        return made_KHW
    found_KHW = made_KHW.new_empty((len(made_KHW), *box.shape))
    sends = [Message(to, _cut(made_KHW, ours, part).contiguous()) for to, part in sides.gives]
    receives = [Message(of, made_KHW.new_empty((len(made_KHW), *part.shape))) for of, part in sides.takes]
    work = axes.point_to_point.start(sends, receives)
    if sides.keeps is not None:
        _cut(found_KHW, box, sides.keeps).copy_(_cut(made_KHW, ours, sides.keeps))
    work.wait()
    for (_, part), message in zip(sides.takes, receives, strict=True):
        _cut(found_KHW, box, part).copy_(message.tensor)
    return found_KHW


def _place(axes: Axes) -> tuple[int, int]:
    assert axes.position is not None, "ranks outside the mesh make nothing"
    return axes.position.row, axes.position.col


def _cut(values_KHW: torch.Tensor, box: Box, part: Box) -> torch.Tensor:
    """The pixels of `part` of values on `box`."""
    rows, cols = part.relative_to(box).slices
    return values_KHW[:, rows, cols]
