"""Opening any raster: a GeoTIFF, COG, JPEG 2000, PNG or JPEG, a URL, or one of an HDF5 tile store, by one interface."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tiledseg.config.arguments import checked
from tiledseg.raster.mirrored_reader import RasterReader
from tiledseg.raster.reading.gdal_reader import GdalReader
from tiledseg.raster.tile_store.store import is_tile_store, parse_store_name

__all__ = ["RasterReader", "open_raster"]


@checked
def open_raster(
    path: str | Path, bands: Sequence[int] | None = None, nodata: float | None = None, references: bool = False
) -> RasterReader:
    """Open a raster for reading boxes.

    `path`: a file, an s3://, gs://, az:// or http(s):// URL, a /vsi... path, or one raster of a tile store
    ("tiles.h5#0"). `bands`: numbers from 1 as in GDAL, in the order wanted; all but an alpha band where None. `nodata`
    takes the place of the file's own nodata value. `references`: also formats that read further files and URLs, such as
    VRT and WMS.

    Raises RasterError, in one line, where the file is missing, no regular file, truncated, no raster, without bands, of
    a complex dtype, or has not the bands asked for, and for anything else that goes wrong inside.
    """
    path = str(path)
    if parse_store_name(path) or is_tile_store(path):
        from tiledseg.raster.tile_store.reader import StoreReader

        return StoreReader(path, bands, nodata)
    return GdalReader(path, bands, nodata, references)
