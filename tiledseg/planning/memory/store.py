"""The store of offloaded tensors, a local disk or a GPU's host's memory: its rates, and the memory that it takes.

Copies run in threads while the network computes, so that a step does not wait for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tiledseg.planning.cost_model.machine import ASSUMED, Machine
from tiledseg.planning.walk.items import Walk

STAYING = 3  # tensors as large as the largest that leaves: half of them on their way out, half on their way in
LEAST = 1 << 20  # bytes of the smallest tensor that is offloaded: of less, the calls would count
# Share of a copy's seconds that a step waits for: about the most measured (benchmarks/large_model_support).
WAITED = 0.35


@dataclass(frozen=True)
class Store:
    """A store of tensors. `written`, `read`: bytes a second of a rank beside its host's others. `machine`: the
    rank's speed."""

    written: float
    read: float
    machine: Machine

    def waited(self, written: float, read: float) -> float:
        """Return the seconds by which a step is longer for so many bytes each way."""
        return WAITED * (written / self.written + read / self.read)


ASSUMED_STORE = Store(2e9, 5e9, ASSUMED)  # a local NVMe disk as nodes of clusters have it


def disk_of(machine: Machine) -> Store | None:
    """Return a rank's share of its host's disk; None where it is not known."""
    if machine.disk is None:
        return None
    written, read = (rate / machine.ranks_per_host for rate in machine.disk)
    return Store(written, read, machine)


def store_of(machine: Machine) -> Store | None:
    """Return the store of a rank's tensors: the disk where ranks compute on cores, else the memory of their host. Each
    device has its own way to that memory. Return None where the store is not known."""
    if not machine.has_devices:
        return disk_of(machine)
    return machine.host_store and Store(*machine.host_store, machine)


def with_store(walk: Walk, store: Store) -> Walk:
    """Return the walk in which large tensors that the backward pass uses may be offloaded to `store`."""
    items = tuple(
        replace(item, offload=store.waited(item.bytes, item.bytes))
        if item.home is not None and item.used and item.bytes >= LEAST
        else item
        for item in walk.items
    )
    return replace(walk, items=items)
