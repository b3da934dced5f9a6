"""The way of a storage's bytes out of memory and back: the ledger needs no other view of disks, threads and devices.

A store's places are slots of whole pages. A slot goes to the lowest place that holds it, so that a store whose slots
come and go in the same order at every step stays as long as it was at the first.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

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
    """The slots of one store, `name` in errors, of at most `limit` bytes. Its owner keeps other threads out."""

    def __init__(self, name: str, limit: int) -> None:
        self._name, self._limit = name, limit
        self._gaps = [(0, limit)]  # (begin, stop), in order, none touching another
        self.end = self.taken = 0  # bytes up to the highest slot so far, and in slots

    def take(self, size: int) -> Slot:
        """Return the lowest slot of `size` bytes that is free. Raises MemoryLimitError beyond the limit."""
        for number, (begin, stop) in enumerate(self._gaps):
            slot = Slot(begin, size)
            if slot.stop <= stop:
                self._gaps[number : number + 1] = [(slot.stop, stop)] if slot.stop < stop else []
                self.end, self.taken = max(self.end, slot.stop), self.taken + slot.stop - begin
                return slot
        end = self._gaps[-1][0] if self._gaps and self._gaps[-1][1] == self._limit else self._limit
        raise MemoryLimitError(
            f"{self._name} may have {self._limit} bytes, of which {self.taken} are taken, but {size} more are asked "
            f"for; give it at least {Slot(end, size).stop}, or keep more in memory"
        )

    def give_back(self, slot: Slot) -> None:
        """Free a slot that has been taken."""
        self.taken -= slot.stop - slot.offset
        joined: list[tuple[int, int]] = []
        for begin, stop in sorted([*self._gaps, (slot.offset, slot.stop)]):
            if joined and joined[-1][1] == begin:
                begin = joined.pop()[0]
            assert not joined or joined[-1][1] < begin, f"{slot} is given back, but was not taken"
            joined.append((begin, stop))
        self._gaps = joined


class Sent(NamedTuple):
    """Bytes outside, in `slot`."""

    slot: Slot
    copying: Copying


class Brought(NamedTuple):
    """All bytes of a storage, uint8, in a storage of its own, whole once `copying` has ended."""

    flat_P: torch.Tensor
    copying: Copying


class StoreRates(NamedTuple):
    """Rates of a store, bytes a second."""

    written: float
    read: float


class Mover:
    """A store and the copies to it and from it. This one moves nothing, for a ledger that only counts what is held."""

    device = torch.device("cpu")
    """The device of the tensors."""

    def takes(self, tensor: torch.Tensor) -> bool:
        """Return True if tensors of this kind and device can be moved at all."""
        return True

    def send(self, flat_P: torch.Tensor) -> Sent:
        """Begin to copy all bytes of a storage out. They stay as they are, and are held, until that has ended.

        Raises MemoryLimitError or WriteError where there is no room.
        """
        raise AssertionError("nothing is to leave")

    def bring(self, sent: Sent) -> Brought:
        """Begin to copy all bytes back to memory of their own, after the copy out has ended."""
        raise AssertionError("nothing has left")

    def drop(self, sent: Sent) -> None:
        """Free the place outside; a copy to it is stopped."""

    def stood_still(self) -> float:
        """Return the seconds, since the last call, for which a device has waited for copies while the host went on."""
        return 0.0

    def settle(self) -> None:
        """Return once no copy runs."""

    def close(self) -> None:
        """Give all back. Nothing that was sent can be brought any more."""


@dataclass
class Figures:
    """The cost of moving. `bytes_out`, `bytes_in`: copied, or begun to be. `waited_seconds`: in which the step stood
    still for a copy. `peak_bytes`: the most that autograd alone held in memory, prefetched bytes among it. `demanded`:
    storages that were used before their copy back had begun. `expected`: those that were prefetched. `steps`: those
    that `Offload.end_step` has counted."""

    bytes_out: int = 0
    bytes_in: int = 0
    waited_seconds: float = 0.0
    peak_bytes: int = 0
    demanded: int = 0
    expected: int = 0
    steps: int = 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Add the block's seconds to `waited_seconds`."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.waited_seconds += time.perf_counter() - begun


def store_rates(mover: Mover, size: int, tensor: int = TENSOR) -> StoreRates:
    """Measure a store by `size` bytes in tensors of `tensor` bytes, sent once before; then close it. Raises WriteError
    or MemoryLimitError where it has no room."""
    count, draw = max(1, size // tensor), torch.Generator(mover.device).manual_seed(0)
    try:
        data_P = torch.randint(0, 256, (tensor,), dtype=torch.uint8, device=mover.device, generator=draw)
        for sent in [mover.send(data_P) for _ in range(count)]:
            sent.copying.wait()
            mover.drop(sent)
        mover.settle()
        begun = time.perf_counter()
        there = [mover.send(data_P) for _ in range(count)]
        for sent in there:
            sent.copying.wait()
        mover.settle()
        out = time.perf_counter()
        brought = [mover.bring(sent) for sent in there]
        for each in brought:
            each.copying.wait()
        mover.settle()
        back = time.perf_counter()
    finally:
        mover.close()
    moved = count * tensor
    return StoreRates(moved / (out - begun), moved / (back - out))
