"""The early end of a run: by a signal, or as the job's time ends, between steps and with a checkpoint; and the best
validation by a named score, for a better one of which a run has waited long enough."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tiledseg.checkpoint.saved_state import Best
from tiledseg.config.train import TrainConfig
from tiledseg.config.words import LOSS, class_of
from tiledseg.errors import ConfigError
from tiledseg.raster.labels.label_map import LabelMap
from tiledseg.raster.samples.sampling import Position
from tiledseg.system.signals import STOPPED, is_met

if TYPE_CHECKING:
    from tiledseg.training.validation import Findings

EXIT_CODE = STOPPED

# When the job ends, as Unix seconds: what the batch scripts of `jobs/` say, and what newer Slurm says by itself.
_END_TIMES = ("TILEDSEG_END_TIME", "SLURM_JOB_END_TIME")
_SPARE = 30.0  # seconds for the last checkpoint's way to the disk and the end of all processes


def end_of_job(environ: Mapping[str, str]) -> float | None:
    """Return the end of the job's time in Unix seconds; None if it is not set. Raises ConfigError for no number."""
    for name in _END_TIMES:
        if said := environ.get(name):
            if said.isdecimal():
                return float(said)
            raise ConfigError(f"{name} is '{said}'; give Unix seconds, as date +%s prints them, or unset it")
    return None


class StopFlag:
    """A flag that the signals of `system.signals` set, where they are deferred; no handler does more. So does the job's
    `end` (Unix seconds), once nearer than two of the longest steps so far, with checkpoint and validation.

    A run reads it at the beginning of each step. Ranks may see it at different steps: the reader adds up what all see.
    """

    def __init__(self, end: float | None = None) -> None:
        self.end, self._before, self._longest = end, time.time(), 0.0

    @property
    def is_set(self) -> bool:
        now = time.time()
        self._before, self._longest = now, max(self._longest, now - self._before)
        return is_met() or (self.end is not None and now + 2 * self._longest + _SPARE > self.end)


ROUNDING = 1e-9
"""A share of a loss, far above what sums in float64 differ by and below what anybody trains for."""


def score_class(score: str, label_map: LabelMap, validates: bool) -> int | None:
    """Return the class whose IoU `train.best` is; None if it is another score. Raises ConfigError for a score that no
    validation finds, or of a class that there is not."""
    if score != "none" and not validates:
        raise ConfigError(
            f"train.best is {score}, but nothing is validated on; give data.val_images, data.split, or a manifest with "
            "a column split"
        )
    name = class_of(score)
    if name is None:
        return None
    if name not in label_map.numbers:
        names = ", ".join(record.name for record in label_map.classes)
        raise ConfigError(f"train.best is {score}, but no class is '{name}'; give one of {names}, or its number")
    return label_map.numbers[name]


class BestSoFar:
    """The best validation of a run by `train.best`; `number`: of the class that it names; `best`: so far."""

    def __init__(self, train: TrainConfig, number: int | None, best: Best | None) -> None:
        self._train, self._number, self.best = train, number, best

    def takes(self, findings: Findings, step: int, epoch: int) -> bool:
        """Return True if a validation is better than the best so far, and keep it as the best."""
        score = self._train.best
        value = None if score == "none" else self._value(findings, score)
        if value is None:
            return False
        if self.best is not None:  # a loss is better by more than the order of its sum may change, on any ranks alike
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
        """Return the score; None if it has no meaning."""
        from tiledseg.execution.scores import scores

        if score == LOSS:
            return findings.loss
        of_matrix = scores(findings.matrix_KK)
        value = float(of_matrix.iou[self._number] if self._number is not None else getattr(of_matrix, score))
        return None if math.isnan(value) else value
