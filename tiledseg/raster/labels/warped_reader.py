"""A raster of another grid, another CRS too, brought to a given one: labels by the pixel that holds a pixel's centre,
images by the four nearest pixels, each by how near it is.

Every centre is transformed by itself, without the approximation between points that warping tools make, so a tile's
pixels do not depend on the tiles.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from rasterio.warp import transform as transform_points

from tiledseg.errors import RasterError
from tiledseg.geometry.box import Box
from tiledseg.geometry.interval import Interval
from tiledseg.raster.georeferencing import is_placed, whole_turn
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.mirrored_reader import RasterReader

_FAR = 2.0**40  # of no raster


class _OtherGrid(RasterReader):
    """`source`, which it closes, on the grid of `target`.

    Raises RasterError, naming `key`, where one of them has no CRS or no transform.
    """

    def __init__(self, source: RasterReader, target: RasterInfo, key: str) -> None:
        for info in (target, source.info):
            if info.crs is None or not is_placed(info.transform):
                raise RasterError(f"{info.path} has no CRS, so {key} has nothing to go by; give it one")
        self._source, self._target = source, target
        self.info = replace(
            source.info,
            height=target.height,
            width=target.width,
            crs=target.crs,
            transform=target.transform,
            ground=target.ground,
            has_mask=True,
            tiling=None,
        )

    def _places(self, box: Box) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(row, col) in the source of each pixel's centre, (H, W): pixels' corners are whole numbers; NaN for none."""
        rows, cols = np.mgrid[box.row.slice, box.col.slice].reshape(2, -1) + 0.5
        place, inverse = self._target.transform, ~self._source.info.transform
        xs = place.a * cols + place.b * rows + place.c
        ys = place.d * cols + place.e * rows + place.f
        if self._target.crs != self._source.info.crs:
            xs, ys = (np.array(part) for part in transform_points(self._target.crs, self._source.info.crs, xs, ys))
        with np.errstate(invalid="ignore"):
            xs = self._nearest_turn(xs)
            found = inverse.d * xs + inverse.e * ys + inverse.f, inverse.a * xs + inverse.b * ys + inverse.c
            fits = (np.abs(found[0]) < _FAR) & (np.abs(found[1]) < _FAR)
        row, col = (np.where(fits, part, np.nan).reshape(box.shape) for part in found)
        return row, col

    def _nearest_turn(self, xs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Longitudes by the whole turns that bring each next to the source's middle: 181 degrees are -179."""
        info = self._source.info
        place, turn = info.transform, whole_turn(info.crs)
        if turn is None:
            return xs
        middle = place.a * info.width / 2 + place.b * info.height / 2 + place.c
        found: NDArray[np.float64] = xs + turn * np.round((middle - xs) / turn)
        return found

    def _gather(
        self, rows_HW: NDArray[np.float64], cols_HW: NDArray[np.float64], there_HW: NDArray[np.bool_]
    ) -> tuple[NDArray, NDArray[np.bool_]]:
        """The source's pixels at these whole numbers, (C, n) of those that are `there`, and which of them are valid."""
        rows, cols = (part_HW[there_HW].astype(np.int64) for part_HW in (rows_HW, cols_HW))
        top, left = int(rows.min()), int(cols.min())
        hull = Box(Interval(top, int(rows.max()) + 1), Interval(left, int(cols.max()) + 1))
        pixels_CHW, valid_HW = self._source.read(hull)
        return pixels_CHW[:, rows - top, cols - left], valid_HW[rows - top, cols - left]

    def _inside(self, rows_HW: NDArray[np.float64], cols_HW: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Which pixels (by their whole numbers) the source has."""
        height, width = self._source.info.shape
        with np.errstate(invalid="ignore"):
            found: NDArray[np.bool_] = (rows_HW >= 0) & (rows_HW < height) & (cols_HW >= 0) & (cols_HW < width)
        return found

    def release(self) -> None:
        self._source.release()

    def close(self) -> None:
        self._source.close()


class WarpedReader(_OtherGrid):
    """Labels on the grid of an `image`: each pixel is the one that holds its centre; not valid where there is none."""

    def __init__(self, source: RasterReader, image: RasterInfo) -> None:
        super().__init__(source, image, "data.warp")

    def _read_inside(self, box: Box) -> tuple[NDArray, NDArray[np.bool_]]:
        rows_HW, cols_HW = map(np.floor, self._places(box))
        there_HW = self._inside(rows_HW, cols_HW)
        found_CHW = np.zeros((self.info.bands, *box.shape), self.info.dtype)
        if there_HW.any():
            found_CHW[:, there_HW], there_HW[there_HW] = self._gather(rows_HW, cols_HW, there_HW)
        return found_CHW, there_HW


class BlendedReader(_OtherGrid):
    """An image on the grid of its labels, bilinear: of the four pixels around a pixel's centre, each by how near it is.
    Whole numbers are rounded, halves to even. Valid where all of the four that count are."""

    def __init__(self, source: RasterReader, labels: RasterInfo) -> None:
        if source.info.tiling is not None:
            raise RasterError(
                f"{source.info.path} is a tile store, cut on its own grid; warp before it is cut (tiledseg tile)"
            )
        super().__init__(source, labels, "data.warp_images")

    def _read_inside(self, box: Box) -> tuple[NDArray, NDArray[np.bool_]]:
        rows_HW, cols_HW = (part - 0.5 for part in self._places(box))  # pixels' centres being whole
        valid_HW = np.isfinite(rows_HW)
        total_CHW = np.zeros((self.info.bands, *box.shape))
        for row_HW, near_row_HW in _neighbours(rows_HW):
            for col_HW, near_col_HW in _neighbours(cols_HW):
                self._add(total_CHW, valid_HW, row_HW, col_HW, near_row_HW * near_col_HW)
        total_CHW[:, ~valid_HW] = 0
        dtype = np.dtype(self.info.dtype)
        return (np.rint(total_CHW) if dtype.kind in "iu" else total_CHW).astype(dtype), valid_HW

    def _add(
        self,
        total_CHW: NDArray[np.float64],
        valid_HW: NDArray[np.bool_],
        rows_HW: NDArray[np.float64],
        cols_HW: NDArray[np.float64],
        weights_HW: NDArray[np.float64],
    ) -> None:
        """One of the four, where it has a weight; what the source lacks is not valid."""
        wanted_HW = valid_HW & (weights_HW > 0)
        there_HW = wanted_HW & self._inside(rows_HW, cols_HW)
        valid_HW &= there_HW | ~wanted_HW
        if not there_HW.any():
            return
        pixels, valid = self._gather(rows_HW, cols_HW, there_HW)
        with np.errstate(invalid="ignore", over="ignore"):  # pixels without data may be anything
            total_CHW[:, there_HW] += np.where(valid, pixels, 0) * weights_HW[there_HW]
        valid_HW[there_HW] &= valid


def _neighbours(places_HW: NDArray[np.float64]) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """The whole numbers below and above, and how near each is, 0 to 1: to a millionth, so that places which should be
    whole are."""
    steps_HW = np.rint(places_HW * 2**20) / 2**20
    below_HW = np.floor(steps_HW)
    share_HW = steps_HW - below_HW
    return [(below_HW, 1 - share_HW), (below_HW + 1, share_HW)]
