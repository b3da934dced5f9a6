"""The tile that makes a step's loss, or its gradient, one that no run goes on with. Looked for when the run has to end.

A step that goes well pays nothing for it: the gradient's sum rides with the loss in the one read of the step. A step
that went wrong makes no update; its passes are run once more, and each tile's input, weights, loss and gradient are
looked at. The weights are the same, and dropout is drawn by seed and step, so each tile does what it did.
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


class TileFigures(NamedTuple):
    """A tile, or a rank's block of an image: True for each of its input, weights of labels, loss and gradient of the
    network's outputs that is finite; and its mean loss."""

    path: str
    core: Box
    input: bool = True
    weights: bool = True
    loss: bool = True
    gradient: bool = True
    mean: float = 0.0

    def merged(self, other: TileFigures) -> TileFigures:
        """Return the figures of a tile whose stages have looked at it one by one."""
        return TileFigures(
            self.path,
            self.core,
            self.input and other.input,
            self.weights and other.weights,
            self.loss and other.loss,
            self.gradient and other.gradient,
            max(self.mean, other.mean),
        )


class DivergedError(TiledsegError):
    """A step's loss or gradient with which the run does not go on; its update is not made. The same on all ranks."""

    def __init__(
        self, step: int, loss: float, gradient: bool, largest: float | None, scale: float | None = None
    ) -> None:
        what = f"the loss is {loss:.6g} at step {step + 1}"
        if math.isfinite(loss) and not gradient:
            what = f"the gradient is not finite at step {step + 1}, of a loss of {loss:.6g}"
        elif math.isfinite(loss):
            what += f", above train.largest_loss {largest:g}"
        super().__init__(
            what + (f", in fp16 with a loss scale of {scale:g} (bf16 and fp32 have a wider range)" if scale else "")
        )


def named(error: DivergedError, tiles: Sequence[TileFigures]) -> TiledsegError:
    """Return the error with the tile that has caused it, the same on all ranks."""
    kinds = {
        "input": ("whose input is not finite", "look at these pixels, or mark data.nodata"),
        "weights": ("whose labels have weights that are not finite", "look at train.class_weights"),
        "loss": ("whose input and labels' weights are finite: what the network makes of it is not", _LOWER),
        "gradient": ("whose loss is finite, and its gradient not", _LOWER),
    }
    for kind, (what, remedy) in kinds.items():
        guilty = [one for one in tiles if not getattr(one, kind)]
        if guilty:
            first = min(guilty, key=lambda one: (one.path, one.core.row.start, one.core.col.start))
            words = f"it comes from {_place(first)}, {what} ({len(guilty)} of {len(tiles)} tiles)"
            return mark_agreed(TiledsegError(f"{error}: {words}; the last checkpoint is kept: {remedy}"))
    words = ""
    if tiles:
        worst = max(tiles, key=lambda one: one.mean)
        words = f": {_place(worst)} has the largest of {len(tiles)} tiles, {worst.mean:.6g}"
    return mark_agreed(TiledsegError(f"{error}{words}; the last checkpoint is kept: {_LOWER}"))


def _place(tile: TileFigures) -> str:
    rows, cols = tile.core.row, tile.core.col
    return f"rows {rows.start}:{rows.stop}, columns {cols.start}:{cols.stop} of {tile.path}"


class WatchedLoss:
    """The loss of a step, which notes the figures of each tile. See `execution.passes.part_passes.Loss`."""

    def __init__(self, loss: StepLoss, dataset: Dataset, parts: Sequence[Part]) -> None:
        self._loss, self._dataset = loss, dataset
        drawn = {part.image: part.draw.source for part in parts if part.draw is not None}
        self._sources = {image: source for image, source in drawn.items() if source is not None}
        self.looks_first = loss.looks_first
        self._tiles: dict[tuple[str, Box], TileFigures] = {}

    def reading(self, samples: Iterator[Sample]) -> Iterator[Sample]:
        """Pass the samples of a stage without outputs on, and note their inputs."""
        for sample in samples:
            self._note(TileFigures(self._path(sample), sample.tile.core, _input_finite(sample.tile.core, sample)))
            yield sample

    def look(self, piece: Piece, sample: Sample) -> None:
        self._loss.look(piece, sample)

    def agree(self) -> None:
        self._loss.agree()

    def __call__(self, pieces: Sequence[tuple[Piece, Sample]]) -> torch.Tensor:
        for piece, sample in pieces:
            with torch.no_grad():
                loss, weight, *others = self._loss.sums(piece, sample)
            finite = all(bool(part.isfinite().all()) for part in (loss, *others))
            known = _input_finite(piece.core, sample), bool(weight.isfinite())
            mean = float(loss) / float(weight) if weight else 0.0
            figures = TileFigures(self._path(sample), piece.core, *known, finite, True, mean)
            self._note(figures)
            if piece.logits_BKHW.requires_grad:
                piece.logits_BKHW.register_hook(lambda gradient, figures=figures: self._look_back(figures, gradient))
        return self._loss(pieces)

    def gather(self, mesh: Mesh) -> list[TileFigures]:
        """Return each tile of the step once, from all ranks. Collective."""
        every = mesh.communicator.gather_objects(list(self._tiles.values()))
        self._tiles = {}
        for figures in (one for own in every for one in own):
            self._note(figures)
        return list(self._tiles.values())

    def _look_back(self, figures: TileFigures, gradient: torch.Tensor) -> None:
        """Note a gradient that is not finite, of a loss that is."""
        self._note(figures._replace(gradient=bool(gradient.isfinite().all())))

    def _note(self, figures: TileFigures) -> None:
        key = figures.path, figures.core
        self._tiles[key] = figures.merged(self._tiles.get(key, figures))

    def _path(self, sample: Sample) -> str:
        return self._dataset.images[self._sources.get(sample.image, sample.image)].info.path


def _input_finite(core: Box, sample: Sample) -> bool:
    """Return True if the pixels of a core are finite, as far as this rank has them."""
    if not sample.x_CHW.size:
        return True
    context = sample.tile.context
    return bool(np.isfinite(sample.x_CHW[:, *core.clip(context).relative_to(context).slices]).all())
