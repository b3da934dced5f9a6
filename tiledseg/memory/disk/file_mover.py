"""CPU tensors to a file on a local disk, and back into a window of memory."""

from __future__ import annotations

import torch

from tiledseg.memory.disk.aligned import Bytes, aligned_of_heap
from tiledseg.memory.disk.arena import Arena, Beside
from tiledseg.memory.disk.file_store import FileStore
from tiledseg.memory.mover import Brought, Sent


class FileMover:
    """See `mover.Mover`. `store` is closed with it."""

    def __init__(self, store: FileStore) -> None:
        self._store = store
        self._arena, self._beside = Arena(0), Beside()

    def takes(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def prepare(self, window: int) -> None:
        if window != self._arena.size:
            self._arena = Arena(window)  # tensors over the former one keep it as long as they need it

    def send(self, flat_P: torch.Tensor) -> Sent:
        slot = self._store.take(flat_P.numel())
        return Sent(slot, self._store.write(slot, flat_P.numpy()))

    @property
    def beside(self) -> int:
        return self._beside.bytes

    def bring(self, sent: Sent, size: int, offset: int | None) -> Brought | None:
        region_P = aligned_of_heap(size) if offset is None else self._arena.region(offset, size)
        return None if region_P is None else self._read(sent, region_P)

    def bring_beside(self, sent: Sent, size: int) -> Brought:
        return self._read(sent, self._beside.region(size))

    def _read(self, sent: Sent, region_P: Bytes) -> Brought:
        return Brought(_tensor_over(region_P), self._store.read(sent.place, region_P))

    def drop(self, sent: Sent) -> None:
        self._store.give_back(sent.place)

    def stood_still(self) -> float:
        return 0.0

    def close(self) -> None:
        self._store.close()


def _tensor_over(region_P: Bytes) -> torch.Tensor:
    """Its storage holds the array, and nothing else does once the copy into it has ended: so the array ends with it."""
    return torch.frombuffer(region_P, dtype=torch.uint8)
