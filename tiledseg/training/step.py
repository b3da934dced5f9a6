"""One optimizer step over the tiles of all ranks: sums of losses and weights, one all-reduce, one update.

The gradients of the pieces add up to that of the step's loss. If the loss is a ratio whose denominator depends on
labels alone, each piece's numerator is differentiated by itself, and the gradient is divided at the end: one pass.
Otherwise the slopes of the loss at the sums of the whole step come first. The sums need a pass without gradients (or
the pieces, if a rank holds all of its own at once) and one all-reduce. Then each piece's sums, times the slopes, are
differentiated: the chain rule. No deadlock: every rank, with or without a piece, starts that all-reduce once a step,
before the sums of gradients.

A step whose loss or gradient is not finite, or whose loss is too large, makes no update and ends the run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from tiledseg.checkpoint.saved_state import LossScale
from tiledseg.comm.doing import waiting
from tiledseg.comm.failure import mark_agreed
from tiledseg.comm.mesh import Axes, Mesh
from tiledseg.errors import TiledsegError
from tiledseg.execution.carrying import labels
from tiledseg.execution.halo_modes import Part, Piece
from tiledseg.execution.memory import peak_memory, reset_peak
from tiledseg.execution.part_passes import Passes, TimedSamples
from tiledseg.geometry.box import Box
from tiledseg.gradients import GradientReducer, clip_gradients, scale_gradients
from tiledseg.memory.device import Stopwatch, fixed, sent
from tiledseg.models.dropout import DropoutKey
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
        self._pieces: list[tuple[int, Box, torch.Tensor]] = []  # image, core, sums

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

    def worst(self) -> tuple[float, int, Box]:
        """Return loss, image and core of this rank's piece of the largest loss, infinite if it is not finite."""
        worst = -math.inf, 0, Box.of_shape((0, 0))
        for image, core, sums in self._pieces:
            value = self.objective.value(sums.cpu()) if sums.isfinite().all() else math.inf
            if value is not None and float(value) > worst[0]:
                worst = float(value), image, core
        return worst

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
        self._pieces.append((sample.image, piece.core, sums))
        self.pixels += int(np.count_nonzero(sample.y_HW[piece.in_part.slices] != self.objective.terms[0].ignore_index))


def logits_dtype(logits: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a loss of these logits is computed: float64, or float32 for narrower ones."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


_FIGURES = (
    *("loss", "weight", "gradient", "pixels", "stops", "data_seconds", "communication_seconds"),
    *("halo_bytes", "halo_messages", "memory_bytes", "busy_seconds", "seconds", "stage_bytes", "stage_messages"),
)
"""The figures of a rank in a step. `loss`, `weight`: sums over its pieces; `gradient`: sum of all numbers of the
reduced gradient. `busy_seconds` and those after it are of its pipeline stage."""


class Stepper:
    """A runner of optimizer steps. The result of a step depends on its tiles, not on the ranks that compute them.

    `seed`: of dropout. `scale`: of the loss, in fp16; the same on every rank, because it depends on sums over all
    ranks. `clip_norm`: largest norm of the gradient (0: any). `wide_sums`: gradients are summed in float64.
    `largest_loss`: a larger loss ends the run (None: any finite loss is accepted). `paths`: of the images, for errors.
    """

    paths: Sequence[str] = ()

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        passes: Passes,
        axes: Axes,
        objective: Objective,
        seed: int,
        scale: LossScale | None = None,
        clip_norm: float = 0.0,
        wide_sums: bool = True,
        largest_loss: float | None = None,
    ) -> None:
        self.scale, self._seed, self._clip_norm, self._largest = scale, seed, clip_norm, largest_loss
        self._optimizer, self._mesh, self._passes, self._axes = optimizer, mesh, passes, axes
        self._halos = axes.point_to_point
        self._loss = StepLoss(objective, mesh)
        self._reducer = GradientReducer(passes.mode.network.parameters(), axes.weights, wide_sums)
        self._waits = Stopwatch(mesh.device)
        reset_peak(mesh.device)

    def run(
        self, step: int, samples: Iterator[Sample], parts: Sequence[Part], stop: bool, weight: float = 1.0
    ) -> tuple[dict[str, Any], bool]:
        """Run step number `step` (from 0) on this rank's next samples, loaded for `parts`. Collective: a rank without
        parts calls it too. `stop`: this rank wishes to end. `weight`: approximate sum of the weights of the step's
        pixels, for a loss scale.

        Return the figures of `metrics.jsonl`, and True if a rank wishes to stop: the same on every rank. `loss`: mean
        over the valid core pixels of all tiles, weighted by class (None if the weights add up to 0). `data_seconds` and
        `communication_seconds` are waits, mean over ranks; halo figures are sums over ranks; `memory_bytes` is the
        largest peak of a rank.

        Raises an error on every rank, before the update, if the loss or the gradient is not finite, or the loss is
        above `largest_loss`. With a loss scale, a gradient that is not finite (of a finite loss) halves the scale, down
        to 1, and skips the update.
        """
        begun = time.perf_counter()
        self._halos.reset()
        self._waits.reset()
        scale = self.scale
        self._reducer.zero()
        self._loss.reset(scale.value if scale else 1.0, weight)
        key = partial(DropoutKey, self._seed, step)
        timed = TimedSamples(samples)
        self._passes.train(timed, parts, key, self._loss, self._reducer)
        self._loss.agree()  # a rank without a piece has not called it yet
        with self._waits.running():
            self._reducer.finish()
        with waiting("the end of the pass"):  # the step's only wait for a GPU, whose kernels may wait for other ranks
            own_sums = self._loss.own(self._reducer.total().to(self._mesh.device))
        halos, communicating = self._halos, self._halos.seconds + self._waits.seconds()
        of_stage = self._passes.figures() or (0.0, 0.0, 0.0, 0.0)
        of_halos = halos.bytes, halos.messages, peak_memory(self._mesh.device)
        own = (*own_sums, self._loss.pixels, stop, timed.seconds, communicating, *of_halos, *of_stage)
        every = torch.zeros(self._mesh.size, len(own), dtype=torch.float64)  # all-gather by one all-reduce on the host
        every[self._mesh.rank] = torch.tensor(own, dtype=torch.float64)
        self._mesh.communicator.all_reduce_sum(every).wait()
        of_ranks = dict(zip(_FIGURES, every.T.tolist(), strict=True))
        sums = {name: sum(values) for name, values in of_ranks.items()}
        loss, factor = self._loss.of_step(sums["loss"], sums["weight"])
        finite = math.isfinite(sums["gradient"])
        skipped = loss is not None and not finite and scale is not None and scale.value > 1
        if loss is not None:
            largest = self._largest
            whole = math.isfinite(loss) and (finite or skipped)
            if not whole or (largest is not None and loss > largest):
                raise self._diverged(step, loss, finite or skipped, parts)
            self.scale = scale.after(finite) if scale else None
            if not skipped:
                scale_gradients(self._reducer, factor)
                if self._clip_norm:
                    clip_gradients(self._reducer, self._clip_norm, self._axes.pipeline, self._mesh.device)
                self._reducer.deliver()
                self._optimizer.step()
        seconds = time.perf_counter() - begun
        figures: dict[str, Any] = {
            "loss": loss,
            **{name: int(sums[name]) for name in ("pixels", "halo_bytes", "halo_messages")},
            **{name: sums[name] / self._mesh.size for name in ("data_seconds", "communication_seconds")},
            "seconds": seconds,
            "memory_bytes": int(max(of_ranks["memory_bytes"])),
            "pixels_per_second": sums["pixels"] / seconds,
            **({"loss_scale": scale.value, "skipped": skipped} if scale else {}),
        }
        if (stages := self._axes.shape.stages) > 1:
            # `stage_seconds`: mean over a stage's ranks. `bubble_share`: share of the ranks' time spent waiting.
            ranks, longest = self._axes.shape.ranks, max(of_ranks["seconds"])
            busy = of_ranks["busy_seconds"][:ranks]
            figures |= {
                "pipeline_bytes": int(sums["stage_bytes"]),
                "pipeline_messages": int(sums["stage_messages"]),
                "stage_seconds": [sum(busy[stage::stages]) / (ranks // stages) for stage in range(stages)],
                "bubble_share": 1 - sum(busy) / (ranks * longest) if longest else 0.0,
            }
        return figures, sums["stops"] > 0

    def _diverged(self, step: int, loss: float, finite: bool, parts: Sequence[Part]) -> TiledsegError:
        """Return the error of a step that makes no update, with the tile of its largest loss. Collective."""
        what = f"the loss is {loss:.6g} at step {step + 1}"
        if math.isfinite(loss) and not finite:
            what = f"the gradient is not finite at step {step + 1}, of a loss of {loss:.6g}"
        elif math.isfinite(loss):
            what += f", above train.largest_loss {self._largest:g}"
        if self.scale:
            what += f", in fp16 with a loss scale of {self.scale.value:g} (bf16 and fp32 have a wider range)"
        worst, image, core = self._loss.worst()
        source = next((part.draw.source for part in parts if part.draw and part.image == image), None)
        path = self.paths[image if source is None else source] if self.paths else f"image {image}"
        place = f"rows {core.row.start}:{core.row.stop}, columns {core.col.start}:{core.col.stop} of {path}"
        place = max(self._mesh.communicator.gather_objects((worst, place)))[1]
        remedy = "lower optimizer.lr, set optimizer.clip_norm, or check these pixels"
        return mark_agreed(TiledsegError(f"{what}: {place} have the largest; the last checkpoint is kept: {remedy}"))

    def rounds(self, parts: Sequence[Part]) -> int:
        """Return how often `run` reads the samples of `parts`."""
        return self._passes.rounds(parts, self._loss.looks_first)

    def close(self) -> None:
        """Remove the hooks from the network, so that another stepper can use it."""
        self._reducer.close()
