"""The words for what this process is doing, which the watch shows to the others when nothing moves any more.

There is one record a process: the training loop's words outside, the communication's inside. Entering, leaving and
`tick` count as progress. It costs about a microsecond, and words are put together only when they are read. Threads that
load data must not use it. Autograd's may, since the thread that waits for it adds nothing. Standard library only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
FIRST = 2  # steps that are not measured: memory is touched, connections are made, kernels are chosen
ENOUGH = 10  # steps after which the pace is known


class Pace:
    """The longest time without progress inside the steps of a run, without pauses. A later step that takes many times
    as long stands still."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.forget()

    def forget(self) -> None:
        """Begin anew, for another run."""
        self._steps, self._longest, self._inside = 0, 0.0, False
        self._last: float | None = None  # the time of the last progress, while it is measured

    def begin(self) -> None:
        self._inside, self._last = True, self._clock()

    def end(self) -> None:
        self.tick()
        self._steps += 1
        self._inside, self._last = False, None

    def pause(self) -> None:
        self.tick()
        self._last = None

    def go_on(self) -> None:
        if self._inside:
            self._last = self._clock()

    def tick(self) -> None:
        """Count progress."""
        last = self._last
        if last is not None:
            self._last = now = self._clock()
            if self._steps >= FIRST and now - last > self._longest:
                self._longest = now - last

    def known(self) -> float | None:
        """Return the longest time in seconds; None outside steps, in pauses, and before enough steps."""
        return self._longest if self._last is not None and self._steps >= ENOUGH else None


_stack: list[doing] = []
_changes = [0]
pace = Pace()


class doing:  # noqa: N801  (a context manager that reads as a word: with doing("step %d", step))
    """The work `words`, with `values` put in by the % operator, while the block runs."""

    __slots__ = ("values", "words")
    waits = False

    def __init__(self, words: str, *values: object) -> None:
        self.words = words
        self.values = values

    def __enter__(self) -> None:
        tick()
        _stack.append(self)

    def __exit__(self, *error: object) -> None:
        tick()
        _stack.remove(self)


class waiting(doing):  # noqa: N801
    """Work that goes on only once other ranks have done their part: this process is not the one that is stuck."""

    __slots__ = ()
    waits = True


class stepping(doing):  # noqa: N801
    """One of many steps that are alike: by their pace a later one stands still."""

    __slots__ = ()

    def __enter__(self) -> None:
        super().__enter__()
        pace.begin()

    def __exit__(self, *error: object) -> None:
        pace.end()
        super().__exit__(*error)


class reading(doing):  # noqa: N801
    """A wait for files, whose time does not count as that of a step."""

    __slots__ = ()

    def __enter__(self) -> None:
        super().__enter__()
        pace.pause()

    def __exit__(self, *error: object) -> None:
        pace.go_on()
        super().__exit__(*error)


def tick() -> None:
    """Count as progress within the present work: one more block of many."""
    _changes[0] += 1
    pace.tick()


def ticking(items: Iterable[T]) -> Iterator[T]:
    """Yield `items`, each of them a tick."""
    for item in items:
        tick()
        yield item


def changes() -> int:
    """Return how often the record has changed: no progress where it stays."""
    return _changes[0]


def current() -> tuple[str, bool]:
    """Return the words of the present work, from the outside in, and True if it waits for other ranks."""
    stack = list(_stack)
    words = ", ".join(item.words % item.values if item.values else item.words for item in stack)
    return words or "its own work", bool(stack) and stack[-1].waits
