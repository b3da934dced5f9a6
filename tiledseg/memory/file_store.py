"""A store of a CPU's tensors in a file on a local disk: for what does not fit memory and is not needed for a while.

The file has no name: it is gone with the process, however that ends. The system is told to drop copied bytes from its
cache, which would take as much memory as the store saves.
"""

from __future__ import annotations

import copy
import errno
import os
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from tiledseg.errors import ConfigError, WriteError
from tiledseg.memory.mover import Copying, Mover, Sent, Slot

Bytes = NDArray[np.uint8]


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
        disk = os.statvfs(folder)
    except OSError:
        return 0  # the store says what is wrong with the folder
    return disk.f_bavail * disk.f_frsize
