"""Places for tensors that are not needed for a while: the memory they are in, the host's, or a file."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np
import torch

from tiledseg.memory.disk.file_store import FileStore, FileTransfer
from tiledseg.memory.disk.slots import Slot
from tiledseg.memory.mover import HOST
from tiledseg.memory.saved import StorageView
from tiledseg.system.freed_memory import give_back_freed

MOST_WRITTEN = 32 << 20
"""Bytes that may be on their way to a file."""


class MemoryShelf:
    """Tensors stay as they are where they are, and must not be written over. On a GPU they go to the host's memory
    where `to_host`."""

    def __init__(self, to_host: bool = False) -> None:
        self.is_memory = not to_host

    def put(self, x: torch.Tensor) -> Any:
        """By what `get` and `free` know it. It must not change any more."""
        return x if self.is_memory else (x.cpu(), x.device)

    def ahead(self, what: Any) -> None:
        """It is at hand already."""

    def get(self, what: Any) -> torch.Tensor:
        """The tensor, bit for bit."""
        if self.is_memory:
            kept: torch.Tensor = what
            return kept
        on_host, device = what
        brought: torch.Tensor = on_host.to(device)
        return brought

    def free(self, what: Any) -> None:
        """Nobody wants it any more."""

    def rest(self) -> None:
        """Nothing is spared here."""

    def close(self) -> None:
        """Nothing is kept here."""


class _Filed(NamedTuple):
    """A tensor in a file: `view`, with the strides that it had, sees the slot's bytes."""

    slot: Slot
    view: StorageView
    device: torch.device


class FileShelf:
    """Tensors lie in a file; those that are still written stay in memory meanwhile, `MOST_WRITTEN` bytes at most."""

    is_memory = False

    def __init__(self, store: FileStore) -> None:
        self._store = store
        self._writing: dict[Slot, FileTransfer] = {}  # in the order in which they began
        self._reading: dict[Slot, tuple[FileTransfer, np.ndarray]] = {}
        self._held = 0

    def put(self, x: torch.Tensor) -> _Filed:
        """Begins to write a tensor without gaps, which must not change any more."""
        data = _bytes_of(x)
        slot = self._store.take(len(data))
        self._writing[slot] = self._store.write(slot, data)
        self._held += len(data)
        for first, transfer in list(self._writing.items()):
            if self._held <= MOST_WRITTEN and not transfer.done():
                break
            self._forget(first)
            transfer.wait()
        return _Filed(slot, StorageView.of(x)._replace(offset=0), x.device)

    def ahead(self, what: _Filed) -> None:
        """Begins to read what will be got soon."""
        if what.slot not in self._reading:
            data = np.empty(what.slot.size, np.uint8)
            self._reading[what.slot] = self._store.read(what.slot, data), data

    def get(self, what: _Filed) -> torch.Tensor:
        """The tensor, bit for bit."""
        self.ahead(what)
        transfer, data = self._reading.pop(what.slot)
        transfer.wait()
        return what.view.over(torch.from_numpy(data)).to(what.device)

    def free(self, what: _Filed) -> None:
        """Its place in the file is free."""
        if what.slot in self._reading:
            self._reading.pop(what.slot)[0].stop()
        if what.slot in self._writing:
            self._forget(what.slot)
        self._store.give_back(what.slot)

    def rest(self) -> None:
        """What has been freed goes back to the system: whoever keeps blocks in a file is short of memory."""
        give_back_freed()

    def close(self) -> None:
        """Ends the store."""
        self._store.close()

    def _forget(self, slot: Slot) -> None:
        del self._writing[slot]
        self._held -= slot.size


def open_shelf(store: str, device: torch.device | None = None) -> MemoryShelf | FileShelf:
    """The shelf that `store` names: `host`, or a folder, in which a file is made that has no name. Raises ConfigError
    where the folder takes none."""
    if store == HOST:
        return MemoryShelf(device is not None and device.type != "cpu")
    found = FileStore(store, free_bytes(store))
    return FileShelf(found)


def free_bytes(folder: str) -> int:
    """Of the disk that a folder is on."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return 0  # the store says what is wrong with the folder
    return disk.f_bavail * disk.f_frsize


def _bytes_of(x: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor without gaps, as they lie in memory."""
    order = sorted(range(x.dim()), key=lambda dim: (-x.stride()[dim], -x.shape[dim]))
    flat = x.detach().cpu().permute(order).reshape(-1)
    assert flat.data_ptr() == x.data_ptr() or x.device.type != "cpu", "a tensor with gaps has no bytes of its own"
    return flat.view(torch.uint8).numpy()
