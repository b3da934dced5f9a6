"""Texts of users: CSV, and GeoJSON without GDAL, which follows links and opens whatever a text describes."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator
from typing import Any

from rasterio.crs import CRS

from tiledseg.config.checks import shown
from tiledseg.errors import InputError, RasterError
from tiledseg.raster.georeferencing import named_crs
from tiledseg.system.files import read_text

_KIND = "FeatureCollection"
_MOST_BYTES = 1 << 28


def read_list(path: str) -> str:
    """Return the text of a list of rasters, or of polygons."""
    remedy = "give text in UTF-8 (of many polygons a GeoPackage)"
    return read_text(path, "the list", _MOST_BYTES, remedy, RasterError)


def csv_rows(
    path: str, text: str, column: str, example: str, error: type[InputError]
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the place (`line 2`) and the words of each row of a CSV, by the columns of its header in lower case.

    Raises `error` where the header lacks `column`, showing an `example` of one, and for a row of another length.
    """
    reader = csv.reader(text.splitlines(), skipinitialspace=True)
    header = [word.strip().lower() for word in next(reader, [])]
    if column not in header:
        raise error(f"{path}, line 1 is {shown(','.join(header))!r}; give a header such as {example}")
    try:
        for words in reader:
            if not any(word.strip() for word in words):
                continue
            if len(words) != len(header):
                raise error(
                    f"{path}, line {reader.line_num} has {len(words)} columns, its header {len(header)}; give as many"
                )
            yield f"line {reader.line_num}", dict(zip(header, (word.strip() for word in words), strict=True))
    except csv.Error as problem:
        raise error(f"{path}, line {reader.line_num} is no CSV: {problem}; mend it") from None


def parse_features(path: str, text: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the features of a FeatureCollection, or the one of a Feature, and the whole. Raises RasterError, naming
    the file, for all else."""
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


def read_geometries(path: str) -> tuple[str, CRS | None, list[str | None], list[int], list[dict[str, Any]]]:
    """Return the layer's name, the CRS, and of each feature its geometry as GeoJSON (None: it has none), its number and
    its properties."""
    features, document = parse_features(path, read_list(path))
    geometries = []
    for at, feature in enumerate(features):
        geometry = feature.get("geometry")
        if "crs" in feature or (isinstance(geometry, dict) and "crs" in geometry):
            raise RasterError(f"{path}, feature {at} has a CRS of its own; give all features that of the file")
        geometries.append(None if geometry is None else json.dumps(geometry))
    numbers = [feature["id"] if type(feature.get("id")) is int else at for at, feature in enumerate(features)]
    properties = [one if isinstance(one := feature.get("properties"), dict) else {} for feature in features]
    name = document.get("name")
    name = name if isinstance(name, str) else os.path.splitext(os.path.basename(path))[0]
    return name, _crs(path, document), geometries, numbers, properties


def _crs(path: str, document: dict[str, Any]) -> CRS | None:
    """Return the CRS that is named; without one that of the standard. A link is not followed."""
    if document.get("crs", ...) is None:
        return None
    named = document.get("crs", {"properties": {"name": "EPSG:4326"}})
    properties = named.get("properties") if isinstance(named, dict) else None
    name = properties.get("name") if isinstance(properties, dict) else None
    if not isinstance(name, str):
        raise RasterError(f"{path} has the CRS {shown(named)}, and no link is followed; name it, as EPSG:4326")
    return named_crs(path, name)
