"""Polygons of a class map in a GeoPackage, for QGIS and other programs: needs the extra `vector`.

A polygon is an area of one class, 4-connected: pixels touch by their sides. GDAL outlines the finished plain file of
the map in memory. The GeoPackage is made in a local temporary folder, because SQLite needs locks that some shared file
systems lack, and is then copied.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
import rasterio
from rasterio.features import shapes

from tiledseg.errors import ConfigError, OutputError, RasterError, first_line, require
from tiledseg.raster.info import RasterInfo, is_placed
from tiledseg.raster.labels.classes import ClassRecord
from tiledseg.raster.labels.polygons import STYLES, check_begin
from tiledseg.system.files import write_error, writing
from tiledseg.system.outputs import Output, Unfinished, whole

LAYER, FIELDS = "classes", ("class", "name", "pixels")
"""The one layer, and the fields of a polygon: number and name of its class, and its pixels."""

_BEAT_EVERY = 1 << 14  # polygons
JOURNALS = ("-journal", "-wal", "-shm")
"""Endings of SQLite's journals: it would apply those of an older file to a new one."""


def polygons_output(key: str, path: str | Path) -> Output:
    """Return the files that writing polygons touches. Raises ConfigError for another ending than .gpkg, and without the
    extra `vector`; OutputError if an existing file has other layers or fields, which would be lost."""
    require(key, "vector", "pyogrio", "shapely")
    import pyogrio

    path = Path(path)
    if path.suffix.lower() != ".gpkg":
        raise ConfigError(f"{key} is {path}; give a name that ends in .gpkg: polygons are written as a GeoPackage")
    if path.is_file():
        try:
            check_begin(str(path))  # GDAL would open any format
            layers = [str(name) for name, _ in pyogrio.list_layers(path)]
            own = LAYER not in layers or {*pyogrio.read_info(path, layer=LAYER)["fields"]} == {*FIELDS}
        except (RasterError, pyogrio.errors.DataSourceError) as error:
            reason = first_line(error)
            raise OutputError(f"{key} {path} is there and is no GeoPackage: {reason}; choose another") from None
        others = [name for name in layers if name != STYLES and not (own and name == LAYER)]
        if others:
            raise OutputError(f"{key} {path} holds the layer {others[0]}, which would be lost; choose another file")
    return whole(key, path, sidecars=JOURNALS)


def write_polygons(
    output: Unfinished,
    plain: Path,
    info: RasterInfo,
    legend: Sequence[ClassRecord],
    classes: Collection[int],
    beat: Callable[[], None] = lambda: None,
) -> None:
    """Write the areas of `classes` in the class map `plain`; `Unfinished.publish(JOURNALS)` ends the file.

    Coordinates are those of the raster `info`; without a transform, its pixels, without a CRS. Raises WriteError.
    """
    import pyogrio
    import shapely
    from shapely.geometry import shape

    a, b, c, d, e, f = tuple(info.transform)[:6] if is_placed(info.transform) else (1, 0, 0, 0, 1, 0)
    crs = info.crs.to_wkt() if info.crs and is_placed(info.transform) else None
    found = []
    # Without georeferencing, the outlines are in whole pixels.
    with writing(output.path), rasterio.open(plain, driver="GTiff", GEOREF_SOURCES="NONE") as dataset:
        for at, (outline, number) in enumerate(shapes(rasterio.band(dataset, 1), connectivity=4)):
            if at % _BEAT_EVERY == 0:
                beat()
            if int(number) in classes:
                found.append((shape(outline), int(number)))
        outlines = np.array([outline for outline, _ in found], object)
        numbers, pixels = np.array([number for _, number in found], np.int32), shapely.area(outlines).astype(np.int64)
        placed = shapely.transform(outlines, lambda points: points @ np.array([[a, d], [b, e]]) + np.array([c, f]))
        names = np.array([one.name for one in legend], object)[numbers]
        fields = dict(zip(FIELDS, (numbers, names, pixels), strict=True))
        output.check_ours()
        with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
            warnings.simplefilter("ignore")  # a CRS may be missing
            made, how = os.path.join(folder, "made.gpkg"), {"driver": "GPKG", "geometry_type": "Polygon", "crs": crs}
            try:
                pyogrio.raw.write(made, shapely.to_wkb(placed), list(fields.values()), list(fields), layer=LAYER, **how)
            except RuntimeError as error:
                raise write_error(output.path, error) from error
            shutil.copyfile(made, output.file())
