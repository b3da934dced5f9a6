"""Open handles of one file, each lent to one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from tiledseg.errors import RasterError

H = TypeVar("H")


class HandlePool(Generic[H]):
    """Lends handles, opening as many as threads ask at once. Handles of past threads serve the next: pools of threads
    that come and go leave none behind, as thread-local handles would."""

    def __init__(self, path: str, opener: Callable[[], H], closer: Callable[[H], object]) -> None:
        self._path = path
        self._opener = opener
        self._closer = closer
        self._lock = threading.Lock()
        self._idle: list[H] = []
        self._closed = False

    @contextmanager
    def borrow(self) -> Iterator[H]:
        """A handle for this thread alone. Raises RasterError after `close`, and what opening raises."""
        with self._lock:
            if self._closed:
                raise RasterError(f"{self._path} is read after its reader was closed; open it again")
            handle = self._idle.pop() if self._idle else None
        if handle is None:
            handle = self._opener()
        try:
            yield handle
        finally:
            with self._lock:
                keep = not self._closed
                if keep:
                    self._idle.append(handle)
            if not keep:
                self._closer(handle)

    def release(self) -> None:
        """Close the handles that nobody holds."""
        with self._lock:
            idle, self._idle = self._idle, []
        for handle in idle:
            self._closer(handle)

    def close(self) -> None:
        """Close all: the idle ones now, each lent one when its thread is done."""
        with self._lock:
            self._closed = True
        self.release()
