"""Labels of another grid, another CRS too, brought to an image's: each pixel is the one of the labels that holds its
centre.

Every centre is transformed by itself, without the approximation between points that warping tools make, so a tile's
labels do not depend on the tiles.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from rasterio.warp import transform as transform_points

from tiledseg.errors import RasterError
from tiledseg.geometry.box import Box
from tiledseg.geometry.interval import Interval
from tiledseg.raster.georeferencing import is_placed
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.mirrored_reader import RasterReader


class WarpedReader(RasterReader):
    """`source`, which it closes, on the grid of `image`; not valid where the image lies outside of it.

    Raises RasterError where one of them has no CRS or no transform.
    """

    def __init__(self, source: RasterReader, image: RasterInfo) -> None:
        for info in (image, source.info):
            if info.crs is None or not is_placed(info.transform):
                raise RasterError(f"{info.path} has no CRS, so data.warp has nothing to go by; give it one")
        self._source, self._image = source, image
        self.info = replace(
            source.info,
            height=image.height,
            width=image.width,
            crs=image.crs,
            transform=image.transform,
            ground=image.ground,
            has_mask=True,
            tiling=None,
        )

    def _read_inside(self, box: Box) -> tuple[NDArray, NDArray[np.bool_]]:
        rows_HW, cols_HW = self._places(box)
        height, width = self._source.info.shape
        there_HW = (rows_HW >= 0) & (rows_HW < height) & (cols_HW >= 0) & (cols_HW < width)
        found_CHW = np.zeros((self.info.bands, *box.shape), self.info.dtype)
        if not there_HW.any():
            return found_CHW, there_HW
        rows, cols = rows_HW[there_HW], cols_HW[there_HW]
        top, left = int(rows.min()), int(cols.min())
        hull = Box(Interval(top, int(rows.max()) + 1), Interval(left, int(cols.max()) + 1))
        pixels_CHW, valid_HW = self._source.read(hull)
        found_CHW[:, there_HW] = pixels_CHW[:, rows - top, cols - left]
        there_HW[there_HW] = valid_HW[rows - top, cols - left]
        return found_CHW, there_HW

    def _places(self, box: Box) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(row, col) in the labels of each pixel's centre; -1 where it has none."""
        rows, cols = np.mgrid[box.row.slice, box.col.slice].reshape(2, -1) + 0.5
        place, inverse = self._image.transform, ~self._source.info.transform
        xs = place.a * cols + place.b * rows + place.c
        ys = place.d * cols + place.e * rows + place.f
        if self._image.crs != self._source.info.crs:
            xs, ys = (np.array(part) for part in transform_points(self._image.crs, self._source.info.crs, xs, ys))
        with np.errstate(invalid="ignore"):
            found = inverse.d * xs + inverse.e * ys + inverse.f, inverse.a * xs + inverse.b * ys + inverse.c
        fits = np.isfinite(found[0]) & np.isfinite(found[1]) & (np.abs(found[0]) < 2**40) & (np.abs(found[1]) < 2**40)
        row, col = (np.where(fits, np.floor(part), -1).astype(np.int64).reshape(box.shape) for part in found)
        return row, col

    def release(self) -> None:
        self._source.release()

    def close(self) -> None:
        self._source.close()
