"""The loss of a step, piece by piece: the gradients of the pieces add up to that of the step's loss.

Where the loss is one sum over another, and the other one of labels alone, each piece's part of the first is
differentiated by itself, and the gradient divided in the end: one pass.

Where it is a ratio of what the network gives, its slopes at the sums of the whole step come first. A pass without
gradients gives the sums, or the pieces themselves where a rank holds all of its own at once. One all-reduce adds them
up. Then each piece's own sums, times the slopes, are differentiated. The loss is a function of these sums alone, so
that is the chain rule, and exact over any tiles and ranks.

It cannot deadlock: every rank, also one without a piece, starts that all-reduce once a step, before sums of gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from tiledseg.comm.mesh import Mesh
from tiledseg.comm.watching.doing import waiting
from tiledseg.execution.carrying import labels
from tiledseg.execution.halos.part import Piece
from tiledseg.geometry.box import Box
from tiledseg.models.sending import fixed, sent
from tiledseg.raster.samples.dataset import Sample
from tiledseg.training.losses.objective import Objective


class StepLoss:
    """The loss of one step after the other: `reset` before each. See `execution.passes.part_passes.Loss`."""

    def __init__(self, objective: Objective, ignore_index: int, mesh: Mesh) -> None:
        self.objective, self._ignore_index, self._mesh = objective, ignore_index, mesh
        self.looks_first = not objective.single
        self.reset()

    def reset(self, scale: float = 1.0, weight: float = 1.0) -> None:
        """Begin a step whose mean loss is multiplied by `scale`; `weight`: of all its pixels, about."""
        if not self.looks_first and scale != 1:  # a sum over pixels is divided by a power of two, which rounds nothing
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
        with torch.enable_grad():  # on the host, which waits for the sums once
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
        """Return this rank's sums of losses and of weights (0 for ratios), and `further`, a float64 of the same device
        that is read with them."""
        if self.looks_first:
            return 0.0, 0.0, float(further)
        loss, weight, read = torch.cat([self._totals, further.reshape(1)]).tolist()
        return loss, weight, read

    def of_step(self, loss: float, weight: float) -> tuple[float | None, float]:
        """Return the step's loss, None if no pixel counted, and the factor of its gradients, from `own` summed over the
        ranks."""
        if self.looks_first:
            return self._value, 1 / self._scale
        return (loss / weight, 1 / weight / self._scale) if weight else (None, 1.0)

    def sums(self, piece: Piece, sample: Sample) -> torch.Tensor:
        """Return the sums of the objective over a piece."""
        target_BHW = self._target(piece, sample)[None]
        outputs_BKHW = piece.logits_BKHW, *piece.others
        return self.objective.sums(tuple(o.to(logits_dtype(o)) for o in outputs_BKHW), target_BHW)

    def _target(self, piece: Piece, sample: Sample) -> torch.Tensor:
        """Return the classes of a piece, on the device, with the objective's margin: -1 beyond the raster."""
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
        assert sample.y_HW is not None, "it has been looked at"
        self._totals += sums
        self.pixels += int(np.count_nonzero(sample.y_HW[piece.in_part.slices] != self._ignore_index))


def logits_dtype(logits: torch.Tensor) -> torch.dtype:
    """Return the dtype of the loss: float32 at least."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
