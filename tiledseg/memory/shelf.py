"""Places for blocks of an image between two segments: the memory they are in, the host's, or a file."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tiledseg.memory.file_store import FileStore, free_bytes
from tiledseg.memory.mover import HOST, Brought, Mover, Sent
from tiledseg.memory.saved import StorageView
from tiledseg.system.freed_memory import give_back_freed

MOST_WRITTEN = 32 << 20
"""Bytes that may be on their way to a file."""


class MemoryShelf:
    """A shelf in memory: tensors stay where they are, and must not be written over. With `to_host` a GPU's go to the
    host's memory."""

    def __init__(self, to_host: bool = False) -> None:
        self.is_memory = not to_host

    def put(self, x: torch.Tensor) -> Any:
        """Return the name of a tensor for `get` and `free`. It must not change any more."""
        return x if self.is_memory else (x.cpu(), x.device)

    def get(self, what: Any) -> torch.Tensor:
        """Return the tensor, bit for bit."""
        x: torch.Tensor = what if self.is_memory else what[0].to(what[1])
        return x

    def ahead(self, what: Any) -> None:
        """Begin to bring what will be got soon."""

    def free(self, what: Any) -> None:
        """Free its place. In memory that goes with its name."""

    def rest(self) -> None:
        """Give freed memory back to the system, where memory is short."""

    def close(self) -> None:
        """End the store."""


class _Filed(NamedTuple):
    """A tensor in a file: `view`, with the strides that it had, sees the bytes of the slot."""

    sent: Sent
    view: StorageView
    device: torch.device


class FileShelf(MemoryShelf):
    """A shelf in a file; tensors being written stay in memory meanwhile, `MOST_WRITTEN` bytes at most."""

    def __init__(self, store: Mover) -> None:
        super().__init__(to_host=True)
        self._store = store
        self._writing: dict[_Filed, None] = {}  # in the order in which they began
        self._reading: dict[_Filed, Brought] = {}

    def put(self, x: torch.Tensor) -> _Filed:
        """Begin to write a tensor without gaps, which must not change any more."""
        what = _Filed(self._store.send(_bytes_of(x)), StorageView.of(x)._replace(offset=0), x.device)
        self._writing[what] = None
        for first in list(self._writing):
            if first.sent.copying.done() or sum(each.sent.slot.size for each in self._writing) > MOST_WRITTEN:
                del self._writing[first]
                first.sent.copying.wait()
        return what

    def ahead(self, what: _Filed) -> None:
        if what not in self._reading:
            self._reading[what] = self._store.bring(what.sent)

    def get(self, what: _Filed) -> torch.Tensor:
        self.ahead(what)
        flat_P, reading = self._reading.pop(what)
        reading.wait()
        return what.view.over(flat_P).to(what.device)

    def free(self, what: _Filed) -> None:
        if what in self._reading:
            self._reading.pop(what).copying.stop()
        self._writing.pop(what, None)
        self._store.drop(what.sent)

    def rest(self) -> None:
        give_back_freed()

    def close(self) -> None:
        self._store.close()


def open_shelf(store: str, device: torch.device | None = None) -> MemoryShelf:
    """Return the shelf of a store: `host`, or a folder, in which a file is made that has no name. Raises ConfigError
    where the folder takes none."""
    if store == HOST:
        return MemoryShelf(device is not None and device.type != "cpu")
    return FileShelf(FileStore(store, free_bytes(store)))


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor without gaps, as they lie in memory."""
    order = sorted(range(x.dim()), key=lambda dim: (-x.stride()[dim], -x.shape[dim]))
    flat = x.detach().cpu().permute(order).reshape(-1)
    assert flat.data_ptr() == x.data_ptr() or x.device.type != "cpu", "a tensor with gaps has no bytes of its own"
    return flat.view(torch.uint8)
