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
from tiledseg.raster.georeferencing import is_placed, whole_turn
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.mirrored_reader import RasterReader
from tiledseg.raster.places import interpolated, read_places

_NOWHERE = -1e9  # a place of no raster
_STEPS = 2.0**20  # a pixel: places are rounded to a millionth, so that those which should be whole are


class WarpedReader(RasterReader):
    """A reader of `source`, which it closes, on the grid of `target`.

    `nearest`: pixels are labels; else they are interpolated, whole numbers rounded, and valid where all pixels are that
    they are made of. Raises RasterError, naming `key`, where one of both has no CRS or no transform, and for a tile
    store.
    """

    def __init__(self, source: RasterReader, target: RasterInfo, key: str, nearest: bool) -> None:
        for info in (target, source.info):
            if info.crs is None or not is_placed(info.transform):
                raise RasterError(f"{info.path} has no CRS, so {key} has nothing to go by; give it one")
        if source.info.tiling is not None:
            raise RasterError(
                f"{source.info.path} is a tile store, cut on its own grid; warp before it is cut (tiledseg tile)"
            )
        self._source, self._target, self._nearest = source, target, nearest
        self.info = replace(
            source.info,
            height=target.height,
            width=target.width,
            crs=target.crs,
            transform=target.transform,
            ground=target.ground,
            has_mask=True,
        )

    def _read_inside(self, box: Box) -> tuple[NDArray, NDArray[np.bool_]]:
        dtype = np.dtype(self.info.dtype)
        pixels_CHW, valid_HW = read_places(self._source, *self._places(box), interpolated(dtype), self._nearest)
        pixels_CHW[:, ~valid_HW] = 0
        if not self._nearest and dtype.kind in "iu":
            pixels_CHW = np.rint(pixels_CHW)
        return pixels_CHW.astype(dtype, copy=False), valid_HW

    def _places(self, box: Box) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return (row, col) in the source of each pixel's centre, (H, W), in numbers of pixels."""
        source, target = self._source.info, self._target
        rows, cols = np.mgrid[box.row.slice, box.col.slice].reshape(2, -1) + 0.5
        xs, ys = target.transform @ (cols, rows)
        if target.crs != source.crs:
            xs, ys = (np.array(part) for part in transform_points(target.crs, source.crs, xs, ys))
        turn = whole_turn(source.crs)
        if turn is not None:  # longitudes a whole turn away: 181 degrees are -179
            middle = (source.transform @ (source.width / 2, source.height / 2))[0]
            xs = xs + turn * np.round((middle - xs) / turn)
        cols, rows = ~source.transform @ (xs, ys)
        with np.errstate(invalid="ignore"):
            inside = (np.abs(rows) < -_NOWHERE) & (np.abs(cols) < -_NOWHERE)
        row_HW, col_HW = (
            np.where(inside, np.rint((part - 0.5) * _STEPS) / _STEPS, _NOWHERE).reshape(box.shape)
            for part in (rows, cols)
        )
        return row_HW, col_HW

    def release(self) -> None:
        self._source.release()

    def close(self) -> None:
        self._source.close()
