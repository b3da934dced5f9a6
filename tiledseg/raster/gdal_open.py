"""The one place where GDAL opens a raster of the user's: only formats whose file holds all of its pixels.

GDAL tells a format by a file's first bytes, whatever its name: `image.tif` may be a VRT, which reads any file of the
machine as pixels, or a WMS description, which asks a server. So a raster opens only with the drivers listed here, and
its mask beside it (`image.tif.msk`) only as a TIFF. `references` lifts that for files whose word the user trusts.
"""

from __future__ import annotations

import os
import re
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
"""Self-contained, and of imagery. Not HFA, ENVI, NITF or HDF5: their files name further ones that hold the pixels."""

CACHE_BYTES = 256 << 20  # of GDAL's blocks, a process; its default of 5 % of the memory is too much for many ranks

_REMEDY = (
    "give a GeoTIFF, JPEG 2000, PNG or JPEG; GDAL's other formats may read further files and URLs: where you trust "
    f"this file, allow them with {REFERENCES}"
)
_PAGE = re.compile(r"GTIFF_DIR:(?:off:)?\d+:(.+)")  # one page of a TIFF
_MASKS = COMPANIONS_OF_NAME[:4]  # GDAL opens these by whatever format they are


def _without_garbled_words(unraisable: Any) -> None:
    """Ignore rasterio's failure to log GDAL's words that quote a file's bytes; the error itself is raised."""
    if not isinstance(unraisable.exc_value, UnicodeDecodeError) or "rasterio" not in str(unraisable.object):
        _hook_before(unraisable)


_hook_before = sys.unraisablehook
sys.unraisablehook = _without_garbled_words


def settings() -> dict[str, Any]:
    """Return GDAL's settings while it opens or reads a raster."""
    return {
        "GDAL_NUM_THREADS": "1",  # ranks and prefetch threads are the parallelism
        "GDAL_CACHEMAX": CACHE_BYTES,
        # Files beside a raster are asked for by name: no listing of a bucket, and no `.Msk` that was not looked at.
        "GDAL_DISABLE_READDIR_ON_OPEN": "TRUE",
        "GDAL_ERROR_ON_LIBJPEG_WARNING": "YES",  # a truncated JPEG is an error, not grey pixels
        "GDAL_VRT_ENABLE_PYTHON": "NO",  # a file's own code never runs, references or not
        "GTIFF_DIRECT_IO": "YES",  # uncompressed blocks past the block cache
        **gdal_options(os.environ),
    }


def open_dataset(path: str, references: bool) -> DatasetReader:
    """Return rasterio's dataset of `path`, inside `rasterio.Env(**settings())`.

    Raises RasterError where there is no such file, where it or a file beside it is no regular file, and where it is no
    raster. Without `references` also where its format, or that of its mask, is none of `DRIVERS`. A server that does
    not answer for 20 seconds is given up.
    """
    if not is_named(path) and not os.path.exists(path):
        raise RasterError(f"{path} does not exist; give a path, glob or URL of a raster")
    file = local_file(path)
    for name in () if file is None else (file, *names_beside(file)):
        kind = irregular_kind(name)
        if kind is not None and (name == file or kind != "a folder"):
            beside = "" if name == file else f", which goes with {file},"
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


def local_file(path: str) -> str | None:
    """Return the file on this machine that a raster's path means; None for a URL and for other formats' subdataset
    names."""
    page = _PAGE.fullmatch(path)
    return page[1] if page is not None else None if is_named(path) else path


def names_beside(file: str) -> tuple[str, ...]:
    """Return the names of files that GDAL would open beside `file`. Its own list would open the files that they
    name."""
    stem = os.path.splitext(file)[0]
    return (*(file + end for end in COMPANIONS_OF_NAME), *(stem + end for end in COMPANIONS_OF_STEM))


def _check_masks(path: str) -> None:
    """Raise RasterError where a mask or an overview beside `path` is there and no TIFF. A URL's mask is asked for as
    GDAL itself would do; its overviews are never read."""
    file = local_file(path)
    if file is not None:
        masks = [file + end for end in _MASKS if os.path.exists(file + end)]
    else:
        masks = [path + _MASKS[0]] if is_remote(path) else []
    for mask in masks:
        try:
            DatasetReader(gdal_path(mask), driver=["GTiff"], sharing=False).close()
        except RasterioError as error:
            said = reason(error)
            if is_remote(path) and said.startswith("CURL error"):  # nobody answers: do not ask again
                raise RasterError(f"cannot open {path}: {said}; {advice(os.environ, path, said)}") from error
            if "not recognized as being in a supported file format" in said:  # it is there
                raise RasterError(
                    f"{mask}, which goes with {file or path}, is no TIFF and may read further files and URLs; remove "
                    f"it, or, where you trust it, allow it with {REFERENCES}"
                ) from error
