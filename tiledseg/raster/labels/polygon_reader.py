"""Labels that polygons draw on an image's grid: a raster without a file.

A pixel has the class of the last polygon of the file that holds its centre, and the background where none does. Pixels
are drawn in blocks of a fixed grid, each as a whole, whatever box is asked for: a tile's labels do not depend on the
tiles.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from affine import Affine
from numpy.typing import NDArray
from rasterio.features import rasterize

from tiledseg.errors import RasterError
from tiledseg.geometry.box import Box
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.labels.polygons import Polygons, vector_files
from tiledseg.raster.mirrored_reader import RasterReader

BLOCK = 256
_KEPT = 256  # blocks: 16 MiB


class PolygonReader(RasterReader):
    """The numbers `drawn` (uint8, one a polygon) on the grid of `image`, and `background` elsewhere. `names`: of the
    classes; `how`: by what the numbers were found."""

    def __init__(
        self,
        path: str,
        image: RasterInfo,
        polygons: Polygons,
        drawn: Sequence[int],
        background: int,
        names: Sequence[str] = (),
        how: str = "",
    ) -> None:
        self._polygons, self._drawn, self._background = polygons, drawn, background
        self._bounds = polygons.bounds.reshape(-1, 4)
        self._blocks: OrderedDict[tuple[int, int], NDArray[np.uint8]] = OrderedDict()
        self._lock = threading.Lock()
        self.info = RasterInfo(
            path=path,
            height=image.height,
            width=image.width,
            bands=1,
            dtype="uint8",
            crs=image.crs,
            transform=image.transform,
            ground=image.ground,
            block_shape=(BLOCK, BLOCK),
            band_numbers=(1,),
            driver="polygons",
            files=vector_files(path),
            class_names=tuple(enumerate(names)),
            holds_classes=True,
            drawn=how,
        )

    @property
    def count(self) -> int:
        """Polygons that touch the image."""
        return int(np.count_nonzero(self._touch(Box.of_shape(self.info.shape))))

    def _touch(self, box: Box) -> NDArray[np.bool_]:
        left, lowest, right, highest = self._bounds.T
        rows = (-highest < box.row.stop) & (-lowest > box.row.start)
        return rows & (left < box.col.stop) & (right > box.col.start)

    def _read_inside(self, box: Box) -> tuple[NDArray, NDArray[np.bool_]]:
        found_HW = np.empty(box.shape, np.uint8)
        for row in range(box.row.start // BLOCK, -(-box.row.stop // BLOCK)):
            for col in range(box.col.start // BLOCK, -(-box.col.stop // BLOCK)):
                block = Box.of_shape((BLOCK, BLOCK)).shift(row * BLOCK, col * BLOCK)
                there = block.clip(box)
                found_HW[there.relative_to(box).slices] = self._block(row, col, block)[there.relative_to(block).slices]
        return found_HW[None], np.ones(box.shape, np.bool_)

    def _block(self, row: int, col: int, block: Box) -> NDArray[np.uint8]:
        with self._lock:
            found = self._blocks.get((row, col))
            if found is not None:
                self._blocks.move_to_end((row, col))
                return found
        found = self._draw(block)
        with self._lock:
            self._blocks[row, col] = found
            if len(self._blocks) > _KEPT:
                self._blocks.popitem(last=False)
        return found

    def _draw(self, block: Box) -> NDArray[np.uint8]:
        wanted = np.flatnonzero(self._touch(block))
        if not wanted.size:
            return np.full(block.shape, self._background, np.uint8)
        # Upwards, as rasters with north above are: whose a centre on the edge of two polygons is follows from it.
        shapes = [(self._polygons.shapes[at], self._drawn[at]) for at in wanted.tolist()]
        place = Affine(1, 0, block.col.start, 0, -1, -block.row.start)
        drawn_HW: NDArray[np.uint8] = rasterize(
            shapes, block.shape, fill=self._background, transform=place, all_touched=False, dtype="uint8"
        )
        return drawn_HW

    def release(self) -> None:
        with self._lock:
            self._blocks.clear()

    def close(self) -> None:
        self.release()


def check_any(paths: Sequence[str], counts: Sequence[int]) -> None:
    """Raise RasterError where polygons were read, and none lies in any image."""
    if counts and not any(counts):
        raise RasterError(
            f"{paths[0]} has no polygon in the image, nor in any other; compare its CRS and its place with theirs"
        )
