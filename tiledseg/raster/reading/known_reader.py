"""A raster of which all but its pixels is known already: nothing is opened until its first read.

One rank looks at the files of a run and tells the others; each of these opens what it reads, and when.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tiledseg.errors import RasterError, ReadError
from tiledseg.geometry.box import Box
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.mirrored_reader import RasterReader


class KnownReader(RasterReader):
    """What `opener` opens, a raster of `info`. The first read raises ReadError, of this rank alone, where it cannot be
    opened here or has become another since it was looked at."""

    def __init__(self, info: RasterInfo, opener: Callable[[], RasterReader]) -> None:
        self.info = info
        self._opener = opener
        self._source: RasterReader | None = None
        self._closed = False
        self._lock = threading.Lock()

    def _read_inside(self, box: Box) -> tuple[NDArray, NDArray[np.bool_]]:
        return self._opened().read(box)

    def _opened(self) -> RasterReader:
        with self._lock:
            if self._closed:
                raise RasterError(f"{self.info.path} is read after its reader was closed; open it again")
            if self._source is None:
                try:
                    source = self._opener()
                except RasterError as error:
                    raise ReadError(str(error)) from error
                _check_unchanged(self.info, source)
                self._source = source
            return self._source

    def release(self) -> None:
        if self._source is not None:
            self._source.release()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        if self._source is not None:
            self._source.close()


def _check_unchanged(known: RasterInfo, source: RasterReader) -> None:
    """Another image of the same shape has another size in bytes, but for one that is not compressed."""
    both = known, source.info
    then, now = (f"{i.height} x {i.width} px, {i.bands} bands of {i.dtype}" for i in both)
    if then == now:
        then, now = (f"a file of {i.size} bytes" for i in both)
    if then != now:
        source.close()
        raise ReadError(
            f"{known.path} was {then} when the run began and is {now}; see that all ranks have the same files, and "
            "start the run again"
        )
