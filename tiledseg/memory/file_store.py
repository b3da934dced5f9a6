"""A store of a CPU's tensors in a file on a local disk: for what does not fit memory and is not needed for a while; and
shelves of blocks of an image between two segments: the memory they are in, the host's, or such a file.

The file has no name: it is gone with the process, however that ends. The system is told to drop copied bytes from its
cache, which would take as much memory as the store saves.
"""

from __future__ import annotations

import copy
import errno
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tiledseg.errors import ConfigError, WriteError
from tiledseg.memory.mover import HOST, Brought, Copying, Mover, Sent, Slot
from tiledseg.memory.saved import StorageView
from tiledseg.system.freed_memory import give_back_freed

Bytes = NDArray[np.uint8]
MOST_WRITTEN = 32 << 20
"""Bytes that may be on their way to a file, of blocks."""


class FileTransfer:
    """One copy by a thread of `pool`. Reads may wait for writes, never the other way: so nobody waits in a circle."""

    def __init__(self, pool: ThreadPoolExecutor, move: Callable[[Bytes], None], data: Bytes) -> None:
        # The thread takes it out as it begins. Nothing else may hold it: a stopped copy stays in the pool's queue.
        self._data = [data]
        self._future = pool.submit(lambda: move(self._data.pop()))

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        """Return once all is copied. Raises the copy's error, each time a new object: the one that lasts would remember
        the frames of all who waited, and so keep what they hold."""
        error = self._error()
        if error is not None:
            raise copy.copy(error) from error

    def stop(self) -> None:
        """Return once it does not run; if it has not begun it never will. Errors are passed over: nobody wants it."""
        if self._future.cancel():
            self._data.clear()
        self._error()

    def _error(self) -> BaseException | None:
        """Return the error, once it has ended. Raising it here would keep the frames of its callers."""
        try:
            return self._future.exception()
        except CancelledError as error:
            return error


class FileStore(Mover):
    """Slots in an unnamed file of `folder`, `limit` bytes of them at most.

    `threads` write, and as many read: a read never queues after a write. The copies are exact. Raises ConfigError where
    the folder takes no file.
    """

    def __init__(self, folder: str | Path, limit: int, threads: int = 2) -> None:
        super().__init__(f"the store in {folder}", limit)
        self.folder = Path(folder)
        try:
            self._file = tempfile.TemporaryFile(buffering=0, dir=self.folder)  # noqa: SIM115
        except OSError as error:
            reason = os.strerror(error.errno or errno.EIO)
            raise ConfigError(f"the store cannot be in {folder}: {reason}; give a folder on a local disk") from error
        self._writers, self._readers = (_threads(threads, name) for name in ("store-write", "store-read"))

    def _out(self, flat_P: torch.Tensor, slot: Slot) -> Copying:
        return FileTransfer(self._writers, lambda data: self._move(os.pwritev, slot, data), flat_P.numpy())

    def _back(self, sent: Sent, flat_P: torch.Tensor) -> Copying:
        def move(data: Bytes) -> None:
            sent.copying.wait()
            self._move(os.preadv, sent.slot, data)

        return FileTransfer(self._readers, move, flat_P.numpy())

    def close(self) -> None:
        """End the threads and give the file back. Copies not begun never will; again changes nothing."""
        for pool in (self._writers, self._readers):
            pool.shutdown(wait=True, cancel_futures=True)
        self._file.close()

    def _move(self, move: Callable[[int, list[memoryview], int], int], slot: Slot, data: Bytes) -> None:
        """Move all bytes; the system may move fewer at a time than it is asked for. Raises WriteError."""
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
                    f"the store has {self.slots.end}; make room, choose a folder on another disk, or keep more in "
                    "memory"
                ) from error
            os.posix_fadvise(self._file.fileno(), offset, moved, os.POSIX_FADV_DONTNEED)
            rest, offset = rest[moved:], offset + moved


def _threads(count: int, name: str) -> ThreadPoolExecutor:
    """Return a pool all of whose threads run: later there may be no memory to begin one."""
    pool = ThreadPoolExecutor(count, name)
    together = threading.Barrier(count + 1)
    for _ in range(count):
        pool.submit(together.wait)
    together.wait()
    return pool


def free_bytes(folder: str | Path) -> int:
    """Return the free bytes of the disk that a folder is on; 0 where the system does not say."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0  # the store says what is wrong with the folder


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
        """Begin to write a tensor without gaps, which must not change any more: its bytes, as they lie in memory."""
        order = sorted(range(x.dim()), key=lambda dim: (-x.stride()[dim], -x.shape[dim]))
        flat = x.detach().cpu().permute(order).reshape(-1)
        assert flat.data_ptr() == x.data_ptr() or x.device.type != "cpu", "a tensor with gaps has no bytes of its own"
        sent = self._store.send(flat.view(torch.uint8))
        what = _Filed(sent, StorageView.of(x)._replace(offset=0), x.device)
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
    """Return the shelf of a store: `host`, or a folder that takes a file. Raises ConfigError where it takes none."""
    if store == HOST:
        return MemoryShelf(device is not None and device.type != "cpu")
    return FileShelf(FileStore(store, free_bytes(store)))
