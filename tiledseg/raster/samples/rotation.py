"""Positions rotated about a point, and a raster read at any places between its pixels."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tiledseg.geometry.box import Box
from tiledseg.geometry.interval import Interval
from tiledseg.raster.mirrored_reader import RasterReader


class Rotation(NamedTuple):
    """Moves positions by an angle of this cosine and sine about the position (`row`, `col`)."""

    cos: float
    sin: float
    row: float
    col: float

    def about(self, row: float, col: float) -> Rotation:
        """The same angle about another position."""
        return Rotation(self.cos, self.sin, row, col)

    def counted_from(self, row: int, col: int) -> Rotation:
        """The same rotation of positions that are counted from (row, col)."""
        return self.about(self.row - row, self.col - col)

    @property
    def back(self) -> Rotation:
        """The one that undoes it."""
        return Rotation(self.cos, -self.sin, self.row, self.col)

    def moved(self, row: Any, col: Any) -> tuple[Any, Any]:
        """Where positions come to lie: of numbers, or of arrays, which are broadcast."""
        down, right = row - self.row, col - self.col
        return self.row + (self.cos * down - self.sin * right), self.col + (self.sin * down + self.cos * right)


def read_places(
    source: RasterReader,
    rows_HW: NDArray[np.float64],
    cols_HW: NDArray[np.float64],
    dtype: DTypeLike,
    nearest: bool,
) -> tuple[NDArray, NDArray[np.bool_]]:
    """Pixels (C, H, W) at these places of a raster, and which are valid: those within the raster that are made of valid
    pixels alone. Interpolated (bilinear) in `dtype`, or the `nearest` pixel in the raster's own."""
    height, width = source.info.shape
    inside_HW = (rows_HW >= -0.5) & (rows_HW < height - 0.5) & (cols_HW >= -0.5) & (cols_HW < width - 0.5)
    if nearest:
        rows_HW, cols_HW = np.floor(rows_HW + 0.5), np.floor(cols_HW + 0.5)
    rows, cols = _ends(rows_HW, height), _ends(cols_HW, width)
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
    """Of pixels, counted row by row through rows as long as `hull`."""
    return rows_HW * hull.size + cols_HW


def _taken(pixels_CHW: NDArray, at_HW: NDArray[np.intp]) -> NDArray:
    """The pixels of these numbers, in every band."""
    return np.stack([band_HW.take(at_HW) for band_HW in pixels_CHW])


class _Ends(NamedTuple):
    """The pixels along a dim between which places lie, counted from `hull`, and the share of the `high` ones."""

    low: NDArray[np.intp]
    high: NDArray[np.intp]
    share: NDArray[np.float64]
    hull: Interval


def _ends(at: NDArray[np.float64], size: int) -> _Ends:
    at = np.clip(at, 0, size - 1)
    low = np.floor(at).astype(np.intp)
    share = at - low
    high = low + (share > 0)
    hull = Interval(int(low.min()), int(high.max()) + 1)
    return _Ends(low - hull.start, high - hull.start, share, hull)
