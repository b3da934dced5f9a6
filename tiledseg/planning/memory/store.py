"""A local disk that tensors leave for: what sending one away and fetching it takes, and what stays of all that leave.

Copies run in threads while the network computes, so that a step does not wait for all of them.
"""

from __future__ import annotations

from tiledseg.planning.walk.network_walk import Speed
from tiledseg.records import dataclass

STAYING = 3
"""Tensors as large as the largest that leaves: half of them on their way out, half on their way in."""

LEAST = 1 << 20
"""Bytes below which the plan has no tensor leave: what that costs besides its bytes would count."""

WAITED = 0.35
"""Share of a copy's seconds that a step waits for: about the most that was measured (`docs/large-models.md`)."""


@dataclass(frozen=True)
class Store:
    """`written`, `read`: bytes a second of one rank, beside the others of its host; `speed`: at which it computes."""

    written: float
    read: float
    speed: Speed

    def seconds(self, size: int) -> float:
        """By which a step is longer for so many bytes that leave and come back."""
        return self.waited(size, size)

    def waited(self, written: float, read: float) -> float:
        """By which a step is longer for so many bytes each way."""
        return WAITED * (written / self.written + read / self.read)


ASSUMED_STORE = Store(2e9, 5e9, Speed())
"""Where nobody has measured one: a local NVMe disk as nodes of clusters have it."""
