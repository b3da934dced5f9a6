"""Names of rasters and of files of polygons: their kinds, and GDAL's spelling."""

from __future__ import annotations

import re

VECTOR_ENDINGS = (".geojson", ".gpkg", ".shp", ".fgb")
"""Endings of files of polygons."""

REFERENCES = "data.references true (train) or --references"
"""The options that open what a file names."""

_URL = re.compile(r"(s3|gs|az|https?|ftp)://(.+)")
_PREFIXES = {"s3": "/vsis3/", "gs": "/vsigs/", "az": "/vsiaz/"}


def is_remote(path: str) -> bool:
    """Return True if the path is a URL or goes through one of GDAL's virtual file systems."""
    return path.startswith("/vsi") or _URL.fullmatch(path) is not None


def is_named(path: str) -> bool:
    """Return True if the path is no file's: remote, or one of GDAL's subdataset names such as netcdf:a.nc:band."""
    return is_remote(path) or re.match(r"\w{2,}:", path) is not None


def is_vector(path: str) -> bool:
    """Return True if the path is of polygons, by its ending."""
    return path.lower().endswith(VECTOR_ENDINGS)


def gdal_path(path: str) -> str:
    """Return the path as GDAL spells it: s3://bucket/key is /vsis3/bucket/key, http(s) goes through /vsicurl/."""
    match = _URL.fullmatch(path)
    if match is None:
        return path
    if prefix := _PREFIXES.get(match[1]):
        return prefix + match[2]
    return "/vsicurl/" + path
