"""A raster of which only a part counts: elsewhere its pixels are not valid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tiledseg.config.checks import shown
from tiledseg.errors import ConfigError
from tiledseg.geometry.box import Box
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.mirrored_reader import RasterReader
from tiledseg.raster.names import VECTOR_ENDINGS, is_vector

if TYPE_CHECKING:
    from tiledseg.raster.labels.polygon_reader import PolygonReader

Inside = Callable[[Box], NDArray[np.bool_]]
"""Which pixels of a box within the raster count, (height, width)."""


class MaskedReader(RasterReader):
    """Reads `source`, which it closes, and `others` with it."""

    def __init__(self, source: RasterReader, masks: Sequence[Inside], others: Sequence[RasterReader] = ()) -> None:
        self._source, self._masks, self._all = source, masks, (source, *others)
        self.info = replace(source.info, has_mask=True)

    def _read_inside(self, box: Box) -> tuple[NDArray, NDArray[np.bool_]]:
        pixels_CHW, valid_HW = self._source.read(box)
        for inside in self._masks:
            valid_HW = valid_HW & inside(box)
        return pixels_CHW, valid_HW

    def counts(self, box: Box) -> bool:
        """Whether a pixel of a box within the raster may count."""
        found_HW = np.ones(box.shape, np.bool_)
        for inside in self._masks:
            found_HW &= inside(box)
        return bool(found_HW.any())

    def release(self) -> None:
        for reader in self._all:
            reader.release()

    def close(self) -> None:
        for reader in self._all:
            reader.close()


def area_reader(path: str, image: RasterInfo) -> PolygonReader:
    """1 in the polygons of a vector file, and 0 elsewhere, on the grid of an image."""
    from tiledseg.raster.labels.polygon_reader import PolygonReader
    from tiledseg.raster.labels.polygons import read_polygons

    if not is_vector(path):
        raise ConfigError(f"data.area is {shown(path)}; give a file of polygons ({', '.join(VECTOR_ENDINGS)})")
    polygons = read_polygons(path, image)
    return PolygonReader(path, image, polygons, [1] * len(polygons.numbers), 0)
