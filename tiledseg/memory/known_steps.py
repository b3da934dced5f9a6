"""Steps that have been seen, each with its plan, and which of them the step that runs now goes on as."""

from __future__ import annotations

from typing import NamedTuple

from tiledseg.memory.plan import StepPlan, peak, plan_step
from tiledseg.memory.timeline import Record, Sign

_MOST = 16  # kinds of steps that are remembered: of a loop with several losses, or of tiles of other shapes


class KnownStep(NamedTuple):
    record: Record
    plan: StepPlan


class KnownSteps:
    """Remembers steps; the latest that fits is expected to come again."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._known: list[KnownStep] = []
        self._fitting: list[KnownStep] = []

    def learn(self, record: Record) -> None:
        """A step has ended. One that has been seen becomes the latest; another is planned."""
        same = next((known for known in self._known if known.record.same_as(record)), None)
        if same is not None:
            self._known.remove(same)
        self._known.append(same or KnownStep(record, plan_step(record.lives, self._budget)))
        del self._known[:-_MOST]

    @property
    def last_peak(self) -> int:
        """The most bytes that autograd alone would hold at once in the latest step, had nothing left; 0 before any."""
        return peak(self._known[-1].record.lives, frozenset()) if self._known else 0

    def begin(self) -> None:
        self._fitting = list(self._known)

    def saw(self, at: int, sign: Sign) -> None:
        """The step saves this as its save number `at`."""
        self._fitting = [k for k in self._fitting if at < len(k.record.signs) and k.record.signs[at] == sign]

    @property
    def plan(self) -> StepPlan | None:
        """Of the step that runs, so far; None where it goes on as none before."""
        return self._fitting[-1].plan if self._fitting else None
