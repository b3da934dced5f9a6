"""A store of bytes in a file on a local disk: for what does not fit memory and is not needed for a while.

    with FileStore("/scratch", limit=64 << 30) as store:
        slot = store.take(array.nbytes)
        writing = store.write(slot, array)  # returns at once; `array` must stay as it is until `writing.wait()`
        ...
        reading = store.read(slot, into)  # waits for the write by itself
        reading.wait()
        store.give_back(slot)

The file has no name: it is gone with the process, however that ends. It is read and written directly (O_DIRECT), past
the system's cache, which would take as much memory as the store saves. Where the file system refuses that (tmpfs, say),
the cache is used, and `note` says so.
"""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from tiledseg.errors import ConfigError, MemoryLimitError, WriteError
from tiledseg.memory.disk.aligned import Bytes, aligned_bytes, is_aligned
from tiledseg.memory.disk.slots import PAGE, Slot, SlotTable, whole_pages
from tiledseg.memory.disk.transfer import Transfer

PIECE = 4 << 20
"""Bytes that one thread copies at once."""


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
        self.direct = _goes_direct(self._descriptor)
        self._slots = SlotTable()
        self._length = 0  # of the file, for which the disk has promised room
        self._writes: dict[int, Transfer] = {}
        self._lock = threading.Lock()
        self._own = threading.local()
        self._writers = _threads(threads, "store-write")
        self._readers = _threads(threads, "store-read")

    @property
    def note(self) -> str | None:
        """What a user should know of this store; None where it works as it should."""
        if self.direct:
            return None
        return (
            f"the file system of {self.folder} takes no direct input and output: what is stored there goes through the "
            "system's cache, and may count as memory; give a folder on a local disk"
        )

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

    def write(self, slot: Slot, array: Bytes) -> Transfer:
        """Begin to copy `array` (uint8, one dim, the slot's size) to the slot. It must not change until that has ended.

        Waiting raises WriteError where the disk does not take it.
        """
        _check_size(slot, array)
        transfer = self._begin(self._writers, self._write_piece, slot, array)
        with self._lock:
            self._writes[slot.offset] = transfer
        return transfer

    def read(self, slot: Slot, into: Bytes) -> Transfer:
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

    def _begin(self, pool: ThreadPoolExecutor, copy: Callable[[int, Bytes], None], slot: Slot, data: Bytes) -> Transfer:
        parts = {begin: data[begin : begin + PIECE] for begin in range(0, slot.size, PIECE)}

        def piece(begin: int) -> None:
            copy(slot.offset + begin, parts.pop(begin))

        return Transfer([pool.submit(piece, begin) for begin in tuple(parts)], parts)

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
        data = piece
        if self.direct and not is_aligned(piece):
            data = self._through(len(piece))
            np.copyto(data[: len(piece)], piece)
        self._copy(lambda rest, at: os.pwritev(self._descriptor, [rest], at), data, offset, "writing")

    def _read_piece(self, offset: int, piece: Bytes) -> None:
        straight = not self.direct or is_aligned(piece)
        data = piece if straight else self._through(len(piece))
        self._copy(lambda rest, at: os.preadv(self._descriptor, [rest], at), data, offset, "reading")
        if not straight:
            np.copyto(piece, data[: len(piece)])

    def _through(self, size: int) -> Bytes:
        """This thread's own aligned buffer, as whole pages of it as `size` bytes fill."""
        if not hasattr(self._own, "buffer"):
            self._own.buffer = aligned_bytes(PIECE)
        buffer: Bytes = self._own.buffer
        return buffer[: whole_pages(size)]

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


def _goes_direct(descriptor: int) -> bool:
    """Switch the file to direct input and output, and try a page; back where that is refused."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.pwritev(descriptor, [aligned_bytes(PAGE).data], 0)
    except (OSError, AttributeError):
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        return False
    return True


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
