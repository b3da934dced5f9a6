"""The resampling of a raster: augmented views (reflected, turned, moved, resized, rotated), and another grid or CRS.

Each pixel's source position is computed exactly, without the approximation of warping tools, so tiles, blocks and halos
fit together like those of a file. Pixels beyond the source raster are not valid.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np
from affine import Affine
from numpy.typing import NDArray
from rasterio.warp import transform as transform_points

from tiledseg.errors import RasterError
from tiledseg.geometry.box import Box, Interval
from tiledseg.raster.info import RasterInfo, is_placed, whole_turn
from tiledseg.raster.mirrored_reader import DerivedReader, RasterReader

Places = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Rows and columns of positions in a raster (pixel centres are whole numbers), which broadcast to (height, width)."""

_NOWHERE = -1e9  # a position outside every raster
_STEPS = 2.0**20  # positions are rounded to 1 / _STEPS of a pixel, so that pixel centres become whole numbers


class View(NamedTuple):
    """A window of `shape` (height, width); `to_raster` maps its positions (row, col) to positions of the raster."""

    shape: tuple[int, int]
    to_raster: Affine = Affine.identity()

    @property
    def on_pixels(self) -> bool:
        """Return True if the view needs no interpolation: it only reflects, turns by quarters and moves by pixels."""
        a, b, row, d, e, col = self.to_raster[:6]
        return {abs(part) for part in (a, b, d, e)} == {0, 1} and row == int(row) and col == int(col)

    @property
    def is_transposed(self) -> bool:
        """Return True if the raster's rows run along the view's columns, apart from a rotation."""
        return abs(self.to_raster.b) > abs(self.to_raster.a)

    def find(self, row: float, col: float) -> tuple[float, float]:
        """Return the position (row, col) in the view, or beyond it, of a position of the raster."""
        return ~self.to_raster @ (row, col)

    def window(self, row: int, col: int, shape: tuple[int, int]) -> View:
        """Return the part of the view that begins at (row, col) and has `shape`."""
        return View(shape, self.to_raster @ Affine.translation(row, col))

    def rotated(self, degrees: float, row: float, col: float) -> View:
        """Return the view rotated about its position (row, col)."""
        return self._replace(to_raster=self.to_raster @ Affine.rotation(degrees, (row, col)))

    def places(self, box: Box) -> Places:
        """Return the raster positions of the pixels of `box`."""
        rows = np.arange(box.row.start, box.row.stop, dtype=np.float64)[:, None]
        cols = np.arange(box.col.start, box.col.stop, dtype=np.float64)

        def along(by_row: float, by_col: float, start: float) -> NDArray[np.float64]:
            if not by_col:
                return by_row * rows + start
            return by_col * cols + start if not by_row else by_row * rows + by_col * cols + start

        a, b, c, d, e, f = self.to_raster[:6]
        return along(a, b, c), along(d, e, f)


def view_reader(source: RasterReader, view: View, classes: bool = False) -> RasterReader:
    """Return a reader of a view of `source`, which the caller closes. `classes` are never interpolated; other pixels
    are, as float32 or float64, unless the view is on pixels. A pixel is valid if all of its source pixels are."""
    nearest = classes or view.on_pixels
    dtype = source.info.dtype if nearest else str(_interpolated(np.dtype(source.info.dtype)))
    info = replace(source.info, height=view.shape[0], width=view.shape[1], dtype=dtype)
    resample = _nearest if nearest else _blended
    return DerivedReader(info, lambda box: resample(source, *view.places(box)))


def warped_reader(source: RasterReader, target: RasterInfo, key: str) -> RasterReader:
    """Return a reader of the nearest pixels of `source`, which it closes, on the grid of `target`.

    Raises RasterError, naming `key`, if a raster has no CRS or no transform, and for a tile store.
    """
    for info in (target, source.info):
        if info.crs is None or not is_placed(info.transform):
            raise RasterError(f"{info.path} has no CRS or transform, which {key} needs; give it one")
    if source.info.tiling is not None:
        raise RasterError(
            f"{source.info.path} is a tile store, cut on its own grid; warp the raster before it is cut (tiledseg tile)"
        )
    place = {"height": target.height, "width": target.width, "crs": target.crs, "transform": target.transform}
    info = replace(source.info, **place, ground=target.ground, has_mask=True)
    return DerivedReader(info, lambda box: _nearest(source, *_warped(box, target, source.info)), (source,))


def covers(source: RasterInfo, target: RasterInfo) -> bool:
    """Return True if the source covers all corners of the target, to within a pixel."""
    for row, col in product((0, target.height - 1), (0, target.width - 1)):
        places = _warped(Box.of_shape((1, 1)).shift(row, col), target, source)
        if any(not -1.5 <= at.item() <= size + 0.5 for at, size in zip(places, source.shape, strict=True)):
            return False
    return True


def _warped(box: Box, target: RasterInfo, source: RasterInfo) -> Places:
    """Return the positions in `source` of the centres of `target`'s pixels."""
    rows, cols = np.mgrid[box.row.slice, box.col.slice].reshape(2, -1) + 0.5
    xs, ys = target.transform @ (cols, rows)
    if target.crs != source.crs:
        xs, ys = (np.array(part) for part in transform_points(target.crs, source.crs, xs, ys))
    turn = whole_turn(source.crs)
    if turn is not None:  # longitudes may differ by a full turn: 181 degrees are -179
        middle = (source.transform @ (source.width / 2, source.height / 2))[0]
        xs = xs + turn * np.round((middle - xs) / turn)
    cols, rows = ~source.transform @ (xs, ys)
    with np.errstate(invalid="ignore"):
        inside = (np.abs(rows) < -_NOWHERE) & (np.abs(cols) < -_NOWHERE)
    row_HW, col_HW = (
        np.where(inside, np.rint((part - 0.5) * _STEPS) / _STEPS, _NOWHERE).reshape(box.shape) for part in (rows, cols)
    )
    return row_HW, col_HW


def _nearest(
    source: RasterReader, rows_HW: NDArray[np.float64], cols_HW: NDArray[np.float64]
) -> tuple[NDArray, NDArray[np.bool_]]:
    (row_HW, _, rows), (col_HW, _, cols) = (
        _taps(np.floor(at + 0.5), size) for at, size in zip((rows_HW, cols_HW), source.info.shape, strict=True)
    )
    pixels_CHW, valid_HW = source.read(Box(rows, cols))
    numbers_HW = row_HW * cols.size + col_HW  # index of each pixel, row by row
    inside_HW = _inside(source, rows_HW, cols_HW)
    pixels_CHW = np.stack([band_HW.take(numbers_HW) for band_HW in pixels_CHW])
    if not inside_HW.all():
        pixels_CHW[:, ~inside_HW] = 0
    return pixels_CHW, valid_HW.take(numbers_HW) & inside_HW


def _blended(
    source: RasterReader, rows_HW: NDArray[np.float64], cols_HW: NDArray[np.float64]
) -> tuple[NDArray, NDArray[np.bool_]]:
    inside_HW = _inside(source, rows_HW, cols_HW)
    (low_row, row_share, rows), (low_col, col_share, cols) = (
        _taps(at, size) for at, size in zip((rows_HW, cols_HW), source.info.shape, strict=True)
    )
    pixels_CHW, valid_HW = source.read(Box(rows, cols))
    pixels_CHW = pixels_CHW.astype(_interpolated(pixels_CHW.dtype))
    if not valid_HW.all():
        pixels_CHW[:, ~valid_HW] = 0  # nodata values such as -3e38 or NaN
    row_part, col_part = row_share.astype(pixels_CHW.dtype), col_share.astype(pixels_CHW.dtype)
    blended_CHW = np.zeros((len(pixels_CHW), *inside_HW.shape), pixels_CHW.dtype)
    for row_HW, by_row in ((low_row, 1 - row_part), (low_row + (row_share > 0), row_part)):
        for col_HW, by_col in ((low_col, 1 - col_part), (low_col + (col_share > 0), col_part)):
            numbers_HW, weight_HW = row_HW * cols.size + col_HW, by_row * by_col
            for blended_HW, band_HW in zip(blended_CHW, pixels_CHW, strict=True):
                blended_HW += band_HW.take(numbers_HW) * weight_HW
            inside_HW &= valid_HW.take(numbers_HW)
    blended_CHW[:, ~inside_HW] = 0
    return blended_CHW, inside_HW


def _inside(source: RasterReader, rows_HW: NDArray[np.float64], cols_HW: NDArray[np.float64]) -> NDArray[np.bool_]:
    height, width = source.info.shape
    inside_HW: NDArray[np.bool_] = (rows_HW >= -0.5) & (rows_HW < height - 0.5)
    return inside_HW & (cols_HW >= -0.5) & (cols_HW < width - 0.5)


def _taps(at: NDArray[np.float64], size: int) -> tuple[NDArray[np.intp], NDArray[np.float64], Interval]:
    """Return the pixel below each position along a dim, relative to the interval of needed pixels; the weight of the
    next pixel; and that interval."""
    at = np.clip(at, 0, size - 1)
    low = np.floor(at).astype(np.intp)
    share = at - low
    hull = Interval(int(low.min()), int((low + (share > 0)).max()) + 1)
    return low - hull.start, share, hull


def _interpolated(dtype: np.dtype) -> np.dtype:
    """Return the dtype of interpolated pixels."""
    return np.dtype(np.float64 if dtype.itemsize > 2 and dtype != np.float32 else np.float32)
