"""Texts of users: CSV, and GeoJSON without GDAL, which follows links and opens whatever a text describes."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from typing import Any

from tiledseg.config.checks import shown
from tiledseg.errors import InputError, RasterError
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
