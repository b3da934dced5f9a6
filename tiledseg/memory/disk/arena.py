"""The window: one mapping of memory, into which storages come back at places that are planned.

A region is taken while anything holds a tensor over it, autograd or a user, however long: this is found out from the
region's own end, not from the plan.
"""

from __future__ import annotations

import weakref
from collections import deque

from tiledseg.memory.disk.aligned import Bytes, aligned_bytes, aligned_of_heap
from tiledseg.memory.disk.slots import whole_pages


class Beside:
    """Memory of their own for storages that come back ahead of time: `bytes` of it are held, by whomever."""

    def __init__(self) -> None:
        self._held = 0
        self._ended: deque[int] = deque()

    @property
    def bytes(self) -> int:
        while self._ended:
            self._held -= self._ended.popleft()
        return self._held

    def region(self, size: int) -> Bytes:
        region_P = aligned_of_heap(size)
        self._held += size
        weakref.finalize(region_P, self._ended.append, size).atexit = False
        return region_P


class Arena:
    """Regions of one mapping. Not safe for several threads: its owner has the lock; regions may end in any thread."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._bytes_P = aligned_bytes(size) if size else None
        self._taken: dict[int, int] = {}  # begin -> stop
        self._ended: deque[int] = deque()

    def region(self, offset: int, size: int) -> Bytes | None:
        """`size` bytes from `offset` on; None where some of them are taken, or there are not so many."""
        while self._ended:
            del self._taken[self._ended.popleft()]
        stop = offset + whole_pages(size)
        if self._bytes_P is None or stop > self.size or any(a < stop and offset < b for a, b in self._taken.items()):
            return None
        region_P = self._bytes_P[offset : offset + size]
        self._taken[offset] = stop
        weakref.finalize(region_P, self._ended.append, offset).atexit = False
        return region_P
