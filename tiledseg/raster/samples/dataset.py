"""Tiles of rasters as arrays: pixels of the context, classes of the core; and checks that files fit a tiling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tiledseg.errors import RasterError
from tiledseg.geometry.box import Box
from tiledseg.geometry.tiling import Tile, Tiling
from tiledseg.raster.gdal_open import CACHE_BYTES
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.labels.label_map import LabelMap, read_labels
from tiledseg.raster.mirrored_reader import RasterReader
from tiledseg.raster.places import View, view_reader
from tiledseg.raster.samples.draws import Draw
from tiledseg.raster.statistics import Normalization, Normalizer


@dataclass(frozen=True)
class Sample:
    """A loaded tile. `x_CHW`: the network's input on the context, normalised, 0 at invalid pixels. `y_HW`: the class
    (uint8) of each core pixel, ignore_index if label or image is not valid; None without labels. `valid_HW`: validity
    of the core. `around_HW`: like `y_HW`, on the box `around`: the core and a margin, clipped to the raster. `carried`:
    input and labels on the device, set by `execution.carrying`."""

    image: int
    tile: Tile
    x_CHW: NDArray
    y_HW: NDArray[np.uint8] | None
    valid_HW: NDArray[np.bool_]
    around_HW: NDArray[np.uint8] | None = None
    around: Box | None = None
    carried: Any = None


@dataclass(eq=False)
class Dataset:
    """The tiles of `images` (readers), one tiling each, with `labels` (readers on the same grids) or None. Without
    tilings the tiles are windows drawn anywhere.

    `dtype`: of x, float32 or float64. `margin`: width in pixels of the border of labels around a core. Any number of
    threads may load at once. The readers have passed `PairReading.inspect`. Raises RasterError for a tile store that
    was cut otherwise.
    """

    images: Sequence[RasterReader]
    labels: Sequence[RasterReader] | None
    tilings: Sequence[Tiling]
    label_map: LabelMap | None
    normalization: Normalization
    dtype: DTypeLike = np.float32
    margin: int = 0

    def __post_init__(self) -> None:
        for readers in (self.images, self.labels or ()):
            for reader, tiling in zip(readers, self.tilings, strict=False):
                check_cut(reader.info, tiling)
        self._normalize = Normalizer(self.normalization, self.images[0].info.dtype, self.dtype)

    def load(self, image: int, tile: int | Tile, pixels: bool = True, draw: Draw | None = None) -> Sample:
        """Read one tile (its index, or itself) of image `image`. Raises RasterError and LabelError.

        `pixels` False: read labels and validity only; x is empty, and no halo is read. `draw`: the augmentation; the
        tile is a tile of the augmented image, equal in every pixel to one of a file of that image.
        """
        place = self.tilings[image].tiles[tile] if isinstance(tile, int) else tile
        source = image if draw is None or draw.source is None else draw.source
        view = None if draw is None else draw.view
        reader = _viewed(self.images[source], view)
        around = place.core
        if self.margin:
            sides = (side.expand(self.margin, self.margin) for side in (around.row, around.col))
            around = Box(*sides).clip(Box.of_shape(reader.info.shape))
        inner = place.context if pixels else place.core
        window = Box(inner.row.hull(around.row), inner.col.hull(around.col))
        pixels_CHW, valid_HW = reader.read(window)
        x_CHW = pixels_CHW[:, :0, :0]
        if pixels:
            slices = place.context.relative_to(window).slices
            origin = place.context.row.start, place.context.col.start
            x_CHW = self._normalize(pixels_CHW[:, *slices], valid_HW[slices], origin, reader.info)
            if draw is not None and draw.photometry is not None:
                draw.photometry.apply(x_CHW, valid_HW[slices], place.context, reader.info.shape)
        sample = Sample(image, place, x_CHW, None, valid_HW[place.core.relative_to(window).slices])
        if self.labels is None or self.label_map is None:
            return sample
        around_HW = read_labels(_viewed(self.labels[source], view, classes=True), self.label_map, around)
        around_HW[~valid_HW[around.relative_to(window).slices]] = self.label_map.ignore_index
        y_HW = around_HW[place.core.relative_to(around).slices]
        return replace(sample, y_HW=y_HW, around_HW=around_HW, around=around)

    def close(self) -> None:
        for reader in (*self.images, *(self.labels or ())):
            reader.close()


def _viewed(reader: RasterReader, view: View | None, classes: bool = False) -> RasterReader:
    return reader if view is None else view_reader(reader, view, classes)


WARN_ABOVE = 3.0
_KEPT_BYTES = CACHE_BYTES // 4
"""Largest image whose decoded blocks fit GDAL's cache beside those of other images."""
_REMEDY = "set tiling.grid and tiling.halo to the store's, or cut it again with tiledseg tile"


def layout_warning(info: RasterInfo, tiling: Tiling) -> str | None:
    """Return a warning if reading contexts decodes more than `WARN_ABOVE` times the pixels needed, of an image too
    large for GDAL's cache; else None.

    A block that a context touches is decoded whole. A tile store holds the contexts themselves.
    """
    needed = [min(side, size) for side, size in zip(tiling.context_max, info.shape, strict=True)]
    sides = zip(needed, info.block_shape, info.shape, strict=True)
    height, width = (min(side + block - 1, size) for side, block, size in sides)
    amplification = height * width / (needed[0] * needed[1])
    kept = info.height * info.width * info.bands * np.dtype(info.dtype).itemsize <= _KEPT_BYTES
    if amplification <= WARN_ABOVE or kept or info.tiling is not None:
        return None
    rows, cols = info.block_shape
    grid = f"[{tiling.grid[0]},{tiling.grid[1]}]"
    return (
        f"{info.path} is stored in blocks of {rows} x {cols} px: each context of grid {grid} decodes "
        f"{amplification:.1f} times the pixels it needs; for fast reading cut it once with "
        f"`tiledseg tile --images {info.path} --grid {grid} --output tiles.h5`"
    )


def check_cut(info: RasterInfo, tiling: Tiling) -> None:
    """Raise RasterError with both values if a tile store's cut does not fit the run's.

    Grid and cores must be equal, and the contexts must hold the network's. Any other raster fits any tiling.
    """
    cut = info.tiling
    if cut is None:
        return
    cores = [[tile.core for tile in each.tiles] for each in (cut, tiling)]
    pairs = zip(cut.tiles, tiling.tiles, strict=False)
    if cores[0] != cores[1] or not all(ours.context.contains(theirs.context) for ours, theirs in pairs):
        ours, theirs = (
            f"grid {list(each.grid)}, alignment {each.footprint.alignment}, halo ({each.footprint.before}, "
            f"{each.footprint.after}) px"
            for each in (cut, tiling)
        )
        raise RasterError(f"{info.path} was cut with {ours}, but the run needs {theirs}; {_REMEDY}")
