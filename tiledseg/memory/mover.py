"""The interface by which the ledger copies storages out of memory and back, for files and the host's memory.

A store consists of slots of whole pages. A slot takes the lowest free place that holds it, so a store whose slots come
and go in the same order at every step does not grow after the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tiledseg.errors import MemoryLimitError
from tiledseg.memory.device import CPU, Stopwatch

HOST = "host"
"""The name of the host's memory as a store; any other name is a folder."""
PAGE = 4096
"""Bytes of a page."""
TENSOR = 32 << 20
"""Bytes of the tensors by which `store_rates` measures."""


class Slot(NamedTuple):
    """`size` bytes from `offset` on, the beginning of a page. A slot takes whole pages, at least one."""

    offset: int
    size: int

    @property
    def stop(self) -> int:
        return self.offset + max(1, -(-self.size // PAGE)) * PAGE


class Copy:
    """A copy of all bytes of a storage to `slot` of a store, or back. The host waits for it, or the device alone. This
    one has ended."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot

    def done(self) -> bool:
        """Return True once the copy has ended or failed. Does not wait."""
        return True

    def wait(self) -> None:
        """Return when the result may be used. Raises the copy's error."""

    def stop(self) -> None:
        """Cancel the copy or wait for its end; afterwards the memory at both ends may be reused."""


class Mover:
    """A store of at most `limit` bytes for a device's tensors, called `name` in errors, with the copies to and from it.
    Its user holds a lock if it has several threads. `end`: the highest end of a slot so far.

    A subclass implements `_start`. This class itself moves nothing, for a ledger that only counts bytes.
    """

    def __init__(self, name: str = "no store", limit: int = 0, device: torch.device = CPU) -> None:
        self.device, self.end = device, 0
        self._name, self._limit = name, limit
        self._slots: list[Slot] = []  # in the order of their places

    def takes(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.device

    def send(self, flat_P: torch.Tensor) -> Copy:
        """Start to copy all bytes of a storage out. The caller keeps them unchanged until the copy has ended.

        Raises MemoryLimitError if there is no room. Waiting for the copy raises WriteError if the disk refuses.
        """
        slot = self.take(flat_P.numel())
        try:
            return self._start(slot, flat_P, None)
        except MemoryLimitError:
            self._slots.remove(slot)
            raise

    def bring(self, sent: Copy) -> tuple[torch.Tensor, Copy]:
        """Start to copy all bytes back, after the copy out has ended. Return the new memory (uint8) and the copy;
        waiting for it raises the error of either copy."""
        flat_P = torch.empty(sent.slot.size, dtype=torch.uint8, device=self.device)
        return flat_P, self._start(sent.slot, flat_P, sent)

    def drop(self, sent: Copy) -> None:
        """Free the slot. A copy to it is cancelled or awaited; copies from it must have ended."""
        sent.stop()
        self._slots.remove(sent.slot)

    def take(self, size: int) -> Slot:
        """Take the lowest free slot of `size` bytes. Raises MemoryLimitError beyond the limit."""
        begin = 0
        for number, (offset, stop) in enumerate([*((s.offset, s.stop) for s in self._slots), (self._limit, 0)]):
            slot = Slot(begin, size)
            if slot.stop <= offset:
                self._slots.insert(number, slot)
                self.end = max(self.end, slot.stop)
                return slot
            begin = stop or begin
        raise MemoryLimitError(
            f"{self._name} may have {self._limit} bytes, of which {sum(s.stop - s.offset for s in self._slots)} are "
            f"taken, but {size} more are asked for; give it at least {Slot(begin, size).stop}, or keep more in memory"
        )

    def _start(self, slot: Slot, flat_P: torch.Tensor, sent: Copy | None) -> Copy:
        """Start to copy `flat_P` to a slot, or back into it after the copy out, `sent`."""
        raise AssertionError("a mover without a store moves nothing")

    def close(self) -> None:
        """Free everything. Nothing that was sent can be brought back."""


@dataclass
class Figures:
    """Counters of offloading. `bytes_out`, `bytes_in`: bytes of copies that have started. `peak_bytes`: the most that
    only autograd held in memory, including prefetched bytes."""

    bytes_out: int = 0
    bytes_in: int = 0
    peak_bytes: int = 0


class StoreRates(NamedTuple):
    """Rates of a store, in bytes a second."""

    written: float
    read: float


def store_rates(mover: Mover, size: int, tensor: int = TENSOR) -> StoreRates:
    """Measure the rates of a store with `size` bytes in tensors of `tensor` bytes, after a warm-up; then close it.
    Raises WriteError or MemoryLimitError if it has no room."""
    count, draw = max(1, size // tensor), torch.Generator(mover.device).manual_seed(0)

    def write() -> list[Copy]:
        copies = [mover.send(data_P) for _ in range(count)]
        for copy in copies:
            copy.wait()
        return copies

    try:
        data_P = torch.randint(0, 256, (tensor,), dtype=torch.uint8, device=mover.device, generator=draw)
        for sent in write():
            mover.drop(sent)
        writing, reading = Stopwatch(mover.device), Stopwatch(mover.device)
        with writing.running():
            there = write()
        with reading.running():
            brought = [mover.bring(sent) for sent in there]
            for _, copy in brought:
                copy.wait()
        return StoreRates(count * tensor / writing.seconds(), count * tensor / reading.seconds())
    finally:
        mover.close()
