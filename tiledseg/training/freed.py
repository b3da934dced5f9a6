"""What becomes of the host's freed memory in a run under a budget: as far as that has no room for it, it goes back to
the system, which clears each page before it gives it out again."""

from __future__ import annotations

import os
import resource
import time
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType

import torch

from tiledseg.planning.run.plan import RunPlan
from tiledseg.planning.run.question import RunQuestion
from tiledseg.system.freed_memory import keep_no_more
from tiledseg.system.held_memory import held_below, own_bytes

WORTH_SAYING = 0.1  # of the run's time


class Freed(AbstractContextManager[None]):
    """While a run trains. A rank holds at most `budget` bytes more than when this was made, where tensors are rebuilt;
    what its tensors hold alone, where blocks are taken: they are for memory that is shorter still."""

    def __init__(self, budget: int, in_blocks: bool) -> None:
        self._budget, self._in_blocks = budget, in_blocks
        self._most = own_bytes() + budget
        self._stack = ExitStack()
        if in_blocks:
            keep_no_more(os.environ)

    @classmethod
    def by(cls, question: RunQuestion, plan: RunPlan, device: torch.device) -> Freed | None:
        """None where all of it is kept: of a budget that nothing is rebuilt for, and no blocks are taken."""
        demanded = plan.rebuilt is not None or plan.blocks is not None
        if not (question.budgeted and demanded and device.type == "cpu"):
            return None
        return cls(question.memory, plan.blocks is not None)

    @property
    def in_words(self) -> str:
        """For the user."""
        what = "" if self._in_blocks else f", as far as {self._budget / 2**20:.1f} MiB have no room for it"
        return f"freed memory goes back to the system{what}"

    def __enter__(self) -> None:
        if not self._in_blocks:
            self._stack.enter_context(held_below(self._most, os.environ))
        self._pages, self._begun = pages_taken(), time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()
        self._pages, self._seconds = pages_taken() - self._pages, time.perf_counter() - self._begun

    def what_it_took(self) -> str | None:
        """For the user, after the run: see `clearing_in_words`."""
        from tiledseg.training.calibration.movement import first_touch  # and all that measures, for this alone

        return clearing_in_words(self._pages, first_touch(), self._seconds)


def pages_taken() -> int:
    """By this process, so far: each has been cleared."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def clearing_in_words(pages: int, seconds_a_byte: float, seconds: float) -> str | None:
    """For the user, of a run of so many seconds; None where it is little."""
    cleared = pages * os.sysconf("SC_PAGE_SIZE") * seconds_a_byte
    if cleared < WORTH_SAYING * seconds:
        return None
    return (
        f"about {cleared:.1f} of {seconds:.1f} s went into clearing memory that had been given back: a larger "
        "memory.budget gives less back, and one by which nothing is computed once more and no blocks are taken nothing"
    )
