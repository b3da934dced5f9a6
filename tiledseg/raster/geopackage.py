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
from itertools import islice
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

import numpy as np
import rasterio
from numpy.typing import NDArray
from rasterio.features import shapes

from tiledseg.errors import ConfigError, OutputError, RasterError, first_line, install
from tiledseg.raster.info import RasterInfo, is_placed
from tiledseg.raster.labels.classes import ClassRecord
from tiledseg.raster.labels.polygons import STYLES, check_begin
from tiledseg.system.files import flush, temporary, write_error, writing
from tiledseg.system.outputs import Output, whole
from tiledseg.system.run_lock import UnfinishedFile, check_unclaimed

LAYER, FIELDS = "classes", ("class", "name", "pixels")
"""The one layer, and the fields of a polygon: number and name of its class, and its pixels."""

_FEATURES_AT_ONCE = 1 << 14
_JOURNALS = ("-journal", "-wal", "-shm")


def polygons_output(key: str, path: str | Path) -> Output:
    """Return the files that writing polygons touches. Raises ConfigError for another ending than .gpkg, and without the
    extra `vector`; OutputError if an existing file has other layers or fields, which would be lost."""
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
            check_begin(str(path))  # GDAL would open any format
            layers = [str(name) for name, _ in pyogrio.list_layers(path)]
            own = LAYER not in layers or {*pyogrio.read_info(path, layer=LAYER)["fields"]} == {*FIELDS}
        except (RasterError, pyogrio.errors.DataSourceError) as error:
            reason = first_line(error)
            raise OutputError(f"{key} {path} is there and is no GeoPackage: {reason}; choose another") from None
        others = [name for name in layers if name != STYLES and not (own and name == LAYER)]
        if others:
            raise OutputError(f"{key} {path} holds the layer {others[0]}, which would be lost; choose another file")
    return whole(key, path, sidecars=_JOURNALS)


class PolygonFile(UnfinishedFile):
    """An unfinished GeoPackage: an empty file that reserves its name."""


def begin(path: str | Path) -> PolygonFile:
    """Create the empty file that reserves `path`, after `check_outputs` of `polygons_output`."""
    part = temporary(path)
    with writing(path):
        check_unclaimed(part, path)
        part.unlink(missing_ok=True)
        part.touch()
        return PolygonFile(Path(path), part, part.stat().st_ino)


def publish_polygons(file: PolygonFile) -> None:
    """Give the finished polygons their final name, on one rank."""
    with writing(file.path):
        file.check_ours()
        flush(file.temporary)
        for end in _JOURNALS:  # SQLite would apply the journals of an older file to the new one
            file.path.with_name(file.path.name + end).unlink(missing_ok=True)
        os.replace(file.temporary, file.path)


def write_polygons(
    file: PolygonFile,
    plain: Path,
    info: RasterInfo,
    legend: Sequence[ClassRecord],
    classes: Collection[int],
    beat: Callable[[], None] = lambda: None,
) -> None:
    """Write the areas of `classes` in the class map `plain` into the unfinished `file`, with a style for QGIS.

    Coordinates are those of the raster `info`; without a transform, its pixels, without a CRS. Raises WriteError.
    """
    import pyogrio
    import shapely
    from shapely.geometry import shape

    a, b, c, d, e, f = tuple(info.transform)[:6] if is_placed(info.transform) else (1, 0, 0, 0, 1, 0)
    crs = info.crs.to_wkt() if info.crs and is_placed(info.transform) else None
    batches: list[tuple[NDArray[Any], ...]] = [(np.empty(0, object), np.empty(0, np.int32), np.empty(0, np.int64))]
    with writing(file.path), rasterio.open(plain, driver="GTiff", GEOREF_SOURCES="NONE") as dataset:  # in whole pixels
        outlined = shapes(rasterio.band(dataset, 1), connectivity=4)
        while batch := list(islice(outlined, _FEATURES_AT_ONCE)):
            beat()
            of_classes = [(shape(outline), int(number)) for outline, number in batch if int(number) in classes]
            outlines = np.array([outline for outline, _ in of_classes], object)
            pixels = shapely.area(outlines)
            placed = shapely.transform(outlines, lambda points: points @ np.array([[a, d], [b, e]]) + np.array([c, f]))
            numbers = np.array([number for _, number in of_classes], np.int32)
            batches.append((shapely.to_wkb(placed), numbers, pixels.astype(np.int64)))
        wkb, numbers, pixels = (np.concatenate(column) for column in zip(*batches, strict=True))
        names = np.array([one.name for one in legend], object)[numbers]
        fields = dict(zip(FIELDS, (numbers, names, pixels), strict=True))
        file.check_ours()
        style = _style(legend, sorted(classes))
        row = [np.array([value], object if isinstance(value, str) else bool) for value in style.values()]
        with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
            warnings.simplefilter("ignore")  # a CRS may be missing
            made, how = os.path.join(folder, "made.gpkg"), {"driver": "GPKG", "geometry_type": "Polygon", "crs": crs}
            try:
                pyogrio.raw.write(made, wkb, list(fields.values()), list(fields), layer=LAYER, **how)
                pyogrio.raw.write(made, None, row, list(style), layer=STYLES, append=True, driver="GPKG")
            except (pyogrio.errors.DataSourceError, pyogrio.errors.DataLayerError, RuntimeError) as error:
                raise write_error(file.path, error) from error
            shutil.copyfile(made, file.temporary)


def _style(legend: Sequence[ClassRecord], classes: Sequence[int]) -> dict[str, str | bool]:
    """Return QGIS's row of the table of styles: the layer in the classes' colours."""
    root = Xml.Element("qgis", version="3.22", styleCategories="Symbology")
    renderer = Xml.SubElement(root, "renderer-v2", type="categorizedSymbol", attr="class")
    categories, symbols = Xml.SubElement(renderer, "categories"), Xml.SubElement(renderer, "symbols")
    for number in classes:
        name, colour = legend[number].name, ",".join(map(str, (*legend[number].colour, 255)))
        Xml.SubElement(categories, "category", value=str(number), symbol=str(number), label=name, render="true")
        symbol = Xml.SubElement(symbols, "symbol", type="fill", name=str(number), alpha="1")
        layer = Xml.SubElement(symbol, "layer", {"class": "SimpleFill", "enabled": "1", "pass": "0"})
        for key, value in (("color", colour), ("style", "solid"), ("outline_style", "no")):
            Xml.SubElement(layer, "prop", k=key, v=value)
    words: dict[str, str | bool] = dict.fromkeys(("f_table_catalog", "f_table_schema", "styleSLD", "owner", "ui"), "")
    words |= {"f_table_name": LAYER, "f_geometry_column": "geom", "styleName": LAYER, "useAsDefault": True}
    return words | {"styleQML": Xml.tostring(root, encoding="unicode")}
