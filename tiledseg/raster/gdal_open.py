"""The one place where GDAL opens a user's raster: only formats whose file holds all of its pixels.

GDAL recognises a format by a file's first bytes, not by its name: `image.tif` may be a VRT, which reads any local file
as pixels, or a WMS description, which contacts a server. So a raster opens only with the drivers listed here, and its
mask (`image.tif.msk`) only as a TIFF. `references` lifts this for files that the user trusts.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from typing import Any

import rasterio
from rasterio.errors import RasterioError
from rasterio.io import DatasetReader
from rasterio.session import DummySession

from tiledseg.errors import RasterError
from tiledseg.raster.mirrored_reader import reading, reason
from tiledseg.raster.remote import REFERENCES, SILENT_SECONDS, advice, gdal_options, gdal_path, is_named, is_remote
from tiledseg.system.files import COMPANIONS_OF_NAME, COMPANIONS_OF_STEM, irregular_kind

DRIVERS = ("GTiff", "JP2OpenJPEG", "JPEG", "PNG")
"""Drivers of self-contained imagery. Files of HFA, ENVI, NITF or HDF5 may name other files that hold the pixels."""

CACHE_BYTES = 256 << 20  # GDAL's block cache of a process; its default, 5 % of the memory, is too much for many ranks

_REMEDY = (
    "give a GeoTIFF, JPEG 2000, PNG or JPEG; GDAL's other formats may read further files and URLs: where you trust "
    f"this file, allow them with {REFERENCES}"
)
_MASKS = COMPANIONS_OF_NAME[:4]  # files that GDAL opens in any format


def _without_garbled_words(unraisable: Any) -> None:
    """Ignore rasterio's failure to log a GDAL message that quotes a file's bytes; the error itself is raised."""
    if not isinstance(unraisable.exc_value, UnicodeDecodeError) or "rasterio" not in str(unraisable.object):
        _hook_before(unraisable)


_hook_before = sys.unraisablehook
sys.unraisablehook = _without_garbled_words


def settings() -> dict[str, Any]:
    """Return GDAL's settings for opening and reading a raster."""
    return {
        "GDAL_NUM_THREADS": "1",  # ranks and prefetch threads are the parallelism
        "GDAL_CACHEMAX": CACHE_BYTES,
        # Probe companion files by name: no listing of a bucket, and no `.Msk` that `_check_masks` has not seen.
        "GDAL_DISABLE_READDIR_ON_OPEN": "TRUE",
        "GDAL_ERROR_ON_LIBJPEG_WARNING": "YES",  # a truncated JPEG is an error, not grey pixels
        "GDAL_VRT_ENABLE_PYTHON": "NO",  # a file's own code never runs, references or not
        "GTIFF_DIRECT_IO": "YES",  # uncompressed blocks bypass the block cache
        **gdal_options(os.environ),
    }


def open_dataset(path: str, references: bool) -> DatasetReader:
    """Open `path` with rasterio, inside `rasterio.Env(**settings())`.

    Raises RasterError for a missing file, a file or companion that is no regular file, and a file that is no raster.
    Without `references`, its format and that of its mask must be one of `DRIVERS`, and the path no subdataset name. A
    server gets 20 seconds.
    """
    if not (is_remote(path) or os.path.exists(path) or (references and is_named(path))):
        allow = f", or allow GDAL's names of a file's parts with {REFERENCES}" if is_named(path) else ""
        raise RasterError(f"{path} does not exist; give a path, glob or URL of a raster{allow}")
    for name in () if is_named(path) else (path, *names_beside(path)):
        kind = irregular_kind(name)
        if kind is not None and (name == path or kind != "a folder"):
            beside = "" if name == path else f", which goes with {path},"
            raise RasterError(f"{name}{beside} is {kind}; give a raster in regular files")
    remedy = "give a raster that GDAL reads" if references else _REMEDY
    if gdal_path(path).startswith("/vsis3/"):
        remedy = f"{advice(os.environ, path)}; or {remedy}"
    sooner = rasterio.Env(session=DummySession(), **gdal_options(os.environ, SILENT_SECONDS))
    with sooner if is_remote(path) else nullcontext():
        if not references:
            _check_masks(path)
        with reading(f"open {path}", remedy):
            return DatasetReader(gdal_path(path), driver=None if references else list(DRIVERS), sharing=False)


def names_beside(file: str) -> tuple[str, ...]:
    """Return the companion files that GDAL would open with `file`. GDAL's own list would open them."""
    stem = os.path.splitext(file)[0]
    return (*(file + end for end in COMPANIONS_OF_NAME), *(stem + end for end in COMPANIONS_OF_STEM))


def _check_masks(path: str) -> None:
    """Raise RasterError if a mask or an overview file of `path` exists and is no TIFF. Overviews at URLs are never
    read, so only the mask is checked there."""
    masks = [path + end for end in _MASKS if os.path.exists(path + end)]
    for mask in [path + _MASKS[0]] if is_remote(path) else masks:
        try:
            DatasetReader(gdal_path(mask), driver=["GTiff"], sharing=False).close()
        except RasterioError as error:
            said = reason(error)
            if is_remote(path) and said.startswith("CURL error"):  # the server does not answer: do not retry
                raise RasterError(f"cannot open {path}: {said}; {advice(os.environ, path, said)}") from error
            if "not recognized as being in a supported file format" in said:  # the file exists
                raise RasterError(
                    f"{mask}, which goes with {path}, is no TIFF and may read further files and URLs; remove "
                    f"it, or, where you trust it, allow it with {REFERENCES}"
                ) from error
