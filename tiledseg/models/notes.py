"""Results of a node that a second run of it takes as they are: statistics, draws, halos that have arrived.

So the second run measures nothing, draws nothing and sends nothing: it gives the same bits, on one rank alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from torch import nn

Result = TypeVar("Result")


class Notes:
    """Results of one node, in the order in which they came."""

    def __init__(self) -> None:
        self._results: list[Any] = []
        self._next: int | None = None  # while they are read

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Write down the results that come meanwhile."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)

    @contextmanager
    def read(self) -> Iterator[None]:
        """Give the results, from the first one on, in the place of new ones."""
        self._next = 0
        try:
            with self.taken():
                yield
        finally:
            self._next = None

    @property
    def is_read(self) -> bool:
        return self._next is not None

    def add(self, result: Any) -> None:
        self._results.append(result)

    def next(self) -> Any:
        assert self._next is not None, "nobody reads these notes"
        self._next += 1
        return self._results[self._next - 1]


_CURRENT: ContextVar[Notes | None] = ContextVar("notes", default=None)


def current() -> Notes | None:
    """Return the notes that are taken or read now."""
    return _CURRENT.get()


def noted(compute: Callable[[], Result]) -> Result:
    """Return the result of `compute`, or that of the node's first run."""
    notes = _CURRENT.get()
    if notes is None:
        return compute()
    if notes.is_read:
        earlier: Result = notes.next()
        return earlier
    result = compute()
    notes.add(result)
    return result


@contextmanager
def still_statistics(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Keep the running statistics of norms in `modules` as they are: a forward pass that is made twice moves them once.
    The norms use the batch's statistics as before."""
    tracking = [m for module in modules for m in module.modules() if getattr(m, "track_running_stats", False)]
    for module in tracking:
        module.track_running_stats = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in tracking:
            module.track_running_stats = True  # type: ignore[assignment]
