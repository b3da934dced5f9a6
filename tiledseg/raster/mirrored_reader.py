"""The interface of every raster: pixels and validity of any box, mirrored beyond the border, with retries for file
servers; and a prefetcher."""

from __future__ import annotations

import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from rasterio.errors import RasterioError

from tiledseg.errors import RasterError, TiledsegError
from tiledseg.geometry.box import Box, Interval
from tiledseg.raster.info import RasterInfo

DAMAGED = "the file may be truncated or damaged: copy it again"


@contextmanager
def reading(what: str, remedy: str = DAMAGED) -> Iterator[None]:
    """Turn any exception of the body into a RasterError "cannot `what`: reason; `remedy`", with it as the cause.

    Our own errors pass unchanged. `what` names the file: "read rows 0:9 of a.tif". A library that parses a damaged file
    may raise any exception, and the user must still get one line.
    """
    try:
        yield
    except TiledsegError:
        raise
    except Exception as error:
        raise RasterError(f"cannot {what}: {reason(error)}; {remedy}") from error


def reason(error: Exception) -> str:
    """Return an error's message on one line: GDAL's, which rasterio keeps in the cause; others with their class."""
    cause = error.__cause__ or error
    text = " ".join(str(getattr(cause, "errmsg", None) or cause).split())[:300]
    if isinstance(error, (OSError, RasterioError)) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


T = TypeVar("T")

PAUSES = (0.1, 0.5, 2.0)
"""Seconds before the second, third and fourth try. A damaged file raises an error after their sum."""


MOST_IDLE = 128
"""Most idle file handles of a process: well below the usual limit of 1024 open files."""
_used: weakref.WeakValueDictionary[int, HandlePool] = weakref.WeakValueDictionary()  # by `id`, the last used at the end
_used_lock = threading.Lock()


def _begin_anew() -> None:
    """Leave a fork's inherited handles to its parent; the parent may hold the lock."""
    global _used_lock
    _used_lock = threading.Lock()
    _used.clear()


os.register_at_fork(after_in_child=_begin_anew)


class HandlePool:
    """The file handles of a raster: one for each thread that reads at the same time. Handles outlive their threads and
    are reused, unlike thread-local ones. A process with more than `MOST_IDLE` closes those used longest ago."""

    def __init__(self, opener: Callable[[], Any]) -> None:
        self._opener, self._idle = opener, list[Any]()

    @contextmanager
    def borrow(self) -> Iterator[Any]:
        """Yield a handle for this thread alone. Raises errors of opening."""
        try:
            handle = self._idle.pop()  # a list's `pop` and `append` need no lock
        except IndexError:
            handle = self._opener()
        try:
            yield handle
        finally:
            self._idle.append(handle)
            with _used_lock:
                _used.pop(id(self), None)
                _used[id(self)] = self
                pools = list(_used.values())
            spare = sum(len(pool._idle) for pool in pools) - MOST_IDLE
            for pool in pools:
                if spare > 0:
                    spare -= len(pool._idle)
                    pool.release()

    def release(self) -> None:
        """Close the idle handles."""
        with suppress(IndexError):
            while True:
                self._idle.pop().close()

    close = release


class RasterReader(ABC):
    """A reader of boxes of one raster. Any number of threads may read at once, each with its own handle. `held`: the
    pools or readers that it owns. `wraps`: it reads other readers, which retry by themselves. `nodata`: of each band
    (None: none), by which `valid_pixels` judges the stored pixels; None if `_read_inside` returns the validity."""

    info: RasterInfo
    held: Sequence[HandlePool | RasterReader] = ()
    wraps = False
    nodata: Sequence[float | None] | None = None

    def read(self, box: Box) -> tuple[NDArray, NDArray[np.bool_]]:
        """Return pixels (C, H, W) in the raster's own dtype and validity (H, W) of `box`, in absolute raster positions.

        Beyond the border, pixels and validity are mirrored like numpy's pad mode 'symmetric' (the edge pixel is
        repeated, period 2n, at any distance). Raises RasterError for an empty box, for one larger than the memory, and
        if the file cannot be read after all retries.
        """
        if box.area == 0:
            raise RasterError(f"{self.info.path}: empty box {box.shape}; give at least one pixel")
        needed, there = self.info.bands * box.area * np.dtype(self.info.dtype).itemsize, memory_bytes()
        if needed > there:
            raise RasterError(
                f"{box.height} x {box.width} px of {self.info.path} take {needed / 2**30:.3g} GiB, this machine has "
                f"{there / 2**30:.3g} GiB; cut it finer with tiling.grid"
            )
        return self._again(box, self._read)

    def read_stored(self, box: Box) -> tuple[NDArray, NDArray[np.bool_]]:
        """Return pixels and mask of a box within the raster, before they are judged by `nodata`."""
        return self._again(box, self._read_inside)

    def _again(self, box: Box, read: Callable[[Box], T]) -> T:
        """Return `read(box)`. Unless this reader wraps others, the read is repeated with new handles after each of the
        `PAUSES` if the system or GDAL refuses it. Raises RasterError for the last refusal, and for any other error at
        once. No read is put together from several tries."""
        rows, cols = (f"{side.start}:{side.stop}" for side in (box.row, box.col))
        what = f"read rows {rows}, columns {cols} of {self.info.path}"
        with reading(what):
            for pause in () if self.wraps else PAUSES:
                try:
                    return read(box)
                except (OSError, RasterioError, RasterError):  # RasterError: the file is missing when it is reopened
                    time.sleep(pause)
                    self.release()
            with reading(what, DAMAGED if self.wraps else f"tried {1 + len(PAUSES)} times: {DAMAGED}"):
                return read(box)

    def _read(self, box: Box) -> tuple[NDArray, NDArray[np.bool_]]:
        if Box.of_shape(self.info.shape).contains(box):
            pixels_CHW, valid_HW = self._read_inside(box)
            return pixels_CHW, valid_HW if self.nodata is None else valid_pixels(pixels_CHW, self.nodata, valid_HW)
        rows, cols = mirrored_positions(box.row, self.info.height), mirrored_positions(box.col, self.info.width)
        hull = Box(*(Interval(int(places.min()), int(places.max()) + 1) for places in (rows, cols)))
        rows, cols = rows - hull.row.start, cols - hull.col.start
        pixels_CHW, valid_HW = self._read(hull)
        return pixels_CHW.take(rows, axis=1).take(cols, axis=2), valid_HW.take(rows, axis=0).take(cols, axis=1)

    @abstractmethod
    def _read_inside(self, box: Box) -> tuple[NDArray, NDArray[np.bool_]]:
        """Read a box that lies within the raster: its pixels, and the validity or, before `nodata`, the mask."""

    def release(self) -> None:
        """Close the handles that no thread is using; the next read reopens one."""
        for each in self.held:
            each.release()

    def close(self) -> None:
        """Close every handle. A read afterwards opens the raster again."""
        for each in self.held:
            each.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class DerivedReader(RasterReader):
    """A raster computed from others: `derive` returns pixels and validity of a box within it. `held`: the readers that
    it owns."""

    wraps = True

    def __init__(
        self,
        info: RasterInfo,
        derive: Callable[[Box], tuple[NDArray, NDArray[np.bool_]]],
        held: Sequence[RasterReader] = (),
        nodata: Sequence[float | None] | None = None,
    ) -> None:
        self.info, self._derive, self.held, self.nodata = info, derive, held, nodata

    def _read_inside(self, box: Box) -> tuple[NDArray, NDArray[np.bool_]]:
        return self._derive(box)


def valid_pixels(pixels_CHW: NDArray, nodata: Sequence[float | None], mask_HW: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the validity (H, W) of pixels (C, H, W), from each band's nodata value (None: none) and a mask.

    A pixel is invalid
    - where the mask is False;
    - where any band is NaN or infinite;
    - in signed and floating-point rasters, where any band holds its nodata value;
    - in unsigned rasters, where every band holds its nodata value (GDAL's rule for a dataset), because 0 or 255 in one
      band alone may be a dark or bright pixel.
    """
    valid_HW = mask_HW.copy()
    if pixels_CHW.dtype.kind == "f":
        for band_HW in pixels_CHW:
            valid_HW &= np.isfinite(band_HW)
    sentinels = [as_stored(value, pixels_CHW.dtype) for value in nodata]
    if pixels_CHW.dtype.kind != "u":
        for band_HW, sentinel in zip(pixels_CHW, sentinels, strict=True):
            if sentinel is not None:
                valid_HW &= band_HW != sentinel
    elif None not in sentinels:
        empty_HW = np.ones_like(valid_HW)
        for band_HW, sentinel in zip(pixels_CHW, sentinels, strict=True):
            empty_HW &= band_HW == sentinel
        valid_HW &= ~empty_HW
    return valid_HW


def as_stored(value: float | None, dtype: np.dtype) -> np.generic | None:
    """Return a nodata value in the raster's dtype; None without one, or if the dtype cannot hold it."""
    if value is None:
        return None
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            return dtype.type(value)
    limits = np.iinfo(dtype)
    if not limits.min <= value <= limits.max or value != int(value):  # NaN and infinity fail the first test
        return None
    return dtype.type(int(value))


def mirrored_positions(positions: Interval, size: int) -> NDArray[np.intp]:
    """Return the pixel of each position in a dim of `size` pixels, mirrored at its borders."""
    folded = np.arange(positions.start, positions.stop) % (2 * size)
    return np.where(folded < size, folded, 2 * size - 1 - folded)


def memory_bytes() -> int:
    """Return the bytes of memory of the whole machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


S = TypeVar("S")


def prefetch(items: Iterable[T], load: Callable[[T], S], threads: int, depth: int) -> Iterator[S]:
    """Yield `load(item)` for each item, in the order of `items`, with up to `depth` loads running or waiting.

    `items` is drawn in the consumer's thread, at most `depth` ahead, so it may be endless. An exception of `load` or of
    `items` is raised at its place, after all items before it. Threads start at the first `next` and are joined when the
    iterator ends, is closed, or is dropped: pending loads are cancelled, a running one is waited for. `threads` 0 loads
    in the consumer's thread.
    """
    if threads == 0:
        yield from map(load, items)
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="prefetch")
    drawn, waiting = iter(items), deque[Future[S]]()
    failure: BaseException | None = None
    try:
        while True:
            while failure is None and len(waiting) < depth:
                try:
                    waiting.append(pool.submit(load, next(drawn)))
                except Exception as error:  # StopIteration too; raised after the pending loads
                    failure = error
            if not waiting:
                break
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    if failure is not None and not isinstance(failure, StopIteration):
        raise failure
