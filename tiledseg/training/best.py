"""The best validation of a run by a named score, and when a run has waited long enough for a better one."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tiledseg.checkpoint.saved_state import Best
from tiledseg.config.words import LOSS, class_of
from tiledseg.errors import ConfigError
from tiledseg.raster.labels.label_map import LabelMap
from tiledseg.raster.samples.sampling import Position
from tiledseg.training.recipe import Judge

if TYPE_CHECKING:
    from tiledseg.training.validation import Findings

ROUNDING = 1e-9
"""A share of a loss, far above what sums in float64 differ by and below what anybody trains for."""


def judge_of(score: str, patience: int | None, label_map: LabelMap, validates: bool) -> Judge:
    """Raises ConfigError for a score that nothing would find out, or of a class that there is not."""
    if score != "none" and not validates:
        raise ConfigError(
            f"train.best is {score}, but nothing is validated on; give data.val_images, data.split, or a manifest with "
            "a column split"
        )
    name = class_of(score)
    if score == "none" or name is None:
        return Judge(None if score == "none" else score, None, patience)
    known = {str(k): k for k in range(label_map.count)}
    known |= {record.name: k for k, record in enumerate(label_map.classes)}
    if name not in known:
        names = ", ".join(record.name for record in label_map.classes)
        raise ConfigError(f"train.best is {score}, but no class is '{name}'; give one of {names}, or its number")
    return Judge(score, known[name], patience)


def is_better(score: str, value: float, best: float) -> bool:
    """Larger; of the loss smaller, by more than the order in which ranks add it up may change: scores are made of whole
    numbers, which add up exactly. So the best epoch, and the last one, are the same on any number of ranks."""
    return value < best - ROUNDING * abs(best) if score == LOSS else value > best


class BestSoFar:
    """The best of a run that validates every so many epochs; `best`: of the part of it that is done."""

    def __init__(self, judge: Judge, best: Best | None, validate_every: int) -> None:
        self._judge, self._best, self._every = judge, best, validate_every

    @property
    def step(self) -> int | None:
        return self._best.step if self._best else None

    def record(self) -> dict[str, Any] | None:
        """As JSON has it."""
        return asdict(self._best) if self._best else None

    def takes(self, found: Findings, step: int, epoch: int) -> bool:
        """Whether a validation is better than the best so far: it is the best then."""
        value = self._value(found)
        if self._judge.score is None or value is None:
            return False
        if self._best is not None and not is_better(self._judge.score, value, self._best.value):
            return False
        self._best = Best(self._judge.score, value, step, epoch)
        return True

    def gives_up(self, position: Position) -> bool:
        """Whether a run that stands there has just validated, and its best one is `patience` epochs ago."""
        patience, epoch = self._judge.patience, position.epoch - 1
        if patience is None or self._best is None or position.step or position.epoch % self._every:
            return False
        return epoch - self._best.epoch >= patience

    def _value(self, found: Findings) -> float | None:
        """The score; None where it has no meaning."""
        score, number = self._judge.score, self._judge.number
        if score is None or score == LOSS:
            return found.loss
        from tiledseg.execution.scores.metrics import scores

        of_matrix = scores(found.matrix_KK)
        value = float(of_matrix.iou[number] if number is not None else getattr(of_matrix, score))
        return None if math.isnan(value) else value
