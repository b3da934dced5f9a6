"""The display of progress for a user, on rank 0 only."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from tiledseg.system.console import say

if TYPE_CHECKING:
    from rich.progress import Progress

_QUIET_SECONDS = 10.0  # between two lines if the output is no terminal
T = TypeVar("T")


Shown = Callable[[Iterable[Any], int, str], Iterator[Any]]
"""A display of progress: a function that yields the items of a part of the work, so many in all, named by words."""


def unseen(items: Iterable[T], total: int, words: str) -> Iterator[T]:
    """Yield the items without a display, as on ranks other than 0."""
    return iter(items)


class StepProgress:
    """A bar with the time left on a terminal, else a line every ten seconds; a line a step at verbosity 2, nothing at
    0.

    `total` 0: there are only the parts shown by `part`.
    """

    def __init__(self, total: int, done: int, verbosity: int) -> None:
        self._total = total
        self._verbosity = verbosity
        self._said = self._begun = time.monotonic()
        self._first = done
        self._bar: Progress | None = None
        if verbosity == 1 and sys.stderr is not None and sys.stderr.isatty():
            from rich.console import Console  # slow to import
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
            self._bar = Progress(*columns, TimeRemainingColumn(), console=Console(file=sys.stderr))
            if total:
                self._task = self._bar.add_task("starting", total=total, completed=done)
            self._bar.start()

    def step(self, line: dict[str, Any]) -> None:
        loss = "-" if line["loss"] is None else f"{line['loss']:.4f}"
        self.advance(line["step"], f"epoch {line['epoch']} loss {loss} {line['pixels_per_second'] / 1e6:.2f} Mpixel/s")

    def advance(self, done: int, words: str) -> None:
        """Show that `done` of the total are done, with `words`."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=words)
        elif self._verbosity == 2 or (self._verbosity and time.monotonic() - self._said > _QUIET_SECONDS):
            self._said = time.monotonic()
            self.say(f"{done}/{self._total} {words}{self._left(done)}")

    def _left(self, done: int) -> str:
        """Return the time left in words, from the rate so far; empty before the first step and at the end."""
        here = done - self._first
        if here < 1 or done >= self._total:
            return ""
        seconds = (time.monotonic() - self._begun) / here * (self._total - done)
        return f", {duration(seconds)} left"

    def restart(self, done: int) -> None:
        """Measure the rate from now on, with `done` steps already done."""
        self._first, self._begun = done, time.monotonic()

    def part(self, items: Iterable[T], total: int, words: str) -> Iterator[T]:
        """Yield `items` under a bar of their own on a terminal; elsewhere show nothing."""
        if self._bar is None:
            yield from items
            return
        task = self._bar.add_task(words, total=total)
        try:
            for item in items:
                yield item
                self._bar.advance(task)
        finally:
            self._bar.remove_task(task)

    def say(self, words: str) -> None:
        """Print one line for the user, above the bar if there is one."""
        if self._verbosity == 0:
            return
        if self._bar is not None:
            self._bar.console.print(words, markup=False, highlight=False)
        else:
            say(words)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def duration(seconds: float) -> str:
    """Return a time in words: "90 s", "5 min", "2.5 h"."""
    minutes, hours = seconds / 60, seconds / 3600
    return f"{seconds:.0f} s" if seconds < 120 else f"{minutes:.0f} min" if minutes < 120 else f"{hours:.1f} h"
