"""Information on a raster that needs no pixel: size, bands, place on the ground."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from tiledseg.errors import RasterError
from tiledseg.geometry.tiling import Tiling
from tiledseg.raster.remote import is_named

Point = tuple[float, float, float, float, float]


class GroundControl(NamedTuple):
    """Control points (row, col, x, y, z) in the CRS `crs` (WKT). `coefficients`: the RPCs' names and texts in GDAL."""

    points: tuple[Point, ...] = ()
    crs: str | None = None
    coefficients: tuple[tuple[str, str], ...] = ()


def ground_of(path: str, dataset: Any) -> GroundControl | None:
    """Return the ground control of an open raster; None where it has none. Raises RasterError for points at no
    place."""
    points, crs = dataset.gcps
    places = tuple((float(p.row), float(p.col), float(p.x), float(p.y), float(p.z or 0)) for p in points)
    for at, point in enumerate(places):
        if not all(map(math.isfinite, point)):
            raise RasterError(f"{path} has the control point {at + 1} at {point}, which is no place; remove or mend it")
    coefficients = tuple(sorted(dataset.rpcs.to_gdal().items())) if dataset.rpcs is not None else ()
    if not places and not coefficients:
        return None
    return GroundControl(places, crs.to_wkt() if crs else None, coefficients)


_OF_VIEWERS = (".aux.xml", ".ovr")

Colour = tuple[int, int, int, int]


@dataclass(frozen=True)
class RasterInfo:
    """A raster as its reader hands it out: `bands` counts the selected data bands only, alpha is none of them.

    `crs` and `transform` are rasterio's (None and the identity where the file has none). `ground` is what places a
    raster beside or instead of a transform. `nodata` is that of the first selected band. `block_shape` (rows, cols) is
    what must be decoded at once; `sequential` says that a block needs all blocks before it too (PNG, JPEG). `has_mask`:
    pixels may be invalid. `band_numbers` are the file's own, from 1. `palette` is (index, (red, green, blue, alpha))
    for each entry of a one-band raster's colour table, and `class_names` (value, name) of each of its values that has a
    name. `holds_classes`: its values are class numbers already, whatever the classes' raw values, and `drawn` says by
    what they were made of polygons, beside the file. `tiling` is the one that a tile store was cut by. `notes` are one-
    line warnings for the user; `references` is one on the files that this one names, empty where it holds all of its
    pixels. `size`: bytes of the file at `path`, 0 where it is no local one.
    """

    path: str
    height: int
    width: int
    bands: int
    dtype: str
    crs: Any = None
    transform: Any = None
    nodata: float | None = None
    block_shape: tuple[int, int] = (1, 1)
    has_mask: bool = False
    band_numbers: tuple[int, ...] = ()
    driver: str = ""
    sequential: bool = False
    palette: tuple[tuple[int, Colour], ...] | None = None
    tiling: Tiling | None = None
    files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    references: str = ""
    ground: GroundControl | None = None
    class_names: tuple[tuple[int, str], ...] = ()
    holds_classes: bool = False
    drawn: str = ""
    size: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """Return (height, width)."""
        return self.height, self.width

    @property
    def beside(self) -> tuple[str, ...]:
        """Return the local files other than its own that hold a part of it: a mask, attributes of polygons, sources of
        a VRT. Statistics and overviews that a viewer has left there change no pixel."""
        others = (file for file in self.files if file != self.path and not file.endswith(_OF_VIEWERS))
        return tuple(file for file in others if not is_named(file) and os.path.exists(file))


def reference_notes(infos: Iterable[RasterInfo]) -> list[str]:
    """Return the lines on rasters that name further files, in the order of `infos`."""
    return [info.references for info in infos if info.references]
