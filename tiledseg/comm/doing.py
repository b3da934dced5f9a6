"""The record of this process's present work, which the watch prints if the job stands still.

Each process has one stack of words: the training loop's outside, the communication's inside. Entering, leaving and
`tick` count as progress. An entry costs about a microsecond; words are formatted only when they are read. Threads that
load data must not use the record. Autograd's threads may: the main thread waits for them. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TypeVar

T = TypeVar("T")

_RUNS = 6

_stack: list[doing] = []
_changes = [0]


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
    """Work that waits for other ranks: this process does not hold up the job."""

    __slots__ = ()
    waits = True


def tick() -> None:
    """Count one unit of progress within the present work, such as one block of many."""
    _changes[0] += 1


def ticking(items: Iterable[T]) -> Iterator[T]:
    """Yield `items`, each of them a tick."""
    for item in items:
        tick()
        yield item


def changes() -> int:
    """Return the number of changes of the record. It stays the same while there is no progress."""
    return _changes[0]


def current() -> tuple[str, bool]:
    """Return the words of the present work, outermost first, and True if it waits for other ranks."""
    stack = list(_stack)
    words = ", ".join(item.words % item.values if item.values else item.words for item in stack)
    return words or "its own work", bool(stack) and stack[-1].waits


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3", "ranks 0-2, 5", or "ranks 0, 2, 4, 6, 8, 10 and 594 more" for `ranks`, which ascend and are not
    empty."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    shown = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs[:_RUNS])
    left = sum(map(len, runs[_RUNS:]))
    return f"ranks {shown} and {left} more" if left else f"ranks {shown}"
