"""A raster seen through a map of places: reflected, turned, moved, resized, rotated, without a file of its own.

A view says where in the raster each row and column lies that it shows. Along either dim that is a line, `start + step *
position`, before which positions may be rotated about a point. Every box of a view is read from the raster by these
positions alone, so tiles, blocks and halos of a view fit together as those of a raster on a disk do. Pixels beyond the
raster are not valid.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiledseg.geometry.box import Box, Interval
from tiledseg.raster.mirrored_reader import RasterReader
from tiledseg.raster.places import interpolated, read_places


class Rotation(NamedTuple):
    """A rotation of positions by an angle of this cosine and sine about the position (`row`, `col`)."""

    cos: float
    sin: float
    row: float
    col: float

    def about(self, row: float, col: float) -> Rotation:
        """Return the same angle about another position."""
        return Rotation(self.cos, self.sin, row, col)

    def counted_from(self, row: int, col: int) -> Rotation:
        """Return the same rotation of positions that are counted from (row, col)."""
        return self.about(self.row - row, self.col - col)

    @property
    def back(self) -> Rotation:
        """Return the rotation that undoes this one."""
        return Rotation(self.cos, -self.sin, self.row, self.col)

    def moved(self, row: Any, col: Any) -> tuple[Any, Any]:
        """Return rotated positions: numbers, or arrays, which are broadcast."""
        down, right = row - self.row, col - self.col
        return self.row + (self.cos * down - self.sin * right), self.col + (self.sin * down + self.cos * right)


class Line(NamedTuple):
    """The raster's places of a view's positions along one dim: `start + step * position`, at centres of pixels."""

    start: float
    step: float

    @property
    def on_pixels(self) -> bool:
        """Return True if each position of the view is a pixel of the raster: whole numbers, one after the other."""
        return abs(self.step) == 1 and self.start == int(self.start)

    def shift(self, by: int) -> Line:
        """Return the line of positions that are counted from position `by`."""
        return Line(self.start + self.step * by, self.step)

    def source(self, positions: Interval) -> Interval:
        """Return the pixels of positions of a line on pixels, in the raster's order."""
        first = int(self.start + self.step * positions.start)
        last = int(self.start + self.step * (positions.stop - 1))
        return Interval(min(first, last), max(first, last) + 1)


@dataclass(frozen=True)
class View:
    """`shape`: (height, width) that it shows. `row`, `col`: lines to the raster's rows and columns. `transposed`: the
    raster's rows run along the view's columns, and `row` takes the view's columns. `rotation`: what positions of the
    view are moved by before the lines take them."""

    shape: tuple[int, int]
    row: Line
    col: Line
    transposed: bool = False
    rotation: Rotation | None = None

    @property
    def on_pixels(self) -> bool:
        return self.rotation is None and self.row.on_pixels and self.col.on_pixels

    @property
    def is_whole(self) -> bool:
        """Return True if it shows places as they are."""
        return not self.transposed and self.row == self.col == (0, 1) and self.rotation is None

    def find(self, row: float, col: float) -> tuple[float, float]:
        """Return the position (row, col) in the view, or beyond it, of a place of the raster."""
        along = (row - self.row.start) / self.row.step, (col - self.col.start) / self.col.step
        place = along[::-1] if self.transposed else along
        return self.rotation.back.moved(*place) if self.rotation else place

    def window(self, row: int, col: int, shape: tuple[int, int]) -> View:
        """Return the view of a box of `shape` that begins at (row, col)."""
        along_rows, along_cols = (col, row) if self.transposed else (row, col)
        rotation = self.rotation and self.rotation.counted_from(row, col)
        lines = self.row.shift(along_rows), self.col.shift(along_cols)
        return View(shape, *lines, self.transposed, rotation)

    def places(self, box: Box) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the rows and columns in the raster of the positions of `box`, which broadcast to (height, width)."""
        rows = np.arange(box.row.start, box.row.stop, dtype=np.float64)[:, None]
        cols = np.arange(box.col.start, box.col.stop, dtype=np.float64)
        rows, cols = self.rotation.moved(rows, cols) if self.rotation else (rows, cols)
        along_rows, along_cols = (cols, rows) if self.transposed else (rows, cols)
        return self.row.start + self.row.step * along_rows, self.col.start + self.col.step * along_cols


def whole(shape: tuple[int, int]) -> View:
    """Return the view that changes nothing."""
    return View(shape, Line(0, 1), Line(0, 1))


class ViewReader(RasterReader):
    """A reader of a view of `source`, which stays its owner's to close.

    `classes`: pixels are class numbers, and the nearest is taken where the view resizes. Else they are interpolated
    (bilinear), as float32, or float64 where the raster has more than float32's 24 bits. Interpolated ones are valid
    where all that they were made of is.
    """

    def __init__(self, source: RasterReader, view: View, classes: bool = False) -> None:
        self._source, self._view = source, view
        self._nearest = classes or view.on_pixels
        dtype = source.info.dtype if self._nearest else str(interpolated(np.dtype(source.info.dtype)))
        self.info = replace(source.info, height=view.shape[0], width=view.shape[1], dtype=dtype)

    def _read_inside(self, box: Box) -> tuple[NDArray, NDArray[np.bool_]]:
        return read_places(self._source, *self._view.places(box), self.info.dtype, self._nearest)

    def release(self) -> None:
        """Leave the handles to the source's owner."""

    def close(self) -> None:
        """Leave closing to the source's owner."""
