"""A store of a CPU's tensors in a file on a local disk; and shelves for an image's blocks between two segments, in
their own memory, the host's, or such a file.

The file has no name, so it vanishes with the process. Copied bytes are dropped from the system's page cache, which
would take as much memory as the store saves.
"""

from __future__ import annotations

import copy
import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tiledseg.errors import ConfigError, WriteError
from tiledseg.memory.mover import HOST, Copy, Mover, Slot
from tiledseg.memory.saved import StorageView
from tiledseg.system.freed_memory import give_back_freed

Bytes = NDArray[np.uint8]
MOST_WRITTEN = 32 << 20
"""Most bytes of blocks that may be in flight to a file."""


class FileCopy(Copy):
    """A copy by the thread of `pool`."""

    def __init__(self, slot: Slot, pool: ThreadPoolExecutor, move: Callable[[Bytes], None], data: Bytes) -> None:
        super().__init__(slot)
        # The thread pops the only reference as it begins, since a stopped copy stays in the pool's queue.
        self._data = [data]
        self._future = pool.submit(lambda: move(self._data.pop()))

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        """Return once all is copied. Raises a new copy of the error each time: one object would collect the frames of
        all waiting callers, and keep their tensors alive."""
        if error := self._future.exception():
            raise copy.copy(error) from error

    def stop(self) -> None:
        """Cancel the copy, or return once it has ended. Errors are ignored."""
        if self._future.cancel():
            self._data.clear()
        else:
            wait([self._future])


class FileStore(Mover):
    """A store of at most `limit` bytes in an unnamed file of `folder`. Copies are exact.

    One thread writes and one reads: a read never queues behind a write. Reads may wait for writes, never the other way
    round: no circular wait. Raises ConfigError if no file can be made in the folder.
    """

    def __init__(self, folder: str | Path, limit: int) -> None:
        super().__init__(f"the store in {folder}", limit)
        self.folder = Path(folder)
        try:
            self._file = tempfile.TemporaryFile(buffering=0, dir=self.folder)  # noqa: SIM115
        except OSError as error:
            reason = os.strerror(error.errno or errno.EIO)
            raise ConfigError(f"the store cannot be in {folder}: {reason}; give a folder on a local disk") from error
        self._writer, self._reader = (ThreadPoolExecutor(1, name) for name in ("store-write", "store-read"))
        for pool in (self._writer, self._reader):
            pool.submit(int).result()  # starts its thread: later there may be no memory for one

    def _start(self, slot: Slot, flat_P: torch.Tensor, sent: Copy | None) -> FileCopy:
        def move(data: Bytes) -> None:
            if sent is not None:
                sent.wait()
            self._move(os.pwritev if sent is None else os.preadv, slot, data)

        return FileCopy(slot, self._writer if sent is None else self._reader, move, flat_P.numpy())

    def close(self) -> None:
        """Cancel copies that have not begun, end the threads and close the file. Idempotent."""
        for pool in (self._writer, self._reader):
            pool.shutdown(wait=True, cancel_futures=True)
        self._file.close()

    def _move(self, move: Callable[[int, list[memoryview], int], int], slot: Slot, data: Bytes) -> None:
        """Read or write all bytes, in several calls if the system moves fewer at a time. Raises WriteError."""
        rest, offset = data.data, slot.offset
        while len(rest):
            try:
                moved = move(self._file.fileno(), [rest], offset)
                if moved <= 0:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            except OSError as error:
                raise WriteError(
                    f"the store in {self.folder}: {move.__name__} of {len(rest)} bytes at {offset} failed: "
                    f"{os.strerror(error.errno or errno.EIO)}; {free_bytes(self.folder)} bytes are free on its disk, "
                    f"the store has {self.end}; make room, choose a folder on another disk, or keep more in "
                    "memory"
                ) from error
            os.posix_fadvise(self._file.fileno(), offset, moved, os.POSIX_FADV_DONTNEED)
            rest, offset = rest[moved:], offset + moved


def free_bytes(folder: str | Path) -> int:
    """Return the free bytes of a folder's disk; 0 if it cannot be read (the store then raises the folder's error)."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


class MemoryShelf:
    """A shelf in memory: tensors stay where they are and must not be overwritten. `to_host`: a GPU's tensors are copied
    to the host's memory."""

    def __init__(self, to_host: bool = False) -> None:
        self.is_memory = not to_host

    def put(self, x: torch.Tensor) -> Any:
        """Store a tensor, which must not change any more; return its handle for `get` and `free`."""
        return x if self.is_memory else (x.cpu(), x.device)

    def get(self, what: Any) -> torch.Tensor:
        return what if self.is_memory else what[0].to(what[1])

    def ahead(self, what: Any) -> None:
        """Prefetch a tensor that `get` will return soon."""

    def free(self, what: Any) -> None:
        """Free a tensor's place. In memory it is freed with its handle."""

    def rest(self) -> None:
        """Return freed memory to the system if memory is short."""

    def close(self) -> None:
        """Close the store."""


class _Filed(NamedTuple):
    """A tensor in a file: `view`, of the original strides, over the bytes of its slot."""

    sent: Copy
    view: StorageView
    device: torch.device


class FileShelf(MemoryShelf):
    """A shelf in a file. Tensors stay in memory while they are written, at most `MOST_WRITTEN` bytes of them."""

    def __init__(self, store: Mover) -> None:
        super().__init__(to_host=True)
        self._store = store
        self._writing: list[Copy] = []  # oldest first
        self._reading: dict[_Filed, tuple[torch.Tensor, Copy]] = {}

    def put(self, x: torch.Tensor) -> _Filed:
        """Start to write the bytes of a tensor without gaps, in the order of memory. It must not change any more."""
        assert x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last), "blocks have no gaps"
        flat = x.detach().cpu().as_strided((x.numel(),), (1,))
        sent = self._store.send(flat.view(torch.uint8))
        self._writing.append(sent)
        while sum(each.slot.size for each in self._writing) > MOST_WRITTEN:
            self._writing.pop(0).wait()
        return _Filed(sent, StorageView.of(x)._replace(offset=0), x.device)

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
            self._reading.pop(what)[1].stop()
        if what.sent in self._writing:
            self._writing.remove(what.sent)
        self._store.drop(what.sent)

    def rest(self) -> None:
        give_back_freed()

    def close(self) -> None:
        self._store.close()


def open_shelf(store: str, device: torch.device | None = None) -> MemoryShelf:
    """Return the shelf of a store: `host`, or a folder. Raises ConfigError if no file can be made in it."""
    if store == HOST:
        return MemoryShelf(device is not None and device.type != "cpu")
    return FileShelf(FileStore(store, free_bytes(store)))
