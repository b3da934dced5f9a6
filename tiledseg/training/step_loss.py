"""The loss of a step, piece by piece: the gradients of the pieces add up to that of the step's loss.

If the loss is a ratio whose denominator depends on labels alone, each piece's numerator is differentiated by itself,
and the gradient is divided at the end: one pass. Otherwise the slopes of the loss at the sums of the whole step come
first. The sums need a pass without gradients (or the pieces, if a rank holds all of its own at once) and one
all-reduce. Then each piece's sums, times the slopes, are differentiated: the chain rule. No deadlock: every rank, with
or without a piece, starts that all-reduce once a step, before the sums of gradients.

A step whose loss or gradient is not finite, or whose loss is too large, makes no update and ends the run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from tiledseg.comm.doing import waiting
from tiledseg.comm.failure import mark_agreed
from tiledseg.comm.mesh import Mesh
from tiledseg.errors import TiledsegError
from tiledseg.execution.carrying import labels
from tiledseg.execution.halo_modes import Piece
from tiledseg.geometry.box import Box
from tiledseg.memory.device import fixed, sent
from tiledseg.raster.samples.dataset import Sample
from tiledseg.training.objective import Objective


class StepLoss:
    """The loss of a step, reused for each step after a `reset`. See `execution.part_passes.Loss`."""

    def __init__(self, objective: Objective, mesh: Mesh) -> None:
        self.objective, self._mesh = objective, mesh
        self.looks_first = not objective.single
        self.reset()

    def reset(self, scale: float = 1.0, weight: float = 1.0) -> None:
        """Begin a step whose mean loss is multiplied by `scale`; `weight`: approximate weight of all its pixels."""
        if not self.looks_first and scale != 1:  # a sum over pixels: divide by a power of two, which is exact
            scale /= 2.0 ** round(math.log2(weight))
        self._scale, self.pixels = scale, 0
        self._value: float | None = None
        self._totals = torch.zeros(self.objective.size, dtype=torch.float64, device=self._mesh.device)
        slopes = None if self.looks_first else fixed((scale, 0.0), torch.float64, self._mesh.device)
        self._slopes: torch.Tensor | None = slopes

    def look(self, piece: Piece, sample: Sample) -> None:
        self._add(self.sums(piece, sample), piece, sample)

    def agree(self) -> None:
        if self._slopes is not None:
            return
        with waiting("the sums of the step's loss"):
            self._mesh.communicator.all_reduce_sum(self._totals).wait()
        with torch.enable_grad():  # on the host: one wait for the sums
            totals = self._totals.to("cpu", copy=True).requires_grad_()
            value = self.objective.value(totals)
        slopes = torch.zeros_like(totals) if value is None else torch.autograd.grad(value, totals)[0]
        self._slopes = sent(slopes * self._scale, self._mesh.device)
        self._value = None if value is None else float(value.detach())

    def __call__(self, pieces: Sequence[tuple[Piece, Sample]]) -> torch.Tensor:
        sums = [self.sums(piece, sample) for piece, sample in pieces]
        if self._slopes is None or not self.looks_first:
            for own, (piece, sample) in zip(sums, pieces, strict=True):
                self._add(own.detach(), piece, sample)
        self.agree()
        slopes = self._slopes
        assert slopes is not None, "the ranks have agreed on them"
        return torch.stack([(own * slopes).sum() for own in sums] or [self._totals[0] * 0]).sum()

    def own(self, further: torch.Tensor) -> tuple[float, float, float]:
        """Return this rank's sums of losses and of weights (0 for ratios), and `further`, in one read of the device."""
        if self.looks_first:
            return 0.0, 0.0, float(further)
        loss, weight, read = torch.cat([self._totals, further.reshape(1)]).tolist()
        return loss, weight, read

    def of_step(self, loss: float, weight: float) -> tuple[float | None, float]:
        """Return the step's loss, None if no pixel counted, and the factor of its gradients, from the ranks' sums."""
        if self.looks_first:
            return self._value, 1 / self._scale
        return (loss / weight, 1 / weight / self._scale) if weight else (None, 1.0)

    def sums(self, piece: Piece, sample: Sample) -> torch.Tensor:
        """Return the sums of the objective over a piece."""
        target_BHW = self._target(piece, sample)[None]
        outputs_BKHW = piece.logits_BKHW, *piece.others
        return self.objective.sums(tuple(o.to(logits_dtype(o)) for o in outputs_BKHW), target_BHW)

    def _target(self, piece: Piece, sample: Sample) -> torch.Tensor:
        """Return the classes of a piece and of the objective's margin, on the device; -1 beyond the raster."""
        labels_HW, margin, around = labels(sample, self._mesh.device), self.objective.margin, sample.around
        if around is None:
            return labels_HW[piece.in_part.slices]
        box = Box(piece.core.row.expand(margin, margin), piece.core.col.expand(margin, margin))
        if not margin:
            return labels_HW[box.relative_to(around).slices]
        there = box.clip(around)
        target_HW = labels_HW.new_full(box.shape, -1, dtype=torch.int16)
        target_HW[there.relative_to(box).slices] = labels_HW[there.relative_to(around).slices]
        return target_HW

    def _add(self, sums: torch.Tensor, piece: Piece, sample: Sample) -> None:
        assert sample.y_HW is not None, "training samples have labels"
        self._totals += sums
        self.pixels += int(np.count_nonzero(sample.y_HW[piece.in_part.slices] != self.objective.terms[0].ignore_index))


def logits_dtype(logits: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a loss of these logits is computed: float64, or float32 for narrower ones."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def diverged(step: int, loss: float, gradient: bool, largest: float | None, scale: float | None) -> TiledsegError:
    """Return the error of a step that makes no update, the same on all ranks."""
    what = f"the loss is {loss:.6g} at step {step + 1}"
    if math.isfinite(loss) and not gradient:
        what = f"the gradient is not finite at step {step + 1}, of a loss of {loss:.6g}"
    elif math.isfinite(loss):
        what += f", above train.largest_loss {largest:g}"
    if scale:
        what += f", in fp16 with a loss scale of {scale:g} (bf16 and fp32 have a wider range)"
    remedy = "lower optimizer.lr, or set optimizer.clip_norm"
    return mark_agreed(TiledsegError(f"{what}; the last checkpoint is kept: {remedy}"))
