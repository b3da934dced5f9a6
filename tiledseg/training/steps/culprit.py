"""Which tile makes a step's loss, or its gradient, one that no run goes on with. Asked once, when the run has to end.

A step that goes well pays nothing for it: the gradient's sum rides with the loss in the one read of the step. Only
after a step that went wrong, whose update is not made, each of its parts is run once more by itself, and what it is
made of is looked at: its input, the weights of its labels, its loss, its gradient. The network has the weights that it
had, dropout is drawn by seed and step, so each part does what it did; only a batch norm over a step sees fewer images.

It cannot deadlock: all ranks run as many parts as the rank with most, in the order of the step, as a step does; sums of
gradients are those of a rank alone. Then one gather.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from tiledseg.comm.failure import mark_agreed
from tiledseg.comm.mesh import Mesh
from tiledseg.comm.transports.collectives import SerialCommunicator
from tiledseg.errors import TiledsegError
from tiledseg.execution.halos.part import Part, Piece
from tiledseg.execution.passes.part_passes import Key, Passes, read_ahead
from tiledseg.geometry.box import Box
from tiledseg.gradients import GradientReducer
from tiledseg.raster.samples.dataset import Dataset, Sample
from tiledseg.training.steps.step_loss import StepLoss

_KEPT = "the last checkpoint is kept"
_LOWER = "lower optimizer.lr, or set optimizer.clip_norm"


class TileFigures(NamedTuple):
    """Of a tile, or a rank's block of an image, by itself: whether its input, the weights of its labels, its loss and
    its gradient are finite, of the weights and of the network's outputs; and its mean loss."""

    path: str
    core: Box
    input: bool
    weights: bool
    loss: bool
    gradient: bool
    outputs: bool
    mean: float

    @property
    def place(self) -> str:
        rows, cols = self.core.row, self.core.col
        return f"rows {rows.start}:{rows.stop}, columns {cols.start}:{cols.stop} of {self.path}"


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


def named(error: DivergedError, found: Sequence[TileFigures]) -> TiledsegError:
    """The error with the tile that has caused it, of all that the step is made of, in one order on all ranks."""
    kinds = (
        (
            [one for one in found if not one.input],
            "whose input is not finite",
            "look at these pixels, or mark data.nodata",
        ),
        (
            [one for one in found if not one.weights],
            "whose labels have weights that are not finite",
            "look at train.class_weights",
        ),
        (
            [one for one in found if not one.loss],
            "whose input and labels' weights are finite: what the network makes of it is not",
            _LOWER,
        ),
        ([one for one in found if not one.outputs], "whose loss is finite, and its gradient not", _LOWER),
        ([one for one in found if not one.gradient], "whose loss is finite, and its gradient not", _LOWER),
    )
    for guilty, what, remedy in kinds:
        if guilty:
            first = min(guilty, key=lambda one: (one.path, one.core.row.start, one.core.col.start))
            more = (
                f" (as {len(guilty) - 1} more of {len(found)})"
                if len(guilty) > 1
                else f" (of {len(found)} that it has)"
            )
            return mark_agreed(TiledsegError(f"{error}: it comes from {first.place}, {what}{more}; {_KEPT}: {remedy}"))
    if not found:
        return mark_agreed(TiledsegError(f"{error}; {_KEPT}: {_LOWER}"))
    worst = max(found, key=lambda one: one.mean)
    each = "all are finite, each by itself" if "above" not in str(error) else f"the largest of {len(found)}"
    return mark_agreed(TiledsegError(f"{error}: {worst.place} has {worst.mean:.6g}, {each}; {_KEPT}: {_LOWER}"))


def find(
    passes: Passes, loss: StepLoss, key: Key, dataset: Dataset, parts: Sequence[Part], mesh: Mesh, wide: bool
) -> list[TileFigures]:
    """What each tile of a step is made of, from all ranks; `parts` are this rank's. Nobody else may gather the
    network's gradients. Collective."""
    reducer = GradientReducer(passes.mode.network.parameters(), SerialCommunicator(), wide)
    own: list[TileFigures] = []
    try:
        for number in range(max(mesh.communicator.gather_objects(len(parts)))):
            own += _of_part(passes, loss, key, dataset, parts[number : number + 1], reducer)
    finally:
        reducer.close()
    return _merged([one for found in mesh.communicator.gather_objects(own) for one in found])


def _of_part(
    passes: Passes, loss: StepLoss, key: Key, dataset: Dataset, parts: Sequence[Part], reducer: GradientReducer
) -> list[TileFigures]:
    """Of one part, or none where others have more."""
    watched = _Watched(loss, dataset, reducer)
    again = [part for _ in range(passes.rounds(parts, loss.looks_first)) for part in parts]
    seen: list[Sample] = []
    samples = read_ahead(passes, dataset, again, 0, 1)
    reducer.zero()
    passes.train((seen.append(one) or one for one in samples), parts, key, watched, reducer)  # type: ignore[func-returns-value]
    for part in parts if not watched.found else ():  # of a stage that makes no output
        known = all(_input_finite(part.tile.core, sample) for sample in seen)
        path = _path(dataset, part.image, part)
        watched.found.append(TileFigures(path, part.tile.core, known, True, True, True, True, 0.0))
    watched.end_call()
    return watched.found


class _Watched:
    """The loss of a step, which notes of each piece what it is made of; the gradients of a call are looked at before
    the next one."""

    def __init__(self, loss: StepLoss, dataset: Dataset, reducer: GradientReducer) -> None:
        self._loss, self._dataset, self._reducer = loss, dataset, reducer
        self.looks_first = loss.looks_first
        self.found: list[TileFigures] = []
        self._ended = 0

    def look(self, piece: Piece, sample: Sample) -> None:
        """The step has looked."""

    def agree(self) -> None:
        """The step has agreed."""

    def __call__(self, pieces: Sequence[tuple[Piece, Sample]]) -> torch.Tensor:
        self.end_call()
        for piece, sample in pieces:
            with torch.no_grad():
                loss, weight, *others = self._loss.sums(piece, sample)
            finite = all(bool(part.isfinite().all()) for part in (loss, *others))
            mean = float(loss) / float(weight) if weight else 0.0
            known = _input_finite(piece.core, sample), bool(weight.isfinite())
            self.found.append(
                TileFigures(_path(self._dataset, sample.image), piece.core, *known, finite, True, True, mean)
            )
            self._look_back(piece.logits_BKHW)
        return self._loss(pieces)

    def _look_back(self, logits_BKHW: torch.Tensor) -> None:
        """Ranks that share an image hand gradients on: the first that is not finite is that of an output."""
        number = len(self.found) - 1

        def look(gradient: torch.Tensor) -> None:
            if not bool(gradient.isfinite().all()):
                self.found[number] = self.found[number]._replace(outputs=False)

        if logits_BKHW.requires_grad:
            logits_BKHW.register_hook(look)

    def end_call(self) -> None:
        """The gradients of the pieces since the last call are in the sums; those of a stage too."""
        finite = all(bool(flat.sum().isfinite()) for flat in self._reducer.buckets)
        for number in range(self._ended, len(self.found)):
            self.found[number] = self.found[number]._replace(gradient=finite)
        self._ended = len(self.found)
        self._reducer.zero()


def _input_finite(core: Box, sample: Sample) -> bool:
    """Of the pixels in `core`, where this rank has them."""
    if not sample.pixels_CHW.size:
        return True
    context = sample.tile.context
    slices = core.clip(context).relative_to(context).slices
    return bool(np.isfinite(sample.x_CHW[:, *slices]).all())


def _path(dataset: Dataset, image: int, part: Part | None = None) -> str:
    source = part.draw.source if part is not None and part.draw is not None else None
    return dataset.images[image if source is None else source].info.path


def _merged(found: Sequence[TileFigures]) -> list[TileFigures]:
    """One of each tile: its stages have looked at it one by one."""
    whole: dict[tuple[str, Box], TileFigures] = {}
    for one in found:
        other = whole.get((one.path, one.core), one)
        whole[one.path, one.core] = one._replace(
            input=one.input and other.input,
            weights=one.weights and other.weights,
            loss=one.loss and other.loss,
            gradient=one.gradient and other.gradient,
            outputs=one.outputs and other.outputs,
            mean=max(one.mean, other.mean),
        )
    return list(whole.values())
