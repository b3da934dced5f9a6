"""Pixels of a raster at any places, between its pixels too."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tiledseg.geometry.box import Box
from tiledseg.geometry.interval import Interval
from tiledseg.raster.mirrored_reader import RasterReader


def read_places(
    source: RasterReader,
    rows_HW: NDArray[np.float64],
    cols_HW: NDArray[np.float64],
    dtype: DTypeLike,
    nearest: bool,
) -> tuple[NDArray, NDArray[np.bool_]]:
    """Return pixels (C, H, W) at these places of a raster, and which are valid: those within the raster that are made
    of valid pixels alone. Interpolated (bilinear) in `dtype`, or the `nearest` pixel in the raster's own."""
    height, width = source.info.shape
    rows, cols = _taps(rows_HW, height, nearest), _taps(cols_HW, width, nearest)
    inside_HW = rows.inside & cols.inside
    pixels_CHW, valid_HW = source.read(Box(rows.hull, cols.hull))
    if nearest:
        at = _numbers(rows.low, cols.low, cols.hull)
        return _taken(pixels_CHW, at), valid_HW.take(at) & inside_HW
    pixels_CHW = pixels_CHW.astype(dtype)
    if not valid_HW.all():
        pixels_CHW[:, ~valid_HW] = 0  # nodata values such as -3e38 or NaN
    row_share, col_share = rows.share.astype(dtype), cols.share.astype(dtype)
    found_CHW = np.zeros((len(pixels_CHW), *inside_HW.shape), dtype)
    for row_HW, row_part in ((rows.low, 1 - row_share), (rows.high, row_share)):
        for col_HW, col_part in ((cols.low, 1 - col_share), (cols.high, col_share)):
            at = _numbers(row_HW, col_HW, cols.hull)
            corner_CHW = _taken(pixels_CHW, at)
            corner_CHW *= row_part * col_part
            found_CHW += corner_CHW
            inside_HW &= valid_HW.take(at)
    return found_CHW, inside_HW


def _numbers(rows_HW: NDArray[np.intp], cols_HW: NDArray[np.intp], hull: Interval) -> NDArray[np.intp]:
    """Return the numbers of pixels, counted row by row through rows as long as `hull`."""
    return rows_HW * hull.size + cols_HW


def _taken(pixels_CHW: NDArray, at_HW: NDArray[np.intp]) -> NDArray:
    """Return the pixels of these numbers, in every band."""
    return np.stack([band_HW.take(at_HW) for band_HW in pixels_CHW])


class _Taps(NamedTuple):
    """The pixels `low` and `high` along a dim between which places lie, counted from `hull`, and the share of `high`.

    `inside` is True for places within the raster.
    """

    low: NDArray[np.intp]
    high: NDArray[np.intp]
    share: NDArray[np.float64]
    inside: NDArray[np.bool_]
    hull: Interval


def _taps(at: NDArray[np.float64], size: int, nearest: bool) -> _Taps:
    inside = (at >= -0.5) & (at < size - 0.5)
    at = np.floor(at + 0.5) if nearest else at
    at = np.clip(at, 0, size - 1)
    low = np.floor(at).astype(np.intp)
    share = at - low
    high = low + (share > 0)
    hull = Interval(int(low.min()), int(high.max()) + 1)
    return _Taps(low - hull.start, high - hull.start, share, inside, hull)


def interpolated(dtype: np.dtype) -> np.dtype:
    """Return the dtype of pixels between pixels."""
    return np.dtype(np.float64 if dtype.itemsize > 2 and dtype != np.float32 else np.float32)
