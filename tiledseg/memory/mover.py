"""What carries a storage out of memory and back: the ledger knows nothing else of disks, threads and devices."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

HOST = "host"
"""The store that is the host's memory; any other is a folder."""


class Copying(Protocol):
    """A copy that runs. Who waits for it is what computes: the host, or a device whose host goes on."""

    def done(self) -> bool:
        """Whether it has ended, well or not. Does not wait."""

    def wait(self) -> None:
        """Its result may be used from here on. Raises what it failed with."""

    def stop(self) -> None:
        """Its end is awaited, its result unwanted: both ends may be given to others from here on."""


class Sent(NamedTuple):
    """Bytes outside: `place` is the mover's own word for where."""

    place: Any
    copying: Copying


class Brought(NamedTuple):
    """`flat_P`: all bytes of the storage, uint8, in a storage of its own, whole once `copying` has ended."""

    flat_P: torch.Tensor
    copying: Copying


class Mover(Protocol):
    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether tensors of this kind and device can be moved at all."""

    def prepare(self, window: int) -> None:
        """A window of so many bytes receives what comes back, from now on."""

    def send(self, flat_P: torch.Tensor) -> Sent:
        """Begin to copy all bytes of a storage out. They stay as they are, and are held, until that has ended.

        Raises MemoryLimitError or WriteError where there is no room.
        """

    def bring(self, sent: Sent, size: int, offset: int | None) -> Brought | None:
        """Begin to copy `size` bytes back, to `offset` of the window (None if something lies there), or to memory of
        their own."""

    @property
    def beside(self) -> int:
        """Bytes that are held by what `bring_beside` has brought."""

    def bring_beside(self, sent: Sent, size: int) -> Brought:
        """Begin to copy `size` bytes back to memory of their own, which counts as long as anybody holds it."""

    def drop(self, sent: Sent) -> None:
        """Its place outside is free for others; a copy to it is stopped."""

    def stood_still(self) -> float:
        """Seconds, since this was last asked, for which a device has waited for copies while the host went on."""

    def close(self) -> None:
        """All is given back. Nothing that was sent can be brought any more."""


class StayMover:
    """Nothing leaves: for who only wants to know what is held."""

    def takes(self, tensor: torch.Tensor) -> bool:
        return True

    def prepare(self, window: int) -> None:
        """There is none."""

    def send(self, flat_P: torch.Tensor) -> Sent:
        raise AssertionError("nothing is to leave")

    def bring(self, sent: Sent, size: int, offset: int | None) -> Brought | None:
        raise AssertionError("nothing has left")

    @property
    def beside(self) -> int:
        return 0

    def bring_beside(self, sent: Sent, size: int) -> Brought:
        raise AssertionError("nothing has left")

    def drop(self, sent: Sent) -> None:
        raise AssertionError("nothing has left")

    def stood_still(self) -> float:
        return 0.0

    def close(self) -> None:
        """Nothing was taken."""
