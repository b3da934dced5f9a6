"""Overviews of a plain raster that has room for them (`overview_room`): a pixel is the mean of two by two below it.

A block of an overview is of four blocks of what it is an overview of; a thread reads these where the file is mapped
into memory. A mean is of its pixels alone: no number of threads changes a bit.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tiledseg.config.map_formats import BLOCK, overview_shapes
from tiledseg.raster.maps.overview_room import FRAME
from tiledseg.raster.maps.plain_tiff import block_offsets

_VALUE = np.dtype("<f4")
_BLOCK_BYTES = BLOCK * BLOCK * _VALUE.itemsize
_HALF = BLOCK // 2


def write_overviews(
    path: Path, bands: int, shape: tuple[int, int], threads: int = 1, beat: Callable[[], None] = lambda: None
) -> None:
    """Fill in all overviews of a raster of float32 of a shape (rows, cols), and the frames of all blocks, flushed to
    the disk. NaN is no data, and has no part in a mean. `beat` is called after each block of an overview. OSError where
    it cannot be written."""
    data = np.memmap(path, np.uint8, "r")
    below = _Level(data, shape, block_offsets(path, bands))
    with path.open("r+b", buffering=0) as file, ThreadPoolExecutor(threads) as pool:
        for number, half in enumerate(overview_shapes(*shape)):
            offsets = block_offsets(path, bands, number)

            def fill(place: tuple[int, ...], below: _Level = below, offsets: NDArray[np.int64] = offsets) -> None:
                _put(file.fileno(), below.halved(*place).data.cast("B"), int(offsets[place]))

            for _ in pool.map(fill, np.ndindex(offsets.shape)):
                beat()
            _put_frames(file.fileno(), below)
            below = _Level(data, half, offsets)
        _put_frames(file.fileno(), below)
        os.fsync(file.fileno())


@dataclass(frozen=True)
class _Level:
    """The raster or an overview, of a shape (rows, cols), whose blocks lie at `offsets` (bands, block rows, cols)."""

    data: NDArray[np.uint8]
    shape: tuple[int, int]
    offsets: NDArray[np.int64]

    def values(self, place: tuple[int, ...]) -> NDArray[np.float32]:
        """Of a block, one row after the other."""
        at = self.offsets[place]
        return self.data[at : at + _BLOCK_BYTES].view(_VALUE)

    def halved(self, band: int, row: int, col: int) -> NDArray[np.float32]:
        """A block of its overview; 0 beyond the edges."""
        found_HW = np.zeros((BLOCK, BLOCK), _VALUE)
        for down, right in itertools.product((0, 1), repeat=2):
            means_HW = halved(self._block(band, 2 * row + down, 2 * col + right))
            rows, cols = means_HW.shape
            found_HW[down * _HALF :, right * _HALF :][:rows, :cols] = means_HW
        return found_HW

    def _block(self, band: int, row: int, col: int) -> NDArray[np.float32]:
        """Its pixels inside the raster, which may be none."""
        rows, cols = (max(0, min(BLOCK, n - BLOCK * k)) for n, k in zip(self.shape, (row, col), strict=True))
        if not rows or not cols:
            return np.empty((0, 0), _VALUE)
        return self.values((band, row, col)).reshape(BLOCK, BLOCK)[:rows, :cols]


def halved(pixels_HW: NDArray[np.float32]) -> NDArray[np.float32]:
    """The means of two by two pixels, at odd edges of those that are there; without NaN, and NaN of nothing else."""
    odd = [(0, size % 2) for size in pixels_HW.shape]
    if any(after for _, after in odd):
        pixels_HW = np.pad(pixels_HW, odd, constant_values=np.nan)
    means_HW = _sums(pixels_HW) * np.float32(0.25)
    if not np.isnan(means_HW).any():
        return means_HW
    there_HW = ~np.isnan(pixels_HW)
    with np.errstate(invalid="ignore"):  # of nothing
        return _sums(np.where(there_HW, pixels_HW, np.float32(0))) / _sums(there_HW.astype(np.float32))


def _sums(pixels_HW: NDArray[np.float32]) -> NDArray[np.float32]:
    rows_HW = pixels_HW[0::2] + pixels_HW[1::2]
    return rows_HW[:, 0::2] + rows_HW[:, 1::2]


def _put_frames(descriptor: int, level: _Level) -> None:
    for place in np.ndindex(level.offsets.shape):
        at = int(level.offsets[place])
        _put(descriptor, memoryview(_BLOCK_BYTES.to_bytes(FRAME, "little")), at - FRAME)
        _put(descriptor, level.values(place)[-1:].data.cast("B"), at + _BLOCK_BYTES)


def _put(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
