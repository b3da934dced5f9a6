"""The way of a storage's bytes out of memory and back: the ledger needs no other view of disks, threads and devices."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

HOST = "host"
"""The store that is the host's memory; any other is a folder."""


class Copying(Protocol):
    """A copy that runs. The host waits for it, or a device whose host goes on."""

    def done(self) -> bool:
        """Return True once it has ended, well or not. Does not wait."""

    def wait(self) -> None:
        """Return when its result may be used. Raises the copy's error."""

    def stop(self) -> None:
        """Await its end; the result is unwanted, and both ends may be given to others from here on."""


class Sent(NamedTuple):
    """Bytes outside: `place` is the mover's own name for where."""

    place: Any
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

    def takes(self, tensor: torch.Tensor) -> bool:
        """Return True if tensors of this kind and device can be moved at all."""
        return True

    def send(self, flat_P: torch.Tensor) -> Sent:
        """Begin to copy all bytes of a storage out. They stay as they are, and are held, until that has ended.

        Raises MemoryLimitError or WriteError where there is no room.
        """
        raise AssertionError("nothing is to leave")

    def bring(self, sent: Sent, size: int) -> Brought:
        """Begin to copy `size` bytes back to memory of their own."""
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
    storages that were used before their copy back had begun. `expected`: those that were prefetched. `steps`: forward
    and backward passes."""

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


def store_rates(mover: Mover, size: int, data_P: torch.Tensor) -> StoreRates:
    """Measure a store by `size` bytes in tensors like `data_P`, sent once before; then close it. Raises WriteError or
    MemoryLimitError where it has no room."""
    count = max(1, size // data_P.numel())
    try:
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
        brought = [mover.bring(sent, data_P.numel()) for sent in there]
        for each in brought:
            each.copying.wait()
        mover.settle()
        back = time.perf_counter()
    finally:
        mover.close()
    moved = count * data_P.numel()
    return StoreRates(moved / (out - begun), moved / (back - out))
