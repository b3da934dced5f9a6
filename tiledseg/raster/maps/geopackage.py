"""Polygons of a class map in a GeoPackage, as QGIS and other programs open it: needs the extra `vector`."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import rasterio
from numpy.typing import NDArray
from rasterio.windows import Window

from tiledseg.errors import ConfigError, OutputError, RasterError, first_line, install
from tiledseg.geometry.box import Box
from tiledseg.raster.georeferencing import is_placed
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.labels.classes import ClassRecord
from tiledseg.raster.labels.polygons import check_begin
from tiledseg.system.claim import check_unclaimed, taken
from tiledseg.system.outputs import Output, temporary
from tiledseg.system.writing import flush, write_error, writing

if TYPE_CHECKING:
    from tiledseg.raster.maps.outlines import ClassPolygon

LAYER = "classes"
"""The one layer: a feature is a polygon, with its `class` (number), its `name` and its `pixels`."""

STRIP_ROWS = 512
_AT_ONCE = 1 << 14  # features
_FILES_BESIDE = ("-journal", "-wal", "-shm")  # SQLite's, of an unfinished file


def check_vector(key: str) -> None:
    """Raise ConfigError where what polygons need is not installed; `key` is the flag that wants them."""
    try:
        import pyogrio  # noqa: F401
        import shapely  # noqa: F401
    except ImportError:
        raise ConfigError(f"{key} needs pyogrio and shapely: {install('vector')}") from None


def polygons_output(key: str, path: str | Path) -> Output:
    """The files that writing polygons touches. Raises ConfigError for a name that is no GeoPackage's, OutputError where
    an older file holds other layers, which would be lost."""
    if Path(path).suffix.lower() != ".gpkg":
        raise ConfigError(f"{key} is {path}; give a name that ends in .gpkg: polygons are written as a GeoPackage")
    _check_older(key, Path(path))
    part = temporary(path)
    return Output(key, path, (part, _claim_path(path), *_beside(part), *_beside(Path(path))))


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
    """The empty file that holds the place of `path`. The caller has asked `check_outputs` about `polygons_output`."""
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
    """Remove the unfinished file; nothing where it is gone or another job's."""
    with suppress(OSError):
        if file.claim.stat().st_ino == file.inode:
            _remove_unfinished(file.part)
            file.claim.unlink()


def _claim_path(path: str | Path) -> Path:
    part = temporary(path)
    return part.with_name(f"{part.name}.claim")


def _beside(path: Path) -> list[Path]:
    return [path.with_name(path.name + end) for end in _FILES_BESIDE]


def _check_older(key: str, path: Path) -> None:
    import pyogrio

    if not path.is_file():
        return
    try:
        check_begin(str(path))  # GDAL would open it as whatever it is
        layers = [str(name) for name, _ in pyogrio.list_layers(path)]
    except (RasterError, pyogrio.errors.DataSourceError) as error:
        raise OutputError(f"{key} {path} is there and is no GeoPackage: {first_line(error)}; choose another") from None
    others = [name for name in layers if name != LAYER]
    if others:
        raise OutputError(f"{key} {path} holds the layer {others[0]}, which would be lost; choose another file")


def strips(plain: Path) -> Iterator[NDArray[np.uint8]]:
    """The first band of a raster, `STRIP_ROWS` at a time."""
    with rasterio.open(plain, driver="GTiff") as dataset:
        for block in Box.of_shape(dataset.shape).blocks(STRIP_ROWS, dataset.width):
            yield dataset.read(1, window=Window(0, block.row.start, dataset.width, block.height))


def write_polygons(
    file: PolygonFile,
    polygons: Iterable[ClassPolygon],
    info: RasterInfo,
    legend: Sequence[ClassRecord],
    least_pixels: float = 0.0,
    beat: Callable[[], None] = lambda: None,
) -> int:
    """Write `polygons` of at least so many pixels into the unfinished `file`, placed as the raster `info`; how many.

    A raster without a transform has polygons in its pixels, without a CRS. Raises WriteError.
    """
    count, waiting = 0, (one for one in polygons if one.outline.area >= least_pixels)
    with writing(file.path):
        _remove_unfinished(file.part)
        while batch := list(islice(waiting, _AT_ONCE)):
            _append(file, batch, info, legend, more=count > 0)
            count += len(batch)
            beat()
        if count == 0:
            _append(file, [], info, legend, more=False)
    return count


def _remove_unfinished(part: Path) -> None:
    for name in (part, *_beside(part)):
        name.unlink(missing_ok=True)


def _append(
    file: PolygonFile, batch: Sequence[ClassPolygon], info: RasterInfo, legend: Sequence[ClassRecord], more: bool
) -> None:
    import pyogrio
    import shapely

    outlines = np.array([one.outline for one in batch], object)
    numbers = np.array([one.number for one in batch], np.int32)
    names = np.array([legend[number].name for number in numbers], object)
    pixels = shapely.area(outlines).astype(np.int64) if batch else np.empty(0, np.int64)
    place = info.transform if is_placed(info.transform) else None
    if place is not None:
        outlines = shapely.transform(outlines, _onto(place)) if batch else outlines
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the unfinished file's name does not end in .gpkg; a CRS may be missing
        try:
            pyogrio.raw.write(
                file.part,
                shapely.to_wkb(outlines) if batch else np.empty(0, object),
                [numbers, names, pixels],
                ["class", "name", "pixels"],
                layer=LAYER,
                driver="GPKG",
                geometry_type="Polygon",
                crs=info.crs.to_wkt() if info.crs and place is not None else None,
                append=more,
            )
        except (pyogrio.errors.DataSourceError, pyogrio.errors.DataLayerError, RuntimeError) as error:
            raise write_error(file.path, error) from error


def _onto(place: Any) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    """From (col, row) to the ground."""
    a, b, c, d, e, f = tuple(place)[:6]
    return lambda points: points @ np.array([[a, d], [b, e]]) + np.array([c, f])


def pixels_of(area: str | None, info: RasterInfo) -> float:
    """Pixels of a least area: `12px`, or square units of the raster's CRS (metres, say). Raises ConfigError."""
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
    """What polygons of this raster lack."""
    if is_placed(info.transform):
        return ()
    return (f"polygons of {info.path}, which no transform places, are in pixels (col, row) without a CRS",)


def open_polygons(plain: Path, ignored: int, beat: Callable[[], None]) -> Iterator[Any]:
    """The polygons of the finished plain file of a class map; a `beat` a strip."""
    from tiledseg.raster.maps.outlines import class_polygons

    def beating() -> Iterator[NDArray[np.uint8]]:
        for strip_HW in strips(plain):
            beat()
            yield strip_HW

    return class_polygons(beating(), ignored)
