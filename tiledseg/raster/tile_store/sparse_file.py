"""A file in memory of which only the written pages take room: HDF5 lays a store out in it, and never meets the disk.

HDF5 that is refused a write while it closes a file can end the process with a segmentation fault (seen with 2.0.0 and a
limit of the file's size). Here its writes cannot fail; `save` puts the pages on the disk by plain system calls.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator

PAGE = 4096


class SparseFile(io.RawIOBase):
    """A seekable binary file; what was never written reads as zeros."""

    def __init__(self) -> None:
        super().__init__()
        self._pages: dict[int, bytearray] = {}
        self._size = 0
        self._at = 0

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def truncate(self, size: int | None = None) -> int:
        """Sets the size. HDF5 only ever cuts off what it has not written."""
        self._size = self._at if size is None else size
        return self._size

    def write(self, data: object) -> int:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        done = 0
        for page, start, stop in _pages_of(self._at, len(view)):
            self._pages.setdefault(page, bytearray(PAGE))[start:stop] = view[done : done + stop - start]
            done += stop - start
        self._at += done
        self._size = max(self._size, self._at)
        return done

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._size - self._at)]  # type: ignore[arg-type]
        done = 0
        for page, start, stop in _pages_of(self._at, len(view)):
            view[done : done + stop - start] = self._pages.get(page, bytes(PAGE))[start:stop]
            done += stop - start
        self._at += done
        return done

    def save(self, path: str) -> None:
        """Write it as the file `path`, as sparse as it is here. Raises OSError."""
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            os.ftruncate(handle, self._size)
            for page in sorted(self._pages):
                at = page * PAGE
                view = memoryview(self._pages[page])[: max(0, self._size - at)]
                while view:
                    count = os.pwrite(handle, view, at)
                    view, at = view[count:], at + count
        finally:
            os.close(handle)


def _pages_of(at: int, count: int) -> Iterator[tuple[int, int, int]]:
    """The pages that `count` bytes from `at` on touch, each with the part of it: (number, start, stop)."""
    end = at + count
    while at < end:
        page, start = divmod(at, PAGE)
        stop = min(PAGE, start + end - at)
        yield page, start, stop
        at += stop - start
