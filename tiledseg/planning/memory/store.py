"""What tensors leave for, a local disk or a GPU's host's memory: what sending one away and fetching it takes, and what
stays of all that leave.

Copies run in threads while the network computes, so that a step does not wait for all of them.
"""

from __future__ import annotations

from tiledseg.planning.cost_model.profile import Profile
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


def speed_of(profile: Profile, precision: str) -> Speed:
    """At which a rank of a machine computes."""
    return Speed(profile.flops[precision], profile.bandwidth)


def disk_of(profile: Profile, precision: str) -> Store | None:
    """A rank's share of its host's disk; None where nobody knows one."""
    if profile.disk is None:
        return None
    written, read = (rate / profile.ranks_per_host for rate in profile.disk)
    return Store(written, read, speed_of(profile, precision))


def store_of(profile: Profile, precision: str) -> Store | None:
    """What a rank's tensors leave for: the disk where ranks compute on cores, else the memory of their host, to which
    each device has a way of its own; None where nobody knows it."""
    if not profile.has_devices:
        return disk_of(profile, precision)
    return profile.host_store and Store(*profile.host_store, speed_of(profile, precision))
