"""Polygons of a class map in a GeoPackage, as QGIS and other programs open it: needs the extra `vector`.

A polygon is an area of one class whose pixels touch by their sides (connectivity 4: areas that only touch at a corner
are two). GDAL outlines the finished plain file of the map; in memory are the map's outlines.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
from numpy.typing import NDArray
from rasterio.features import shapes

from tiledseg.errors import ConfigError, OutputError, RasterError, first_line, install
from tiledseg.raster.info import RasterInfo, is_placed
from tiledseg.raster.labels.classes import ClassRecord
from tiledseg.raster.labels.polygons import check_begin
from tiledseg.system.outputs import Output, temporary
from tiledseg.system.run_lock import check_unclaimed, taken
from tiledseg.system.writing import flush, write_error, writing

LAYER = "classes"
"""The one layer: a feature is a polygon, with its `class` (number), its `name` and its `pixels`."""

_FEATURES_AT_ONCE = 1 << 14


def polygons_output(key: str, path: str | Path) -> Output:
    """Return the files that writing polygons touches. Raises ConfigError for a name that is no GeoPackage's, and
    without the extra `vector`, OutputError where an older file holds other layers, which would be lost."""
    try:
        import pyogrio
        import shapely  # noqa: F401
    except ImportError:
        raise ConfigError(f"{key} needs pyogrio and shapely: {install('vector')}") from None
    path = Path(path)
    if path.suffix.lower() != ".gpkg":
        raise ConfigError(f"{key} is {path}; give a name that ends in .gpkg: polygons are written as a GeoPackage")
    if path.is_file():
        try:
            check_begin(str(path))  # GDAL would open it as whatever it is
            layers = [str(name) for name, _ in pyogrio.list_layers(path)]
        except (RasterError, pyogrio.errors.DataSourceError) as error:
            reason = first_line(error)
            raise OutputError(f"{key} {path} is there and is no GeoPackage: {reason}; choose another") from None
        others = [name for name in layers if name != LAYER]
        if others:
            raise OutputError(f"{key} {path} holds the layer {others[0]}, which would be lost; choose another file")
    part = temporary(path)
    return Output(key, path, (_claim_path(path), *_with_journals(part), *_with_journals(path)[1:]))


@dataclass(frozen=True)
class PolygonFile:
    """A GeoPackage that is not whole yet. SQLite's own file comes late, so a job holds an empty one from its start;
    `inode` tells it from another job's."""

    path: Path
    inode: int

    @property
    def part(self) -> Path:
        return temporary(self.path)

    @property
    def claim(self) -> Path:
        return _claim_path(self.path)


def begin(path: str | Path) -> PolygonFile:
    """Make the empty file that holds the place of `path`, after `check_outputs` of `polygons_output`."""
    claim = _claim_path(path)
    with writing(path):
        check_unclaimed(claim, path)
        claim.unlink(missing_ok=True)
        claim.touch()
        return PolygonFile(Path(path), claim.stat().st_ino)


def publish_polygons(file: PolygonFile) -> None:
    """Give the polygons their name. On one rank, after `write_polygons`."""
    with writing(file.path):
        if file.claim.stat().st_ino != file.inode:
            raise taken(file.path)
        flush(file.part)
        os.replace(file.part, file.path)
        file.claim.unlink()


def discard_polygons(file: PolygonFile) -> None:
    """Remove the unfinished file; do nothing where it is gone or another job's."""
    with suppress(OSError):
        if file.claim.stat().st_ino == file.inode:
            _remove_unfinished(file.part)
            file.claim.unlink()


def _claim_path(path: str | Path) -> Path:
    part = temporary(path)
    return part.with_name(f"{part.name}.claim")


def _with_journals(path: Path) -> list[Path]:
    """Return a GeoPackage's name, and those of SQLite's files beside an unfinished one."""
    return [path.with_name(path.name + end) for end in ("", "-journal", "-wal", "-shm")]


def _remove_unfinished(part: Path) -> None:
    for name in _with_journals(part):
        name.unlink(missing_ok=True)


def write_polygons(
    file: PolygonFile,
    plain: Path,
    info: RasterInfo,
    legend: Sequence[ClassRecord],
    classes: Collection[int],
    least_pixels: float = 0.0,
    beat: Callable[[], None] = lambda: None,
) -> None:
    """Outline the areas of `classes` with at least `least_pixels` in the class map `plain`, into the unfinished `file`.

    Polygons are placed as the raster `info`; without a transform they are in its pixels, without a CRS. Raises
    WriteError.
    """
    import shapely

    names = np.array([record.name for record in legend], object)
    a, b, c, d, e, f = tuple(info.transform)[:6] if is_placed(info.transform) else (1, 0, 0, 0, 1, 0)
    crs = info.crs.to_wkt() if info.crs and is_placed(info.transform) else None

    def append(outlines: NDArray[Any], numbers: NDArray[np.int32], more: bool) -> None:
        pixels = shapely.area(outlines).astype(np.int64)
        placed = shapely.transform(outlines, lambda points: points @ np.array([[a, d], [b, e]]) + np.array([c, f]))
        _append(file, shapely.to_wkb(placed), [numbers, names[numbers], pixels], crs, more)

    with writing(file.path), rasterio.open(plain, driver="GTiff", GEOREF_SOURCES="NONE") as dataset:  # in whole pixels
        _remove_unfinished(file.part)
        append(np.empty(0, object), np.empty(0, np.int32), more=False)
        outlined = shapes(rasterio.band(dataset, 1), connectivity=4)
        while batch := list(islice(outlined, _FEATURES_AT_ONCE)):
            beat()
            of_classes = [(shape["coordinates"], int(number)) for shape, number in batch if int(number) in classes]
            outlines = _polygons([coordinates for coordinates, _ in of_classes])
            numbers = np.array([number for _, number in of_classes], np.int32)
            large = shapely.area(outlines) >= least_pixels
            if large.any():
                append(outlines[large], numbers[large], more=True)


def _polygons(coordinates: Sequence[Sequence[Sequence[Any]]]) -> NDArray[Any]:
    """Make shapely's polygons of the rings of each."""
    import shapely

    rings = [ring for polygon in coordinates for ring in polygon]
    if not rings:
        return np.empty(0, object)
    points = np.concatenate([np.asarray(ring, float) for ring in rings])
    lines = shapely.linearrings(points, indices=np.repeat(np.arange(len(rings)), [len(ring) for ring in rings]))
    return shapely.polygons(lines, indices=np.repeat(np.arange(len(coordinates)), [len(one) for one in coordinates]))


def _append(file: PolygonFile, wkb: NDArray[Any], fields: list[NDArray[Any]], crs: str | None, more: bool) -> None:
    """Append features to the layer, or make it where `more` is False."""
    import pyogrio

    names = ["class", "name", "pixels"]
    options = {"layer": LAYER, "driver": "GPKG", "geometry_type": "Polygon", "crs": crs, "append": more}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the unfinished file's name does not end in .gpkg; a CRS may be missing
        try:
            pyogrio.raw.write(file.part, wkb, fields, names, **options)
        except (pyogrio.errors.DataSourceError, pyogrio.errors.DataLayerError, RuntimeError) as error:
            raise write_error(file.path, error) from error


def pixels_of(area: str | None, info: RasterInfo) -> float:
    """Return the pixels of a least area: `12px`, or square units of the raster's CRS (metres, say). Raises
    ConfigError."""
    if area is None:
        return 0.0
    text, in_pixels = (area[:-2], True) if area.endswith("px") else (area, False)
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise ConfigError(f"--polygons-minimum-area is {area}; give an area of 0 or more, as 50, or pixels, as 12px")
    if in_pixels:
        return number
    if not is_placed(info.transform) or not info.crs or not info.crs.is_projected:
        raise ConfigError(
            f"--polygons-minimum-area is {area}, but {info.path} has no lengths (it is in degrees, or not placed); "
            "give it in pixels, as 12px"
        )
    a, b, _, d, e, _ = tuple(info.transform)[:6]
    least = number / abs(a * e - b * d)
    return round(least) if math.isclose(least, round(least), rel_tol=1e-9) else least  # areas are whole pixels


def polygon_notes(info: RasterInfo) -> tuple[str, ...]:
    """Return a warning where polygons of this raster have no place."""
    if is_placed(info.transform):
        return ()
    return (f"polygons of {info.path}, which no transform places, are in pixels (col, row) without a CRS",)
