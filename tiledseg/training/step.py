"""One optimizer step over the tiles of all ranks: sums of losses and weights, one all-reduce, one update."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from tiledseg.checkpoint.saved_state import LossScale
from tiledseg.comm.doing import waiting
from tiledseg.comm.mesh import Axes, Mesh
from tiledseg.execution.halo_modes import Part
from tiledseg.execution.memory import peak_memory, reset_peak
from tiledseg.execution.part_passes import Passes, TimedSamples
from tiledseg.gradients import GradientReducer, clip_gradients, scale_gradients
from tiledseg.memory.device import Stopwatch
from tiledseg.models.dropout import DropoutKey
from tiledseg.raster.samples.dataset import Sample
from tiledseg.training.objective import Objective
from tiledseg.training.step_loss import StepLoss, diverged


class RankFigures(NamedTuple):
    """The figures of one rank in a step. All are summed over ranks except `memory_bytes` and `seconds`. `loss`,
    `weight`: sums over its pieces; `gradient`: sum of all numbers of the reduced gradient. `busy_seconds` and the
    fields after it are those of its pipeline stage."""

    loss: float
    weight: float
    gradient: float
    pixels: float
    stops: float
    data_seconds: float
    communication_seconds: float
    halo_bytes: float
    halo_messages: float
    memory_bytes: float
    busy_seconds: float = 0.0
    seconds: float = 0.0
    stage_bytes: float = 0.0
    stage_messages: float = 0.0


class Stepper:
    """A runner of optimizer steps. The result of a step depends on its tiles, not on the ranks that compute them.

    `seed`: of dropout. `scale`: of the loss, in fp16; the same on every rank, because it depends on sums over all
    ranks. `clip_norm`: largest norm of the gradient (0: any). `wide_sums`: gradients are summed in float64.
    `largest_loss`: a larger loss ends the run (None: any finite loss is accepted).
    """

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
        self._halos = axes.point_to_point.meter
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
        own = RankFigures(
            *(*own_sums, self._loss.pixels, stop, timed.seconds, communicating, halos.bytes, halos.messages),
            peak_memory(self._mesh.device),
            *(self._passes.figures() or ()),
        )
        every = torch.zeros(self._mesh.size, len(own), dtype=torch.float64)  # all-gather by one all-reduce on the host
        every[self._mesh.rank] = torch.tensor(own, dtype=torch.float64)
        self._mesh.communicator.all_reduce_sum(every).wait()
        each = [RankFigures(*row) for row in every.tolist()]
        sums = RankFigures(*map(sum, zip(*each, strict=True)))
        loss, factor = self._loss.of_step(sums.loss, sums.weight)
        finite = math.isfinite(sums.gradient)
        skipped = loss is not None and not finite and scale is not None and scale.value > 1
        if loss is not None:
            largest = self._largest
            whole = math.isfinite(loss) and (finite or skipped)
            if not whole or (largest is not None and loss > largest):
                raise diverged(step, loss, finite or skipped, largest, scale.value if scale else None)
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
            "pixels": int(sums.pixels),
            "seconds": seconds,
            "data_seconds": sums.data_seconds / self._mesh.size,
            "communication_seconds": sums.communication_seconds / self._mesh.size,
            "halo_bytes": int(sums.halo_bytes),
            "halo_messages": int(sums.halo_messages),
            "memory_bytes": int(max(figures.memory_bytes for figures in each)),
            "pixels_per_second": sums.pixels / seconds,
            **({"loss_scale": scale.value, "skipped": skipped} if scale else {}),
        }
        if (stages := self._axes.shape.stages) > 1:
            # `stage_seconds`: mean over a stage's ranks. `bubble_share`: share of the ranks' time spent waiting.
            ranks, longest = self._axes.shape.ranks, max(figures.seconds for figures in each)
            busy = [figures.busy_seconds for figures in each[:ranks]]
            figures |= {
                "pipeline_bytes": int(sums.stage_bytes),
                "pipeline_messages": int(sums.stage_messages),
                "stage_seconds": [sum(busy[stage::stages]) / (ranks // stages) for stage in range(stages)],
                "bubble_share": 1 - sum(busy) / (ranks * longest) if longest else 0.0,
            }
        return figures, sums.stops > 0

    def rounds(self, parts: Sequence[Part]) -> int:
        """Return how often `run` reads the samples of `parts`."""
        return self._passes.rounds(parts, self._loss.looks_first)

    def close(self) -> None:
        """Remove the hooks from the network, so that another stepper can use it."""
        self._reducer.close()
