"""The way of a storage's bytes out of memory and back: the ledger needs no other view of disks, threads and devices.

A store's places are slots of whole pages. A slot goes to the lowest place that holds it, so that a store whose slots
come and go in the same order at every step stays as long as it was at the first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from tiledseg.errors import MemoryLimitError

HOST = "host"
"""The store that is the host's memory; any other is a folder."""
PAGE = 4096
"""Bytes of a page."""
TENSOR = 32 << 20
"""Bytes of the tensors by which a store is measured."""


class Copying(Protocol):
    """A copy that runs. The host waits for it, or a device whose host goes on."""

    def done(self) -> bool:
        """Return True once it has ended, well or not. Does not wait."""

    def wait(self) -> None:
        """Return when its result may be used. Raises the copy's error."""

    def stop(self) -> None:
        """Await its end; the result is unwanted, and both ends may be given to others from here on."""


class Slot(NamedTuple):
    """`size` bytes from `offset` on, which lies at a page's begin. The store holds whole pages, at least one."""

    offset: int
    size: int

    @property
    def stop(self) -> int:
        return self.offset + max(1, -(-self.size // PAGE)) * PAGE


class SlotTable:
    """The slots of one store, `name` in errors, of at most `limit` bytes; `end`: up to the highest one so far."""

    def __init__(self, name: str, limit: int) -> None:
        self._name, self._limit, self.end = name, limit, 0
        self._slots: list[Slot] = []  # in the order of their places

    @property
    def taken(self) -> int:
        """The bytes in slots."""
        return sum(slot.stop - slot.offset for slot in self._slots)

    def take(self, size: int) -> Slot:
        """Return the lowest slot of `size` bytes that is free. Raises MemoryLimitError beyond the limit."""
        begin = 0
        for number, (offset, stop) in enumerate([*((s.offset, s.stop) for s in self._slots), (self._limit, 0)]):
            slot = Slot(begin, size)
            if slot.stop <= offset:
                self._slots.insert(number, slot)
                self.end = max(self.end, slot.stop)
                return slot
            begin = stop or begin
        raise MemoryLimitError(
            f"{self._name} may have {self._limit} bytes, of which {self.taken} are taken, but {size} more are asked "
            f"for; give it at least {Slot(begin, size).stop}, or keep more in memory"
        )

    def give_back(self, slot: Slot) -> None:
        """Free a slot that has been taken."""
        self._slots.remove(slot)


class Sent(NamedTuple):
    """Bytes outside, in `slot`."""

    slot: Slot
    copying: Copying


class Brought(NamedTuple):
    """All bytes of a storage, uint8, in a storage of its own, whole once `copying` has ended."""

    flat_P: torch.Tensor
    copying: Copying


class Mover:
    """A store of a device's tensors, and the copies to it and from it, from any thread. A store gives the methods with
    an underscore; this one moves nothing, for a ledger that only counts what is held."""

    def __init__(self, name: str = "no store", limit: int = 0, device: torch.device | None = None) -> None:
        self.slots, self.device = SlotTable(name, limit), device or torch.device("cpu")
        self._lock = threading.Lock()

    def takes(self, tensor: torch.Tensor) -> bool:
        """Return True if tensors of this device can be moved at all."""
        return tensor.device == self.device

    def send(self, flat_P: torch.Tensor) -> Sent:
        """Begin to copy all bytes of a storage out. They stay as they are, and are held, until that has ended.

        Raises MemoryLimitError where there is no room. Waiting raises WriteError where a disk does not take them.
        """
        with self._lock:
            slot = self.slots.take(flat_P.numel())
        try:
            return Sent(slot, self._out(flat_P, slot))
        except MemoryLimitError:
            self._give_back(slot)
            raise

    def bring(self, sent: Sent) -> Brought:
        """Begin to copy all bytes back to memory of their own, after the copy out has ended, whose error waiting
        raises."""
        flat_P = torch.empty(sent.slot.size, dtype=torch.uint8, device=self.device)
        return Brought(flat_P, self._back(sent, flat_P))

    def drop(self, sent: Sent) -> None:
        """Free the place outside. A copy to it that runs is awaited, one that has not begun never will; copies from it
        must have ended."""
        sent.copying.stop()
        self._give_back(sent.slot)

    def _give_back(self, slot: Slot) -> None:
        with self._lock:
            self.slots.give_back(slot)

    def _out(self, flat_P: torch.Tensor, slot: Slot) -> Copying:
        raise AssertionError("nothing is to leave")

    def _back(self, sent: Sent, flat_P: torch.Tensor) -> Copying:
        raise AssertionError("nothing has left")

    def settle(self) -> None:
        """Return once no copy runs on a device."""

    def close(self) -> None:
        """Give all back. Nothing that was sent can be brought any more."""


@dataclass
class Figures:
    """The cost of moving. `bytes_out`, `bytes_in`: copied, or begun to be. `peak_bytes`: the most that autograd alone
    held in memory, prefetched bytes among it. `demanded`: storages that were used before their copy back had begun.
    `expected`: those that were prefetched."""

    bytes_out: int = 0
    bytes_in: int = 0
    peak_bytes: int = 0
    demanded: int = 0
    expected: int = 0


class StoreRates(NamedTuple):
    """Rates of a store, bytes a second."""

    written: float
    read: float


def store_rates(mover: Mover, size: int, tensor: int = TENSOR) -> StoreRates:
    """Measure a store by `size` bytes in tensors of `tensor` bytes, sent once before; then close it. Raises WriteError
    or MemoryLimitError where it has no room."""
    count, draw = max(1, size // tensor), torch.Generator(mover.device).manual_seed(0)

    def moved(begin: Callable[[Any], Any], items: Iterable[Any]) -> tuple[list[Any], float]:
        begun = time.perf_counter()
        there = [begin(item) for item in items]
        for each in there:
            each.copying.wait()
        mover.settle()
        return there, count * tensor / (time.perf_counter() - begun)

    try:
        data_P = torch.randint(0, 256, (tensor,), dtype=torch.uint8, device=mover.device, generator=draw)
        for sent in moved(mover.send, [data_P] * count)[0]:
            mover.drop(sent)
        there, written = moved(mover.send, [data_P] * count)
        return StoreRates(written, moved(mover.bring, there)[1])
    finally:
        mover.close()
