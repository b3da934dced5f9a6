"""The one interface of every raster: pixels and validity of any box, mirrored beyond the raster's border."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tiledseg.errors import RasterError
from tiledseg.geometry.box import Box
from tiledseg.geometry.interval import Interval
from tiledseg.raster.info import RasterInfo


class RasterReader(ABC):
    """Reads boxes of one raster. Any number of threads may read at once; each has a handle of its own meanwhile."""

    info: RasterInfo

    def read(self, box: Box) -> tuple[NDArray, NDArray[np.bool_]]:
        """Pixels (C, H, W) in the raster's own dtype and validity (H, W) of `box`, in absolute raster positions.

        Where the box passes the border, pixels and validity are mirrored as by numpy's pad mode 'symmetric' (the edge
        pixel is repeated, period 2n, at any distance). Raises RasterError for an empty box, or where the file
        cannot be read.
        """
        if box.area == 0:
            raise RasterError(f"an empty box {box.shape} asked of {self.info.path}; give at least one pixel")
        if Box.of_shape(self.info.shape).contains(box):
            return self._read_inside(box)
        rows, row_hull = _mirrored(box.row, self.info.height)
        cols, col_hull = _mirrored(box.col, self.info.width)
        pixels_CHW, valid_HW = self._read_inside(Box(row_hull, col_hull))
        pixels_CHW = np.take(np.take(pixels_CHW, rows, axis=1), cols, axis=2)
        return pixels_CHW, np.take(np.take(valid_HW, rows, axis=0), cols, axis=1)

    @abstractmethod
    def _read_inside(self, box: Box) -> tuple[NDArray, NDArray[np.bool_]]:
        """`read` for a box that lies within the raster."""

    @abstractmethod
    def release(self) -> None:
        """Close the handles that no thread is using; the next read opens one again."""

    @abstractmethod
    def close(self) -> None:
        """Close every handle; reading afterwards raises RasterError."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _mirrored(positions: Interval, size: int) -> tuple[NDArray[np.intp], Interval]:
    """Where each position of the mirrored raster is found: offsets into the returned interval of real positions."""
    folded = np.arange(positions.start, positions.stop) % (2 * size)
    found = np.where(folded < size, folded, 2 * size - 1 - folded)
    hull = Interval(int(found.min()), int(found.max()) + 1)
    return found - hull.start, hull
