"""What a node finds out once, and a second run of it takes as found: statistics, draws, halos that have arrived.

So the second run measures nothing, draws nothing and sends nothing: it gives the same bits, on one rank alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

Found = TypeVar("Found")


class Notes:
    """In the order in which they were found."""

    def __init__(self) -> None:
        self._found: list[Any] = []
        self._next: int | None = None  # while they are read

    @contextmanager
    def taken(self) -> Iterator[None]:
        """What is found meanwhile is written down."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)

    @contextmanager
    def read(self) -> Iterator[None]:
        """What has been found is taken from here, from the beginning."""
        token, self._next = _CURRENT.set(self), 0
        try:
            yield
        finally:
            _CURRENT.reset(token)
            self._next = None

    @property
    def is_read(self) -> bool:
        return self._next is not None

    def add(self, found: Any) -> None:
        self._found.append(found)

    def next(self) -> Any:
        assert self._next is not None, "nobody reads these notes"
        self._next += 1
        return self._found[self._next - 1]


_CURRENT: ContextVar[Notes | None] = ContextVar("notes", default=None)


def current() -> Notes | None:
    """The notes that are taken or read now."""
    return _CURRENT.get()


def noted(find: Callable[[], Found]) -> Found:
    """What `find` finds, or what it found in the first run of the node."""
    notes = _CURRENT.get()
    if notes is None:
        return find()
    if notes.is_read:
        found: Found = notes.next()
        return found
    found = find()
    notes.add(found)
    return found
