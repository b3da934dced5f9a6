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
    """Results of one node, in the order in which they came; `unread`: those still to be taken, while they are read."""

    def __init__(self) -> None:
        self.results: list[Any] = []
        self.unread: Iterator[Any] | None = None

    @contextmanager
    def open(self, read: bool = False) -> Iterator[None]:
        """Write down the results that come meanwhile; with `read` give these, from the first one on, in the place of
        new ones."""
        token, self.unread = CURRENT.set(self), iter(self.results) if read else None
        try:
            yield
        finally:
            CURRENT.reset(token)
            self.unread = None


CURRENT: ContextVar[Notes | None] = ContextVar("notes", default=None)
"""The notes that are taken or read now."""


def noted(compute: Callable[[], Result]) -> Result:
    """Return the result of `compute`, or that of the node's first run."""
    notes = CURRENT.get()
    if notes is not None and notes.unread is not None:
        earlier: Result = next(notes.unread)
        return earlier
    result = compute()
    if notes is not None:
        notes.results.append(result)
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
