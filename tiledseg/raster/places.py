"""Pixels of a raster at any places, between its pixels too."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tiledseg.geometry.box import Box, Interval
from tiledseg.raster.mirrored_reader import RasterReader


def read_places(
    source: RasterReader,
    rows_HW: NDArray[np.float64],
    cols_HW: NDArray[np.float64],
    dtype: DTypeLike,
    nearest: bool,
) -> tuple[NDArray, NDArray[np.bool_]]:
    """Return pixels (C, H, W) at these places of a raster, which broadcast, and which are valid: those within the
    raster that are made of valid pixels alone. Interpolated (bilinear) in `dtype`, or the `nearest` pixel in the
    raster's own."""
    height, width = source.info.shape
    rows, cols = _taps(rows_HW, height, nearest), _taps(cols_HW, width, nearest)
    inside_HW = rows.inside & cols.inside
    pixels_CHW, valid_HW = source.read(Box(rows.hull, cols.hull))

    def at(row_HW: NDArray[np.intp], col_HW: NDArray[np.intp]) -> tuple[NDArray, NDArray[np.bool_]]:
        numbers_HW = row_HW * cols.hull.size + col_HW  # of pixels, counted row by row
        return np.stack([band_HW.take(numbers_HW) for band_HW in pixels_CHW]), valid_HW.take(numbers_HW)

    if nearest:
        nearest_CHW, valid_there_HW = at(rows.low, cols.low)
        if not inside_HW.all():
            nearest_CHW[:, ~inside_HW] = 0
        return nearest_CHW, valid_there_HW & inside_HW
    pixels_CHW = pixels_CHW.astype(dtype)
    if not valid_HW.all():
        pixels_CHW[:, ~valid_HW] = 0  # nodata values such as -3e38 or NaN
    row_share, col_share = rows.share.astype(dtype), cols.share.astype(dtype)
    blended_CHW = np.zeros((len(pixels_CHW), *inside_HW.shape), dtype)
    for row_HW, row_part in ((rows.low, 1 - row_share), (rows.high, row_share)):
        for col_HW, col_part in ((cols.low, 1 - col_share), (cols.high, col_share)):
            corner_CHW, valid_there_HW = at(row_HW, col_HW)
            corner_CHW *= row_part * col_part
            blended_CHW += corner_CHW
            inside_HW &= valid_there_HW
    return blended_CHW, inside_HW


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
    at = np.clip(np.floor(at + 0.5) if nearest else at, 0, size - 1)
    low = np.floor(at).astype(np.intp)
    share = at - low
    high = low + (share > 0)
    hull = Interval(int(low.min()), int(high.max()) + 1)
    return _Taps(low - hull.start, high - hull.start, share, inside, hull)


def interpolated(dtype: np.dtype) -> np.dtype:
    """Return the dtype of pixels between pixels."""
    return np.dtype(np.float64 if dtype.itemsize > 2 and dtype != np.float32 else np.float32)
