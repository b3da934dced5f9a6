"""A GPU's tensors to the host's memory, and back into memory of their own."""

from __future__ import annotations

import torch

from tiledseg.errors import MemoryLimitError
from tiledseg.memory.disk.slots import Slot, SlotTable
from tiledseg.memory.host.lanes import Lanes
from tiledseg.memory.mover import Brought, Sent

CHUNK = 256 << 20
"""Bytes of the host's memory that are asked for at once: a power of two, to which torch rounds pinned memory up."""


class HostMover:
    """See `mover.Mover`. At most `limit` bytes lie in the host's memory, which grows by `chunk` bytes in the first step
    and stays. What comes back lies where torch's allocator puts it."""

    def __init__(self, lanes: Lanes, limit: int, chunk: int = CHUNK) -> None:
        self._lanes, self._limit, self._chunk = lanes, limit, chunk
        self._slots = SlotTable()
        self._host: list[torch.Tensor] = []

    def takes(self, tensor: torch.Tensor) -> bool:
        if tensor.device != self._lanes.device:
            return False
        self._lanes.look()
        return True

    def send(self, flat_P: torch.Tensor) -> Sent:
        slot = self._take(flat_P.numel())
        return Sent(slot, self._lanes.out(flat_P, self._parts(slot)))

    def _take(self, size: int) -> Slot:
        stop = self._slots.stop_of(size)
        if stop > self._limit:
            raise MemoryLimitError(
                f"the store in the host's memory may have {self._limit} bytes, of which {self._slots.taken} are taken, "
                f"but {size} more are asked for; give it at least {stop}, or keep more in the GPU's memory"
            )
        while self._chunk * len(self._host) < stop:
            self._host.append(self._lanes.host(self._chunk))
        return self._slots.take(size)

    def _parts(self, slot: Slot) -> list[torch.Tensor]:
        """The slot's memory, a part of each chunk that it reaches into."""
        parts, begin, stop = [], slot.offset, slot.offset + slot.size
        while begin < stop:
            number, at = divmod(begin, self._chunk)
            size = min(stop - begin, self._chunk - at)
            parts.append(self._host[number][at : at + size])
            begin += size
        return parts

    def bring(self, sent: Sent, size: int) -> Brought:
        flat_P = torch.empty(size, dtype=torch.uint8, device=self._lanes.device)
        unversioned_P = flat_P.data  # who writes over what has come back is looked for by versions: no copy is told of
        return Brought(flat_P, self._lanes.back(self._parts(sent.place), unversioned_P, sent.copying))

    def drop(self, sent: Sent) -> None:
        sent.copying.stop()
        self._slots.give_back(sent.place)

    def stood_still(self) -> float:
        return self._lanes.stood_still()

    def close(self) -> None:
        self._lanes.end()
        self._host.clear()
