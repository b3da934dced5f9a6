"""From what a user types (paths, globs, URLs) to a list of rasters in an order that never changes."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence

from tiledseg.errors import RasterError
from tiledseg.files import irregular_kind
from tiledseg.raster.store_header import is_tile_store
from tiledseg.raster.tile_store import parse_store_name, store_images

_URL = re.compile(r"(s3|gs|az|https?|ftp)://(.+)")
_PREFIXES = {"s3": "/vsis3/", "gs": "/vsigs/", "az": "/vsiaz/"}


def as_list(paths: str | Sequence[str]) -> list[str]:
    return [paths] if isinstance(paths, str) else list(paths)


def expand_sources(patterns: Sequence[str], key: str) -> tuple[str, ...]:
    """The paths that `patterns` mean: in the order given, each glob's matches sorted by name.

    A URL, a `/vsi...` path or a subdataset name stands for itself, and so does a file whose own name holds `*`, `?` or
    `[`. A tile store stands for all of its images. `key` (such as "data.images") is what error messages name.

    Raises RasterError for no pattern at all, a glob that matches nothing, a missing file, a folder, and for a path that
    occurs twice.
    """
    if not patterns:
        raise RasterError(f"{key} is empty; give at least one path, glob or URL")
    paths = [path for pattern in patterns for path in _expand(os.fspath(pattern), key)]
    first: dict[str, int] = {}
    for at, path in enumerate(paths):
        same = path if is_named(path) else os.path.realpath(path)
        if same in first:
            raise RasterError(f"{key} holds {path} twice, at positions {first[same]} and {at}; remove one")
        first[same] = at
    return tuple(paths)


def pair_sources(
    images: Sequence[str], labels: Sequence[str], keys: tuple[str, str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The images and, paired with them in order, their labels; those in a tile store go by themselves without labels.

    Raises RasterError where `expand_sources` does, where the counts differ, and where labels are missing.
    """
    image_paths = expand_sources(images, keys[0])
    if labels:
        label_paths = tuple(_labels_of(path) or path for path in expand_sources(labels, keys[1]))
    else:
        without = [path for path in image_paths if _labels_of(path) is None]
        if without:
            raise RasterError(f"{keys[1]} is empty and {without[0]} is no tile store; give one label raster an image")
        label_paths = tuple(str(_labels_of(path)) for path in image_paths)
    check_counts(image_paths, label_paths, keys)
    return image_paths, label_paths


def _labels_of(path: str) -> str | None:
    """The labels beside an image of a tile store; None for any other raster."""
    name = parse_store_name(path)
    return None if name is None else str(name._replace(labels=True))


def check_counts(images: Sequence[object], labels: Sequence[object], keys: tuple[str, str]) -> None:
    """Raise RasterError unless there are as many labels as images: they are paired in order."""
    if len(images) != len(labels):
        raise RasterError(
            f"{keys[0]} has {len(images)} rasters but {keys[1]} has {len(labels)}; give one label raster for "
            "each image, in the same order"
        )


def is_remote(path: str) -> bool:
    """Whether the path is a URL or goes through one of GDAL's virtual file systems."""
    return path.startswith("/vsi") or _URL.fullmatch(path) is not None


def is_named(path: str) -> bool:
    """Whether the path is no file's: remote, or one of GDAL's subdataset names such as netcdf:a.nc:band."""
    return is_remote(path) or re.match(r"\w{2,}:", path) is not None


def gdal_path(path: str) -> str:
    """The path as GDAL spells it: s3://bucket/key is /vsis3/bucket/key, http(s) goes through /vsicurl/."""
    match = _URL.fullmatch(path)
    if match is None:
        return path
    if prefix := _PREFIXES.get(match[1]):
        return prefix + match[2]
    return "/vsicurl/" + path


def _expand(pattern: str, key: str) -> list[str]:
    if is_named(pattern) or parse_store_name(pattern):
        return [pattern]
    if is_tile_store(pattern):
        return [str(name) for name in store_images(pattern)]
    if os.path.isdir(pattern):
        raise RasterError(f"{key}: {pattern} is a folder; give its files, as in '{os.path.join(pattern, '*.tif')}'")
    kind = irregular_kind(pattern)
    if kind is not None:
        raise RasterError(f"{key}: {pattern} is {kind}; give a regular file")
    if os.path.exists(pattern):
        return [pattern]
    if not glob.has_magic(pattern):
        raise RasterError(f"{key}: {pattern} does not exist; give a path, glob or URL of a raster")
    matches = sorted(match for match in glob.glob(pattern, recursive=True) if not os.path.isdir(match))
    if not matches:
        raise RasterError(f"{key}: nothing matches the glob {pattern}; give a path, glob or URL of a raster")
    return matches
