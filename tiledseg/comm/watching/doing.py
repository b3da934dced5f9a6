"""What this process is doing, in words, for the watch to tell the others when nothing moves any more.

One record a process, as a process does one thing: the training loop's words outside, the communication's inside.
Entering, leaving and `tick` count as progress. It costs about a microsecond, and words are put together only when they
are read. Threads that load data must not use it; autograd's may, since the thread that waits for it adds nothing.
Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from tiledseg.comm.watching.pace import Pace

T = TypeVar("T")

_stack: list[doing] = []
_changes = [0]
pace = Pace()


class doing:  # noqa: N801  (a context manager that reads as a word: with doing("step %d", step))
    """Inside, this process does what `words` says, with `values` put in by the % operator."""

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
    """Inside, this process can go on only once other ranks have done their part: it is not the one that is stuck."""

    __slots__ = ()
    waits = True


class stepping(doing):  # noqa: N801
    """Inside, this process does one of many steps that are alike: by their pace a later one stands still."""

    __slots__ = ()

    def __enter__(self) -> None:
        super().__enter__()
        pace.begin()

    def __exit__(self, *error: object) -> None:
        pace.end()
        super().__exit__(*error)


class reading(doing):  # noqa: N801
    """Inside, this process waits for files, which no step before tells anything of."""

    __slots__ = ()

    def __enter__(self) -> None:
        super().__enter__()
        pace.pause()

    def __exit__(self, *error: object) -> None:
        pace.go_on()
        super().__exit__(*error)


def tick() -> None:
    """Counts as progress within what this process is doing: one more block of many."""
    _changes[0] += 1
    pace.tick()


def ticking(items: Iterable[T]) -> Iterator[T]:
    """`items`, each of them a tick."""
    for item in items:
        tick()
        yield item


def changes() -> int:
    """How often the record has changed: no progress where it stays."""
    return _changes[0]


def current() -> tuple[str, bool]:
    """What this process is doing, from the outside in, and whether it waits for other ranks."""
    stack = list(_stack)
    words = ", ".join(item.words % item.values if item.values else item.words for item in stack)
    return words or "its own work", bool(stack) and stack[-1].waits
