"""Progress for a person at a terminal, on rank 0 only."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from tiledseg.console import say

if TYPE_CHECKING:
    from rich.progress import Progress

_QUIET_SECONDS = 10.0  # between lines where the output is a file, not a terminal


class StepProgress:
    """A bar on a terminal; a line now and then elsewhere; a line a step at verbosity 2; nothing at 0."""

    def __init__(self, total: int, done: int, verbosity: int) -> None:
        self._total = total
        self._verbosity = verbosity
        self._said = time.monotonic()
        self._bar: Progress | None = None
        if verbosity == 1 and sys.stderr is not None and sys.stderr.isatty():
            self._bar = _bar()
            self._task = self._bar.add_task("starting", total=total, completed=done)
            self._bar.start()

    def step(self, line: dict[str, Any]) -> None:
        """Show one line of the metrics."""
        loss = "-" if line["loss"] is None else f"{line['loss']:.4f}"
        self.advance(line["step"], f"epoch {line['epoch']} loss {loss} {line['pixels_per_second'] / 1e6:.2f} Mpixel/s")

    def advance(self, done: int, words: str) -> None:
        """`done` of the total are behind us; `words` say what and how."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=words)
        elif self._verbosity == 2 or (self._verbosity and time.monotonic() - self._said > _QUIET_SECONDS):
            self._said = time.monotonic()
            self.say(f"{done}/{self._total} {words}")

    def say(self, words: str) -> None:
        """One line for the person, whatever shows progress."""
        if self._verbosity == 0:
            return
        if self._bar is not None:
            self._bar.console.print(words, markup=False, highlight=False)
        else:
            say(words)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar() -> Progress:
    from rich.console import Console  # slow to import
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    return Progress(*columns, TimeRemainingColumn(), console=Console(file=sys.stderr))
