"""A forward pass that is made twice moves running statistics once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def still_statistics(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Norms of `modules`, and of what is in them, use the batch's statistics as before, and keep the running ones."""
    tracking = [m for module in modules for m in module.modules() if getattr(m, "track_running_stats", False)]
    for module in tracking:
        module.track_running_stats = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in tracking:
            module.track_running_stats = True  # type: ignore[assignment]
