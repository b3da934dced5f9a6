"""A store of bytes in a file on a local disk: for what does not fit memory and is not needed for a while.

    with FileStore("/scratch", limit=64 << 30) as store:
        slot = store.take(array.nbytes)
        writing = store.write(slot, array)  # returns at once; `array` must stay as it is until `writing.wait()`
        ...
        reading = store.read(slot, into)  # waits for the write by itself
        reading.wait()
        store.give_back(slot)

The file has no name: it is gone with the process, however that ends. The system is told to drop what was copied from
its cache, which would take as much memory as the store saves.
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
from types import TracebackType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from tiledseg.errors import ConfigError, WriteError
from tiledseg.memory.mover import Brought, Mover, Sent, StoreRates, store_rates
from tiledseg.memory.slots import Slot, SlotTable

Bytes = NDArray[np.uint8]
TENSOR = 32 << 20
"""Bytes of the tensors by which a store is measured."""


class FileTransfer:
    """One copy by a thread of `pool`. Reads may wait for writes, never the other way: so nobody waits in a circle."""

    def __init__(self, pool: ThreadPoolExecutor, move: Callable[[Bytes], None], data: Bytes) -> None:
        # The thread takes it out as it begins. Nothing else may hold it: a stopped copy stays in the pool's queue.
        self._data = [data]
        self._future = pool.submit(self._run, move)

    def _run(self, move: Callable[[Bytes], None]) -> None:
        move(self._data.pop())

    def done(self) -> bool:
        """Return True once all has been copied, or has failed. Does not wait."""
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


class FileStore:
    """Slots in an unnamed file of `folder`, `limit` bytes of them at most.

    `threads` write, and as many read: a read never queues after a write. All methods may be called from any thread. The
    copies are exact. Raises ConfigError where the folder takes no file.
    """

    def __init__(self, folder: str | Path, limit: int, threads: int = 2) -> None:
        self.folder = Path(folder)
        try:
            self._file = tempfile.TemporaryFile(buffering=0, dir=self.folder)  # noqa: SIM115
        except OSError as error:
            reason = os.strerror(error.errno or errno.EIO)
            raise ConfigError(f"the store cannot be in {folder}: {reason}; give a folder on a local disk") from error
        self._descriptor = self._file.fileno()
        self._slots = SlotTable(f"the store in {self.folder}", limit)
        self.length = 0  # of the file, for which the disk has promised room
        self._writes: dict[int, FileTransfer] = {}
        self._lock = threading.Lock()
        self._writers, self._readers = (_threads(threads, name) for name in ("store-write", "store-read"))

    @property
    def taken(self) -> int:
        """Bytes in slots, as whole pages."""
        return self._slots.taken

    def take(self, size: int) -> Slot:
        """Return a slot of `size` bytes. Raises MemoryLimitError beyond the store's limit, WriteError where the disk
        has no room for it: it is asked now, before a step has begun to rely on it."""
        with self._lock:
            slot = self._slots.find(size)
            if slot.stop > self.length:
                try:
                    _reserve(self._descriptor, self.length, slot.stop - self.length)
                except OSError as error:
                    raise self._error(f"asking for room up to {slot.stop} bytes", error) from error
                self.length = slot.stop
            self._slots.take(slot)
            return slot

    def give_back(self, slot: Slot) -> None:
        """Free a slot. A write to it that runs is awaited, one that has not begun never will; reads must have ended."""
        with self._lock:
            written = self._writes.pop(slot.offset, None)
        if written is not None:
            written.stop()
        with self._lock:
            self._slots.give_back(slot)

    def write(self, slot: Slot, array: Bytes) -> FileTransfer:
        """Begin to copy `array` (uint8, one dim, the slot's size) to the slot. It must not change until that has ended.

        Waiting raises WriteError where the disk does not take it.
        """
        transfer = FileTransfer(self._writers, lambda data: self._move(os.pwritev, slot, data, "writing"), array)
        with self._lock:
            self._writes[slot.offset] = transfer
        return transfer

    def read(self, slot: Slot, into: Bytes) -> FileTransfer:
        """Begin to copy the slot to `into` (as in `write`), after the write to it has ended. Waiting raises that
        write's error, or WriteError where the disk does not give the bytes."""
        with self._lock:
            written = self._writes.get(slot.offset)

        def move(data: Bytes) -> None:
            if written is not None:
                written.wait()
            self._move(os.preadv, slot, data, "reading")

        return FileTransfer(self._readers, move, into)

    def close(self) -> None:
        """End the threads and give the file back. Copies not begun never will; again changes nothing."""
        for pool in (self._writers, self._readers):
            pool.shutdown(wait=True, cancel_futures=True)
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _move(self, move: Callable[[int, list[memoryview], int], int], slot: Slot, data: Bytes, doing: str) -> None:
        """Move all bytes; the system may move fewer at a time than it is asked for."""
        assert len(data) == slot.size, f"the slot has {slot.size} bytes, the array {len(data)}"
        rest, offset = data.data, slot.offset
        while len(rest):
            try:
                moved = move(self._descriptor, [rest], offset)
                if moved <= 0:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            except OSError as error:
                raise self._error(f"{doing} {len(rest)} bytes at {offset}", error) from error
            os.posix_fadvise(self._descriptor, offset, moved, os.POSIX_FADV_DONTNEED)
            rest, offset = rest[moved:], offset + moved

    def _error(self, doing: str, error: OSError) -> WriteError:
        return WriteError(
            f"the store in {self.folder}: {doing} failed: {os.strerror(error.errno or errno.EIO)}; "
            f"{free_bytes(self.folder)} bytes are free on its disk, the store has {self.length}; "
            "make room, choose a folder on another disk, or keep more in memory"
        )


def _threads(count: int, name: str) -> ThreadPoolExecutor:
    """Return a pool all of whose threads run: later there may be no memory to begin one."""
    pool = ThreadPoolExecutor(count, name)
    together = threading.Barrier(count + 1)
    for _ in range(count):
        pool.submit(together.wait)
    together.wait()
    return pool


def _reserve(descriptor: int, offset: int, size: int) -> None:
    """Have the disk keep room, where its file system can say so at once."""
    try:
        os.posix_fallocate(descriptor, offset, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(descriptor, offset + size)


def free_bytes(folder: str | Path) -> int:
    """Return the free bytes of the disk that a folder is on; 0 where the system does not say."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return 0  # the store says what is wrong with the folder
    return disk.f_bavail * disk.f_frsize


class FileMover(Mover):
    """A mover of CPU tensors to a file. `store` is closed with it."""

    def __init__(self, store: FileStore) -> None:
        self._store = store

    def takes(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def send(self, flat_P: torch.Tensor) -> Sent:
        slot = self._store.take(flat_P.numel())
        return Sent(slot, self._store.write(slot, flat_P.numpy()))

    def bring(self, sent: Sent, size: int) -> Brought:
        flat_P = torch.empty(size, dtype=torch.uint8)
        return Brought(flat_P, self._store.read(sent.place, flat_P.numpy()))

    def drop(self, sent: Sent) -> None:
        self._store.give_back(sent.place)

    def close(self) -> None:
        self._store.close()


def disk_rates(folder: str | Path, size: int, tensor: int = TENSOR) -> StoreRates:
    """Measure the disk of a folder by `size` bytes. Raises ConfigError where the folder takes no file, WriteError or
    MemoryLimitError where the disk has no room."""
    data_P = torch.from_numpy(np.random.default_rng(0).integers(0, 256, tensor, np.uint8))
    return store_rates(FileMover(FileStore(folder, 2 * size)), size, data_P)
