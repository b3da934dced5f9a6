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
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from tiledseg.errors import ConfigError, MemoryLimitError, WriteError
from tiledseg.memory.disk.slots import Slot, SlotTable
from tiledseg.memory.mover import Brought, Sent

Bytes = NDArray[np.uint8]
PIECE = 4 << 20
"""Bytes that one thread copies at once."""


class FileTransfer:
    """One copy, which runs in pieces. Reads may wait for writes, never the other way: so nobody waits in a circle.

    `parts`: the memory that pieces are still to copy. Each takes its own out as it begins, and nothing else may hold
    it: a pool's thread keeps what it was given for a while after its piece has ended, and a stopped one until it comes
    to it.
    """

    def __init__(self, pieces: Sequence[Future[None]], parts: dict[int, Bytes]) -> None:
        self._pieces, self._parts = tuple(pieces), parts

    def done(self) -> bool:
        """Return True once all has been copied, or has failed. Does not wait."""
        return all(piece.done() for piece in self._pieces)

    def wait(self) -> None:
        """Return once all is copied. Raises the first piece's error, after all have ended: no thread reads or writes
        the buffer any more.

        Each time it is a new object: the one that lasts would remember the frames of all who waited, and so keep what
        they hold.
        """
        errors = [error for piece in self._pieces if (error := _error_of(piece)) is not None]
        if errors:
            raise copy.copy(errors[0]) from errors[0]

    def stop(self) -> None:
        """Return once no piece runs; those not begun never will. Errors are passed over: nobody wants the copy."""
        for piece in [piece for piece in self._pieces if not piece.cancel()]:
            _error_of(piece)
        self._parts.clear()


def _error_of(piece: Future[None]) -> BaseException | None:
    """Return the error of a piece, once it has ended. Raising it here would keep the frames of its callers."""
    try:
        return piece.exception()
    except CancelledError as error:
        return error


class FileStore:
    """Slots in an unnamed file of `folder`, `limit` bytes of them at most.

    `threads` write, and as many read: a read never queues after a write. All methods may be called from any thread. The
    copies are exact. Raises ConfigError where the folder takes no file.
    """

    def __init__(self, folder: str | Path, limit: int, threads: int = 2) -> None:
        self.folder = Path(folder)
        self.limit = limit
        self._file = _open(self.folder)
        self._descriptor = self._file.fileno()
        self._slots = SlotTable()
        self._length = 0  # of the file, for which the disk has promised room
        self._writes: dict[int, FileTransfer] = {}
        self._lock = threading.Lock()
        self._writers = _threads(threads, "store-write")
        self._readers = _threads(threads, "store-read")

    @property
    def taken(self) -> int:
        """Bytes in slots, as whole pages."""
        return self._slots.taken

    @property
    def length(self) -> int:
        """Bytes of the file."""
        return self._length

    def take(self, size: int) -> Slot:
        """A slot of `size` bytes. Raises MemoryLimitError beyond the store's limit, WriteError where the disk has no
        room for it."""
        with self._lock:
            stop = self._slots.stop_of(size)
            if stop > self.limit:
                raise MemoryLimitError(
                    f"the store in {self.folder} may have {self.limit} bytes, of which {self._slots.taken} are taken, "
                    f"but {size} more are asked for; give it at least {stop}, or keep more in memory"
                )
            self._lengthen(stop)
            return self._slots.take(size)

    def give_back(self, slot: Slot) -> None:
        """The slot is free for others. A write to it that runs is awaited, one that has not begun never will; reads
        must have ended."""
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
        _check_size(slot, array)
        transfer = self._begin(self._writers, self._write_piece, slot, array)
        with self._lock:
            self._writes[slot.offset] = transfer
        return transfer

    def read(self, slot: Slot, into: Bytes) -> FileTransfer:
        """Begin to copy the slot to `into` (as in `write`), after the write to it has ended. Waiting raises that
        write's error, or WriteError where the disk does not give the bytes."""
        _check_size(slot, into)
        with self._lock:
            written = self._writes.get(slot.offset)

        def piece(offset: int, part: Bytes) -> None:
            if written is not None:
                written.wait()
            self._read_piece(offset, part)

        return self._begin(self._readers, piece, slot, into)

    def close(self) -> None:
        """End the threads and give the file back. Copies not begun never will; again changes nothing."""
        for pool in (self._writers, self._readers):
            pool.shutdown(wait=True, cancel_futures=True)
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _begin(
        self, pool: ThreadPoolExecutor, copy: Callable[[int, Bytes], None], slot: Slot, data: Bytes
    ) -> FileTransfer:
        parts = {begin: data[begin : begin + PIECE] for begin in range(0, slot.size, PIECE)}

        def piece(begin: int) -> None:
            copy(slot.offset + begin, parts.pop(begin))

        return FileTransfer([pool.submit(piece, begin) for begin in tuple(parts)], parts)

    def _lengthen(self, stop: int) -> None:
        """Ask the disk for room now, so that a full one is known before a step has begun to rely on it."""
        if stop <= self._length:
            return
        try:
            _reserve(self._descriptor, self._length, stop - self._length)
        except OSError as error:
            raise self._error(f"asking for room up to {stop} bytes", error) from error
        self._length = stop

    def _write_piece(self, offset: int, piece: Bytes) -> None:
        self._copy(lambda rest, at: os.pwritev(self._descriptor, [rest], at), piece, offset, "writing")

    def _read_piece(self, offset: int, piece: Bytes) -> None:
        self._copy(lambda rest, at: os.preadv(self._descriptor, [rest], at), piece, offset, "reading")

    def _copy(self, move: Callable[[memoryview, int], int], data: Bytes, offset: int, doing: str) -> None:
        """Move all bytes; the system may move fewer at a time than it is asked for."""
        rest = data.data
        while len(rest):
            try:
                moved = move(rest, offset)
            except OSError as error:
                raise self._error(f"{doing} {len(rest)} bytes at {offset}", error) from error
            if moved <= 0:
                raise self._error(f"{doing} {len(rest)} bytes at {offset}", OSError(errno.EIO, os.strerror(errno.EIO)))
            os.posix_fadvise(self._descriptor, offset, moved, os.POSIX_FADV_DONTNEED)
            rest, offset = rest[moved:], offset + moved

    def _error(self, doing: str, error: OSError) -> WriteError:
        free = os.statvfs(self.folder)
        return WriteError(
            f"the store in {self.folder}: {doing} failed: {os.strerror(error.errno or errno.EIO)}; "
            f"{free.f_bavail * free.f_frsize} bytes are free on its disk, the store has {self._length}; "
            "make room, choose a folder on another disk, or keep more in memory"
        )


def _open(folder: Path) -> tempfile._TemporaryFileWrapper[bytes]:
    try:
        return tempfile.TemporaryFile(buffering=0, dir=folder)  # type: ignore[return-value]
    except OSError as error:
        reason = os.strerror(error.errno or errno.EIO)
        raise ConfigError(f"the store cannot be in {folder}: {reason}; give a folder on a local disk") from error


def _threads(count: int, name: str) -> ThreadPoolExecutor:
    """All of them run from the start: later there may be no memory to begin one."""
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


def _check_size(slot: Slot, array: Bytes) -> None:
    if len(array) != slot.size:
        raise ValueError(f"the slot has {slot.size} bytes, the array {len(array)}")


class FileMover:
    """A mover of CPU tensors to a file: see `mover.Mover`. `store` is closed with it."""

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

    def stood_still(self) -> float:
        return 0.0

    def close(self) -> None:
        self._store.close()
