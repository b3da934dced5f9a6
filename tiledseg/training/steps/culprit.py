"""The tile that makes a step's loss, or its gradient, one that no run goes on with. Looked for when the run has to end.

A step that goes well pays nothing for it: the gradient's sum rides with the loss in the one read of the step. A step
that went wrong makes no update; its passes are run once more, and each tile's input, loss and gradient are looked at.
The weights are the same, and dropout is drawn by seed and step, so each tile does what it did.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from tiledseg.comm.failure import mark_agreed
from tiledseg.comm.mesh import Mesh
from tiledseg.errors import TiledsegError
from tiledseg.execution.halos.part import Part, Piece
from tiledseg.geometry.box import Box
from tiledseg.raster.samples.dataset import Dataset, Sample
from tiledseg.training.steps.step_loss import StepLoss

_LOWER = "lower optimizer.lr, or set optimizer.clip_norm"
_CAUSES = {
    "input": ("whose input is not finite", "look at these pixels, or mark data.nodata"),
    "loss": ("whose input is finite: what the network makes of it is not", _LOWER),
    "gradient": ("whose loss is finite, and its gradient not", _LOWER),
}


class TileFigures(NamedTuple):
    """True for each of a tile's input, loss and gradient of the network's outputs that is finite; and its own loss. A
    tile, or a rank's block of an image, has figures of each stage."""

    path: str
    core: Box
    input: bool = True
    loss: bool = True
    gradient: bool = True
    value: float = -math.inf


def diverged(step: int, loss: float, gradient: bool, largest: float | None, scale: float | None) -> str:
    """Return the words for a step's loss or gradient with which the run does not go on; its update is not made."""
    what = f"the loss is {loss:.6g} at step {step + 1}"
    if math.isfinite(loss) and not gradient:
        what = f"the gradient is not finite at step {step + 1}, of a loss of {loss:.6g}"
    elif math.isfinite(loss):
        what += f", above train.largest_loss {largest:g}"
    return what + (f", in fp16 with a loss scale of {scale:g} (bf16 and fp32 have a wider range)" if scale else "")


def error_of(what: str, figures: Sequence[TileFigures]) -> TiledsegError:
    """Return the error of a step, with the tile that has caused it, the same on all ranks."""
    count = len({(one.path, one.core) for one in figures})
    for kind, (words, remedy) in _CAUSES.items():
        guilty = {(one.path, one.core) for one in figures if not getattr(one, kind)}
        if guilty:
            first = min(guilty, key=lambda one: (one[0], one[1].row.start, one[1].col.start))
            what = f"{what}: it comes from {_place(*first)}, {words} ({len(guilty)} of {count} tiles)"
            return mark_agreed(TiledsegError(f"{what}; the last checkpoint is kept: {remedy}"))
    if figures:
        worst = max(figures, key=lambda one: one.value)
        what += f": {_place(worst.path, worst.core)} has the largest of {count} tiles, {worst.value:.6g}"
    return mark_agreed(TiledsegError(f"{what}; the last checkpoint is kept: {_LOWER}"))


def _place(path: str, core: Box) -> str:
    return f"rows {core.row.start}:{core.row.stop}, columns {core.col.start}:{core.col.stop} of {path}"


class WatchedLoss:
    """The loss of a step, which notes the figures of each tile. See `execution.passes.part_passes.Loss`."""

    def __init__(self, loss: StepLoss, dataset: Dataset, parts: Sequence[Part]) -> None:
        self._loss, self._dataset, self._figures = loss, dataset, list[TileFigures]()
        self._sources = {part.image: part.draw.source for part in parts if part.draw is not None}
        self.looks_first, self.look, self.agree = loss.looks_first, loss.look, loss.agree

    def reading(self, samples: Iterator[Sample]) -> Iterator[Sample]:
        """Pass the samples of a stage without outputs on, and note their inputs."""
        for sample in samples:
            self._figures.append(self._read(sample.tile.core, sample))
            yield sample

    def __call__(self, pieces: Sequence[tuple[Piece, Sample]]) -> torch.Tensor:
        for piece, sample in pieces:
            with torch.no_grad():
                sums = self._loss.sums(piece, sample)
                value = self._loss.objective.value(sums.cpu())
            loss = 0.0 if value is None else float(value)
            figures = self._read(piece.core, sample)._replace(loss=bool(sums.isfinite().all()), value=loss)
            self._figures.append(figures)
            if piece.logits_BKHW.requires_grad:
                piece.logits_BKHW.register_hook(lambda gradient, figures=figures: self._look_back(figures, gradient))
        return self._loss(pieces)

    def gather(self, mesh: Mesh) -> list[TileFigures]:
        """Return the figures of the step's tiles, from all ranks. Collective."""
        return [figures for own in mesh.communicator.gather_objects(self._figures) for figures in own]

    def _look_back(self, figures: TileFigures, gradient: torch.Tensor) -> None:
        self._figures.append(figures._replace(gradient=bool(gradient.isfinite().all())))

    def _read(self, core: Box, sample: Sample) -> TileFigures:
        """Return a tile's figures, its pixels looked at as far as this rank has them."""
        finite, context = True, sample.tile.context
        if sample.x_CHW.size:
            finite = bool(np.isfinite(sample.x_CHW[:, *core.clip(context).relative_to(context).slices]).all())
        source = self._sources.get(sample.image)
        return TileFigures(self._dataset.images[sample.image if source is None else source].info.path, core, finite)
