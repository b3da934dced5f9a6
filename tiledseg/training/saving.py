"""A run's checkpoints over stages; the early end of a run; its best validation."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from tiledseg.checkpoint.folder import Contents
from tiledseg.checkpoint.saved_state import Best
from tiledseg.comm.mesh import Axes
from tiledseg.comm.point_to_point import Message
from tiledseg.config.train import TrainConfig
from tiledseg.config.words import LOSS, class_of
from tiledseg.errors import ConfigError
from tiledseg.raster.labels.label_map import LabelMap
from tiledseg.raster.samples.sampling import Position
from tiledseg.system.signals import is_met

if TYPE_CHECKING:
    from tiledseg.training.validation import Findings


def collect(own: Contents, axes: Axes) -> Contents | None:
    """Return the contents of all stages on the rank of stage 0; None on the others. Collective over a pipeline.

    No deadlock: stage 0 receives tensor by tensor in the order of stages and names, which all stages know, and the
    other stages only send, in that order.
    """
    if axes.shape.stages == 1 or axes.position is None:
        return own
    named = {(file, name): tensor for file, tensors in own.items() for name, tensor in tensors.items()}
    heads = axes.pipeline.gather_objects([(key, tensor.shape, tensor.dtype) for key, tensor in named.items()])
    if axes.position.stage > 0:
        for tensor in named.values():
            axes.stage_messages.start([Message(axes.rank_of_stage(0), tensor)], []).wait()
        return None
    for stage, theirs in enumerate(heads[1:], start=1):
        for key, shape, dtype in theirs:
            named[key] = torch.empty(shape, dtype=dtype)
            axes.stage_messages.start([], [Message(axes.rank_of_stage(stage), named[key])]).wait()
    whole: Contents = {file: {} for file in own}
    for (file, name), tensor in named.items():
        whole.setdefault(file, {})[name] = tensor
    return whole


# The job's end in Unix seconds: set by our batch scripts, and by newer Slurm.
_END_TIMES = ("TILEDSEG_END_TIME", "SLURM_JOB_END_TIME")
_SPARE = 30.0  # seconds to write the last checkpoint and end all processes


def end_of_job(environ: Mapping[str, str]) -> float | None:
    """Return the job's end in Unix seconds; None if it is not set. Raises ConfigError if it is no number."""
    for name in _END_TIMES:
        if said := environ.get(name):
            if said.isdecimal():
                return float(said)
            raise ConfigError(f"{name} is '{said}'; give Unix seconds, as date +%s prints them, or unset it")
    return None


class StopFlag:
    """A flag that asks the run to stop: set by a deferred signal (`system.signals`), or when the job's `end` (Unix
    seconds) is nearer than two of the longest steps so far. A run reads it once a step; the time of a step includes its
    checkpoint and validation. Ranks may see it set at different steps: the step sums the flags of all ranks."""

    def __init__(self, end: float | None = None) -> None:
        self.end, self._before, self._longest = end, time.time(), 0.0

    @property
    def is_set(self) -> bool:
        now = time.time()
        self._before, self._longest = now, max(self._longest, now - self._before)
        return is_met() or (self.end is not None and now + 2 * self._longest + _SPARE > self.end)


ROUNDING = 1e-9
"""Relative difference of two losses below which they count as equal: sums in float64 depend on their order."""


def check_best(score: str, label_map: LabelMap, validates: bool) -> None:
    """Raise ConfigError for a score of `train.best` without validation data, or of an unknown class."""
    if score != "none" and not validates:
        raise ConfigError(
            f"train.best is {score}, but nothing is validated on; give data.val_images, data.split, or a manifest with "
            "a column split"
        )
    name = class_of(score)
    if name is not None and name not in label_map.numbers:
        names = ", ".join(record.name for record in label_map.classes)
        raise ConfigError(f"train.best is {score}, but no class is '{name}'; give one of {names}, or its number")


class BestSoFar:
    """The best validation of a run by `train.best`, and the `best` so far."""

    def __init__(self, train: TrainConfig, label_map: LabelMap, best: Best | None) -> None:
        name = class_of(train.best)
        self._train, self._number, self.best = train, None if name is None else label_map.numbers[name], best

    def takes(self, findings: Findings, step: int, epoch: int) -> bool:
        """Return True and keep the validation as the best if it is better than the best so far."""
        score = self._train.best
        value = None if score == "none" else self._value(findings, score)
        if value is None:
            return False
        if self.best is not None:  # all ranks decide alike
            limit = self.best.value - ROUNDING * abs(self.best.value)
            if value >= limit if score == LOSS else value <= self.best.value:
                return False
        self.best = Best(score, value, step, epoch)
        return True

    def gives_up(self, position: Position) -> bool:
        """Return True at an epoch's end if the best validation is `train.early_stop` epochs ago."""
        patience, epoch = self._train.early_stop, position.epoch - 1
        if patience is None or self.best is None or position.step or position.epoch % self._train.validate_every:
            return False
        return epoch - self.best.epoch >= patience

    def _value(self, findings: Findings, score: str) -> float | None:
        """Return the value of the score; None if it is undefined."""
        from tiledseg.execution.scores import scores

        if score == LOSS:
            return findings.loss
        of_matrix = scores(findings.matrix_KK)
        value = float(of_matrix.iou[self._number] if self._number is not None else getattr(of_matrix, score))
        return None if math.isnan(value) else value
