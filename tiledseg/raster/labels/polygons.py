"""Polygons of a vector file, brought to the grid of an image: GeoJSON, GeoPackage, shapefile, FlatGeobuf.

Vertices are transformed to the image's CRS one by one, and then to its pixels; edges are straight there. pyogrio reads
binary files and shapely holds the geometries: the extra `vector`. GDAL, within pyogrio, goes by a file's first bytes
and opens formats that ask servers: it sees no file whose first bytes are not those of its ending, and no GeoJSON.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rasterio.crs import CRS
from rasterio.warp import transform as transform_points
from rasterio.warp import transform_bounds

from tiledseg.errors import ConfigError, RasterError, install
from tiledseg.raster.georeferencing import is_placed, whole_turn
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.retrying import reading
from tiledseg.raster.text_files import named_crs, read_geometries
from tiledseg.system.files import irregular_kind

_BEGINS = {
    ".gpkg": re.compile(rb"SQLite format 3\0"),
    ".shp": re.compile(rb"\x00\x00\x27\x0a"),
    ".fgb": re.compile(rb"fgb\x03fgb.{4}", re.S),
}
"""The first bytes of each kind of file. A zero byte is among them, where GDAL ends its search for a text (of a VRT)."""

_BESIDE = (".dbf", ".shx", ".prj", ".cpg", ".qix", ".sbn", ".sbx")  # of a shapefile
_POLYGONS = (3, 6)  # shapely's numbers of Polygon and MultiPolygon
_MARGIN = 0.02  # of the image's extent, around it


@dataclass(frozen=True)
class Polygons:
    """`shapes`: in pixels of the image, (col, -row), in the order of the file; `values`: of the attribute, None where
    none was asked for; `numbers`: their features in the file."""

    shapes: NDArray[np.object_]
    values: Sequence[Any] | None
    numbers: Sequence[int]

    @property
    def bounds(self) -> NDArray[np.float64]:
        """(n, 4): least col, least -row, largest col, largest -row."""
        import shapely

        found: NDArray[np.float64] = shapely.bounds(self.shapes)
        return found


def check_extra(path: str) -> None:
    """Raise ConfigError where what reads vectors is not installed."""
    if any(importlib.util.find_spec(name) is None for name in ("pyogrio", "shapely")):
        raise ConfigError(f"{path} holds vectors, which need pyogrio: {install('vector')}")


def vector_files(path: str) -> tuple[str, ...]:
    """The file, and those that belong to it."""
    stem = os.path.splitext(path)[0]
    ends = _BESIDE if path.lower().endswith(".shp") else ()
    return (path, *(stem + end for end in ends if os.path.exists(stem + end)))


def read_polygons(path: str, image: RasterInfo, layer: str | None = None, attribute: str | None = None) -> Polygons:
    """The polygons of a file that lie in the image, or near it.

    Raises RasterError, in one line, where the file or the image has no CRS, a feature is no polygon or has no value of
    the attribute, the layer or the attribute is not there, and where the file cannot be read; ConfigError without the
    extra `vector`.
    """
    check_extra(path)
    check_begin(path)
    if image.crs is None or not is_placed(image.transform):
        raise RasterError(f"{image.path} has no CRS, so {path} has no place in it; give an image with one")
    with reading(f"open {path}", "give a GeoJSON, GeoPackage, shapefile or FlatGeobuf file"):
        read = _read_binary if _ending(path) in _BEGINS else _read_geojson
        crs, numbers, shapes, values = read(path, image, layer, attribute)
        return _placed(path, image, crs, numbers, shapes, values)


_Read = tuple[CRS, NDArray[np.int64], NDArray[np.object_], NDArray[Any] | None]


def _read_binary(path: str, image: RasterInfo, layer: str | None, attribute: str | None) -> _Read:
    """Read features by GDAL. An index may have features read in its own order; numbers count in the file's."""
    import pyogrio.raw
    import shapely

    layer = _layer(path, layer, [str(name) for name in pyogrio.list_layers(path)[:, 0]])
    about = pyogrio.read_info(path, layer=layer)
    crs = _crs(path, about["crs"] and named_crs(path, about["crs"]))
    columns = _columns(path, attribute, list(about["fields"]))
    _, fids, wkb, fields = pyogrio.raw.read(
        path, layer=layer, columns=columns, force_2d=True, return_fids=True, bbox=_extent(image, crs)
    )
    order = np.argsort(fids, kind="stable")
    return crs, fids[order], shapely.from_wkb(wkb[order]), fields[0][order] if fields else None


def _read_geojson(path: str, image: RasterInfo, layer: str | None, attribute: str | None) -> _Read:
    """In the order of the file, with the numbers that its author gave."""
    import shapely

    name, found, geometries, numbers, properties = read_geometries(path)
    _layer(path, layer, [name])
    crs = _crs(path, found)
    _columns(path, attribute, list(dict.fromkeys(field for each in properties for field in each)))
    shapes = shapely.force_2d(shapely.from_geojson(np.array(geometries, object)))
    left, bottom, right, top = _extent(image, crs) or (-np.inf, -np.inf, np.inf, np.inf)
    bounds = shapely.bounds(shapes).reshape(-1, 4)
    near = (bounds[:, 0] <= right) & (bounds[:, 2] >= left) & (bounds[:, 1] <= top) & (bounds[:, 3] >= bottom)
    values = np.empty(len(properties), object)
    values[:] = [each.get(attribute or "") for each in properties]
    return crs, np.array(numbers, np.int64)[near], shapes[near], None if attribute is None else values[near]


def _ending(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def check_begin(path: str) -> None:
    """Raise RasterError unless the file is regular, and begins as one of its ending does."""
    for name in vector_files(path):
        kind = irregular_kind(name)
        if kind is not None:
            raise RasterError(f"{name} is {kind}; give a regular file")
    try:
        with open(path, "rb") as file:
            first = file.read(64)
    except OSError as error:
        raise RasterError(f"cannot read {path}: {error.strerror}; give a file of polygons") from None
    wanted = _BEGINS.get(_ending(path))
    if wanted and not (wanted.match(first) and b"\0" in first[:16]):
        raise RasterError(
            f"{path} does not begin as its ending says; give a GeoJSON, GeoPackage, shapefile, FlatGeobuf"
        )


def _layer(path: str, layer: str | None, names: list[str]) -> str:
    """The one layer, or the one named."""
    if layer is not None and layer not in names:
        raise RasterError(f"data.label_layer is {layer}, but {path} has {', '.join(names[:9])}; give one of these")
    if layer is None and len(names) != 1:
        raise RasterError(f"{path} has {len(names)} layers ({', '.join(names[:9])}); name one with data.label_layer")
    return layer or names[0]


def _crs(path: str, crs: CRS | None) -> CRS:
    if crs is None:
        raise RasterError(f"{path} has no CRS; give it the one of its coordinates (ogr2ogr -a_srs)")
    return crs


def _columns(path: str, attribute: str | None, fields: list[str]) -> list[str]:
    if attribute is not None and attribute not in fields:
        raise RasterError(
            f"data.label_attribute is {attribute}, but {path} has {', '.join(fields[:9]) or 'none'}; give one of these"
        )
    return [] if attribute is None else [attribute]


def _extent(image: RasterInfo, crs: CRS) -> tuple[float, float, float, float] | None:
    """A box in the file's CRS that holds the image; None where there is none."""
    place = image.transform
    corners = [(col, row) for col in (0, image.width) for row in (0, image.height)]
    xs = [place.a * col + place.b * row + place.c for col, row in corners]
    ys = [place.d * col + place.e * row + place.f for col, row in corners]
    left, bottom, right, top = transform_bounds(image.crs, crs, min(xs), min(ys), max(xs), max(ys), densify_pts=99)
    across, up = _MARGIN * (right - left), _MARGIN * (top - bottom)
    box = (left - across, bottom - up, right + across, top + up)
    return box if np.isfinite(box).all() and left < right and bottom < top else None


def _placed(
    path: str, image: RasterInfo, crs: CRS, fids: NDArray[np.int64], shapes: NDArray, values: NDArray | None
) -> Polygons:
    import shapely

    there = ~(shapely.is_missing(shapes) | shapely.is_empty(shapes))
    shapes, numbers = shapes[there], fids[there].tolist()
    kinds = shapely.get_type_id(shapes)
    for number, kind, shape in zip(numbers, kinds, shapes, strict=True):
        if kind not in _POLYGONS:
            raise RasterError(
                f"{path}, feature {number} is a {shape.geom_type}; give polygons (buffer lines and points)"
            )
    inverse = ~image.transform

    def to_pixels(points: NDArray[np.float64]) -> NDArray[np.float64]:
        xs, ys = points[:, 0], points[:, 1]
        if crs != image.crs and len(points):
            xs, ys = (np.array(part) for part in transform_points(crs, image.crs, xs, ys))
        cols = inverse.a * xs + inverse.b * ys + inverse.c
        rows = inverse.d * xs + inverse.e * ys + inverse.f
        return np.column_stack([cols, -rows])

    placed = shapely.transform(shapes, to_pixels)
    if not np.isfinite(shapely.get_coordinates(placed)).all():
        raise RasterError(f"{path} has vertices that cannot be brought to {image.crs} of {image.path}; clip it to it")
    turn = whole_turn(image.crs)
    if crs != image.crs and turn is not None:
        _check_half_turns(path, placed, numbers, image, turn / 2)
    return Polygons(placed, None if values is None else values[there].tolist(), numbers)


def _check_half_turns(
    path: str, placed: NDArray[np.object_], numbers: Sequence[int], image: RasterInfo, half: float
) -> None:
    """Raise RasterError for an edge that passes 180 degrees: its vertices were brought there one by one, so that it
    would run around the world the other way."""
    import shapely

    cols = half / np.hypot(image.transform.a, image.transform.d)
    parts, shape_of = shapely.get_parts(placed, return_index=True)
    rings, part_of = shapely.get_rings(parts, return_index=True)
    for ring, part in zip(rings, part_of, strict=True):
        if np.abs(np.diff(shapely.get_coordinates(ring)[:, 0])).max(initial=0) > cols:
            raise RasterError(
                f"{path}, feature {numbers[shape_of[part]]} passes 180 degrees, where {image.crs} of {image.path} "
                f"ends; cut it there (ogr2ogr -t_srs {image.crs} -wrapdateline)"
            )
