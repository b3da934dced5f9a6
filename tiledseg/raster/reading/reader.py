"""Opening any raster by one interface: a GeoTIFF, COG, JPEG 2000, PNG or JPEG, a URL, or one of an HDF5 tile store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tiledseg.config.kinds import checked
from tiledseg.errors import RasterError, ReadError
from tiledseg.geometry.box import Box
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.mirrored_reader import RasterReader
from tiledseg.raster.reading.gdal_reader import GdalReader
from tiledseg.raster.tile_store.store import StoreReader, is_tile_store, parse_store_name

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

    Raises RasterError, in one line, where the file is missing, truncated or no raster, or lacks one of `bands`, and for
    anything else that goes wrong inside.
    """
    path = str(path)
    if parse_store_name(path) or is_tile_store(path):
        return StoreReader(path, bands, nodata)
    return GdalReader(path, bands, nodata, references)


class KnownReader(RasterReader):
    """A raster of `info`, opened by `opener` at its first read. That raises ReadError, of this rank alone, where the
    raster cannot be opened here or has changed since `info` was read."""

    def __init__(self, info: RasterInfo, opener: Callable[[], RasterReader]) -> None:
        self.info = info
        self._opener = opener
        self._source: RasterReader | None = None
        self._lock, self._closed = threading.Lock(), False

    def _read_inside(self, box: Box) -> tuple[NDArray, NDArray[np.bool_]]:
        with self._lock:
            if self._closed:
                raise RasterError(f"{self.info.path} is read after its reader was closed; open it again")
            if self._source is None:
                self._source = self._opened()
                self.held = (self._source,)
        return self._source.read(box)

    def _opened(self) -> RasterReader:
        """Open the raster. Raises ReadError for one of another shape, or of another size in bytes, which tells
        compressed images apart."""
        try:
            source = self._opener()
        except RasterError as error:
            raise ReadError(str(error)) from error
        both = self.info, source.info
        then, now = (f"{i.height} x {i.width} px, {i.bands} bands of {i.dtype}" for i in both)
        if then == now:
            then, now = (f"a file of {i.size} bytes" for i in both)
        if then != now:
            source.close()
            raise ReadError(
                f"{self.info.path} was {then} when the run began and is {now}; see that all ranks have the same files, "
                "and start the run again"
            )
        return source

    def close(self) -> None:
        self._closed = True
        super().close()
