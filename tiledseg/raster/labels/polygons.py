"""Polygons of a vector file, drawn on the grid of an image: GeoJSON, GeoPackage, shapefile, FlatGeobuf.

Vertices are transformed to the image's CRS and then to its pixels; edges are straight there. pyogrio reads binary files
and shapely holds the geometries (the extra `vector`). GDAL, inside pyogrio, recognises formats by a file's first bytes,
and some formats contact servers. So GDAL gets no GeoJSON, and only files whose first bytes fit their ending.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from affine import Affine
from numpy.typing import NDArray
from rasterio.crs import CRS
from rasterio.features import rasterize
from rasterio.warp import transform as transform_points
from rasterio.warp import transform_bounds

from tiledseg.config.checks import shown
from tiledseg.errors import RasterError, require
from tiledseg.geometry.box import Box
from tiledseg.raster.info import RasterInfo, is_placed, named_crs, whole_turn
from tiledseg.raster.mirrored_reader import RasterReader, reading
from tiledseg.system.files import irregular_kind, read_text

_BEGINS = {
    ".gpkg": re.compile(rb"SQLite format 3\0"),
    ".shp": re.compile(rb"\x00\x00\x27\x0a"),
    ".fgb": re.compile(rb"fgb\x03fgb.{4}", re.S),
}
"""The first bytes of each format. A zero byte among them ends GDAL's search for the text of a VRT."""

_BESIDE = (".dbf", ".shx", ".prj", ".cpg", ".qix", ".sbn", ".sbx")  # companions of a shapefile
_POLYGONS = (3, 6)  # shapely's numbers of Polygon and MultiPolygon
_MARGIN = 0.02  # share of the image's extent that is read around it

STYLES = "layer_styles"
"""QGIS's table of styles in a GeoPackage, which is no layer."""

_KIND = "FeatureCollection"
_MOST_BYTES = 1 << 28
BLOCK = 256


@dataclass(frozen=True)
class Polygons:
    """The polygons of a file, in its order. `shapes`: in pixels of the image, (col, -row); `values`: of the attribute
    (None: no attribute is named); `numbers`: of the features in the file."""

    shapes: NDArray[np.object_]
    values: Sequence[Any] | None
    numbers: Sequence[int]


_Features = tuple[CRS, NDArray[np.object_], NDArray[Any] | None, NDArray[np.int64]]
"""(CRS, geometries in the order of the file, values of the attribute, numbers of the features)."""


def vector_files(path: str) -> tuple[str, ...]:
    """Return the file and its companions."""
    stem = os.path.splitext(path)[0]
    ends = _BESIDE if path.lower().endswith(".shp") else ()
    return (path, *(stem + end for end in ends if os.path.exists(stem + end)))


def check_begin(path: str) -> None:
    """Raise RasterError unless the file is regular, and its first bytes fit its ending."""
    for name in vector_files(path):
        if kind := irregular_kind(name):
            raise RasterError(f"{name} is {kind}; give a regular file")
    try:
        with open(path, "rb") as file:
            first = file.read(64)
    except OSError as error:
        raise RasterError(f"cannot read {path}: {error.strerror}; give a file of polygons") from None
    begin = _BEGINS.get(os.path.splitext(path)[1].lower())
    if begin and not (begin.match(first) and b"\0" in first[:16]):
        raise RasterError(f"{path} is not the format of its ending; give a GeoJSON, GeoPackage, shapefile, FlatGeobuf")


@contextmanager
def reading_vectors(path: str, remedy: str) -> Iterator[None]:
    """Check the libraries and the file's first bytes, and enter `reading`; warnings of GDAL are ignored, errors become
    RasterError."""
    require(path, "vector", *(["pyogrio"] if path.lower().endswith(tuple(_BEGINS)) else []), "shapely")
    check_begin(path)
    with reading(f"open {path}", remedy), warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        yield


def read_polygons(path: str, image: RasterInfo, layer: str | None = None, attribute: str | None = None) -> Polygons:
    """Read the polygons of a file that lie in or near the image.

    Raises RasterError if the file cannot be read, lacks the layer or the attribute, if it or the image has no CRS, and
    for a feature that is no polygon. Raises ConfigError without the extra `vector`.
    """
    with reading_vectors(path, "give a GeoJSON, GeoPackage, shapefile or FlatGeobuf file"):
        if image.crs is None or not is_placed(image.transform):
            raise RasterError(f"{image.path} has no CRS, so {path} cannot be placed in it; give an image with one")
        read = _read_binary if path.lower().endswith(tuple(_BEGINS)) else _read_geojson
        return _on_grid(path, image, read(path, image, layer, attribute))


def _read_binary(path: str, image: RasterInfo, layer: str | None, attribute: str | None) -> _Features:
    """Read features with GDAL, sorted by their numbers: a spatial index may return them in another order."""
    import pyogrio.raw
    import shapely

    layers = [str(name) for name in pyogrio.list_layers(path)[:, 0] if name != STYLES]
    _check_layer(path, layer, layers)
    how: dict[str, Any] = {"layer": layer or layers[0], "force_2d": True, "return_fids": True}
    about = pyogrio.read_info(path, layer=how["layer"])
    crs = _checked(path, about["crs"] and named_crs(path, about["crs"]), attribute, list(about["fields"]))
    _, fids, wkb, fields = pyogrio.raw.read(
        path, bbox=_extent(image, crs), **how, columns=[] if attribute is None else [attribute]
    )
    order = np.argsort(fids, kind="stable")
    return crs, shapely.from_wkb(wkb[order]), fields[0][order] if fields else None, fids[order]


def _read_geojson(path: str, image: RasterInfo, layer: str | None, attribute: str | None) -> _Features:
    """Read features in the order of the file, numbered by their integer `id`, else by position."""
    import shapely

    features, document = parse_features(path, read_list(path))
    every = [feature.get("geometry") for feature in features]
    for at, (feature, geometry) in enumerate(zip(features, every, strict=True)):
        if "crs" in feature or (isinstance(geometry, dict) and "crs" in geometry):
            raise RasterError(f"{path}, feature {at} has a CRS of its own; give all features that of the file")
    name = document.get("name")
    _check_layer(path, layer, [name if isinstance(name, str) else os.path.splitext(os.path.basename(path))[0]])
    numbers = [feature["id"] if type(feature.get("id")) is int else at for at, feature in enumerate(features)]
    properties = [one if isinstance(one := feature.get("properties"), dict) else {} for feature in features]
    fields = list(dict.fromkeys(field for each in properties for field in each))
    named = document.get("crs", {"properties": {"name": "EPSG:4326"}})  # the standard's default
    name = named.get("properties") if isinstance(named, dict) else None
    name = name.get("name") if isinstance(name, dict) else None
    if named is not None and not isinstance(name, str):
        raise RasterError(f"{path} has the CRS {shown(named)}, but links are not followed; name it, as EPSG:4326")
    crs = _checked(path, named_crs(path, name) if isinstance(name, str) else None, attribute, fields)
    texts = [None if geometry is None else json.dumps(geometry) for geometry in every]
    shapes = shapely.force_2d(shapely.from_geojson(np.array(texts, object)))
    left, bottom, right, top = _extent(image, crs) or (-np.inf, -np.inf, np.inf, np.inf)
    bounds = shapely.bounds(shapes).reshape(-1, 4)
    near = (bounds[:, 0] <= right) & (bounds[:, 2] >= left) & (bounds[:, 1] <= top) & (bounds[:, 3] >= bottom)
    values = np.empty(len(properties), object)
    values[:] = [each.get(attribute or "") for each in properties]
    return crs, shapes[near], None if attribute is None else values[near], np.array(numbers, np.int64)[near]


def read_list(path: str) -> str:
    """Return the text of a list of rasters or of a GeoJSON file."""
    remedy = "give text in UTF-8 (of many polygons a GeoPackage)"
    return read_text(path, "the list", _MOST_BYTES, remedy, RasterError)


def parse_features(path: str, text: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the features of a FeatureCollection or Feature, and the whole document. Raises RasterError for others."""
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise RasterError(f"{path}, line {error.lineno} is no JSON: {error.msg}; mend it") from None
    except (ValueError, RecursionError) as error:
        raise RasterError(f"{path} is no JSON: {error}; mend it") from None
    if isinstance(document, dict) and document.get("type") == "Feature":
        document = {"features": [document]}
    features = document.get("features") if isinstance(document, dict) and document.get("type", _KIND) == _KIND else None
    if not isinstance(features, list):
        raise RasterError(f"{path} is no FeatureCollection; give a GeoJSON with features")
    return [feature if isinstance(feature, dict) else {} for feature in features], document


def _check_layer(path: str, layer: str | None, names: list[str]) -> None:
    if layer is not None and layer not in names:
        raise RasterError(f"data.label_layer is {layer}, but {path} has {', '.join(names[:9])}; give one of these")
    if layer is None and len(names) != 1:
        raise RasterError(f"{path} has {len(names)} layers ({', '.join(names[:9])}); name one with data.label_layer")


def _checked(path: str, crs: CRS | None, attribute: str | None, fields: list[str]) -> CRS:
    """Return the CRS. Raises RasterError if the file lacks it or the attribute."""
    if crs is None:
        raise RasterError(f"{path} has no CRS; give it the one of its coordinates (ogr2ogr -a_srs)")
    if attribute is not None and attribute not in fields:
        raise RasterError(
            f"data.label_attribute is {attribute}, but {path} has {', '.join(fields[:9]) or 'none'}; give one of these"
        )
    return crs


def _extent(image: RasterInfo, crs: CRS) -> tuple[float, float, float, float] | None:
    """Return a box in the file's CRS that holds the image; None if it cannot be computed."""
    corners = [image.transform @ (col, row) for col in (0, image.width) for row in (0, image.height)]
    xs, ys = zip(*corners, strict=True)
    left, bottom, right, top = transform_bounds(image.crs, crs, min(xs), min(ys), max(xs), max(ys), densify_pts=99)
    across, up = _MARGIN * (right - left), _MARGIN * (top - bottom)
    box = (left - across, bottom - up, right + across, top + up)
    return box if np.isfinite(box).all() and left < right and bottom < top else None


def _on_grid(path: str, image: RasterInfo, features: _Features) -> Polygons:
    """Transform features to the image's pixels. Raises RasterError for a feature that is no polygon, or cannot be
    transformed."""
    import shapely

    crs, every, values, fids = features
    full = ~(shapely.is_missing(every) | shapely.is_empty(every))
    shapes, numbers = every[full], fids[full].tolist()
    for at in np.flatnonzero(~np.isin(shapely.get_type_id(shapes), _POLYGONS)):
        kind = shapes[at].geom_type
        raise RasterError(f"{path}, feature {numbers[at]} is a {kind}; give polygons (buffer lines and points)")
    inverse = ~image.transform

    def to_pixels(points: NDArray[np.float64]) -> NDArray[np.float64]:
        xs, ys = points.T
        if crs != image.crs and len(points):
            xs, ys = (np.array(part) for part in transform_points(crs, image.crs, xs, ys))
        cols, rows = inverse @ (xs, ys)
        return np.column_stack([cols, -rows])

    placed = shapely.transform(shapes, to_pixels)
    if not np.isfinite(shapely.get_coordinates(placed)).all():
        raise RasterError(f"{path} has vertices outside the domain of {image.crs} of {image.path}; clip it to that")
    turn = whole_turn(image.crs)
    if crs != image.crs and turn is not None:
        half_turn = turn / 2 / np.hypot(image.transform.a, image.transform.d)
        for number, shape in zip(numbers, placed, strict=True):
            rings = shapely.get_rings(shapely.get_parts(shape))
            steps = [np.abs(np.diff(shapely.get_coordinates(ring)[:, 0])).max(initial=0) for ring in rings]
            if max(steps) > half_turn:  # an edge runs the wrong way around the world
                raise RasterError(
                    f"{path}, feature {number} passes 180 degrees, where {image.crs} of {image.path} "
                    f"ends; cut it there (ogr2ogr -t_srs {image.crs} -wrapdateline)"
                )
    return Polygons(placed, None if values is None else values[full].tolist(), numbers)


class PolygonReader(RasterReader):
    """A raster drawn from polygons: the numbers `drawn` (uint8, one a polygon) on the grid of `image`, `background`
    elsewhere. `names`: of the classes.

    A pixel has the number of the last polygon in the file that holds its centre. Whole blocks of a fixed grid are
    drawn, so labels do not depend on the tiling.
    """

    def __init__(
        self,
        path: str,
        image: RasterInfo,
        polygons: Polygons,
        drawn: Sequence[int],
        background: int,
        names: Sequence[str] = (),
    ) -> None:
        import shapely

        self._shapes, self._drawn, self._background = polygons.shapes, drawn, background
        self._bounds = shapely.bounds(polygons.shapes).reshape(-1, 4)  # left, lowest, right, highest
        self.info = RasterInfo(
            path=path,
            bands=1,
            dtype="uint8",
            **{key: getattr(image, key) for key in ("height", "width", "crs", "transform", "ground")},
            block_shape=(BLOCK, BLOCK),
            band_numbers=(1,),
            driver="polygons",
            files=vector_files(path),
            class_names=tuple(enumerate(names)),
            holds_classes=True,
        )

    @property
    def count(self) -> int:
        """Return the number of polygons that touch the image."""
        return int(np.count_nonzero(self._touching(Box.of_shape(self.info.shape))))

    def _touching(self, box: Box) -> NDArray[np.bool_]:
        left, lowest, right, highest = self._bounds.T
        rows = (-highest < box.row.stop) & (-lowest > box.row.start)
        return rows & (left < box.col.stop) & (right > box.col.start)

    def _read_inside(self, box: Box) -> tuple[NDArray, NDArray[np.bool_]]:
        numbers_HW = np.empty(box.shape, np.uint8)
        for part in box.blocks(BLOCK, BLOCK):
            row, col = part.row.start // BLOCK * BLOCK, part.col.start // BLOCK * BLOCK
            block = Box.of_shape((BLOCK, BLOCK)).shift(row, col)
            numbers_HW[part.relative_to(box).slices] = self._draw(block)[part.relative_to(block).slices]
        return numbers_HW[None], np.ones(box.shape, np.bool_)

    def _draw(self, block: Box) -> NDArray[np.uint8]:
        touching = np.flatnonzero(self._touching(block)).tolist()
        if not touching:
            return np.full(block.shape, self._background, np.uint8)
        # The y axis points up, as in north-up rasters: it decides which polygon gets a centre on a common edge.
        place = Affine(1, 0, block.col.start, 0, -1, -block.row.start)
        drawn = [(self._shapes[at], self._drawn[at]) for at in touching]
        return rasterize(drawn, block.shape, self._background, transform=place, dtype="uint8")
