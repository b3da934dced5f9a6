"""Opening any raster by one interface: a GeoTIFF, COG, JPEG 2000, PNG or JPEG, a URL, or one of an HDF5 tile store. And
the identity of a raster's file over time: its path, and a few of its bytes.

Three blocks of 64 KiB (begin, middle, end), the size and the time of the last change cost no more than opening the
file. They tell a file that was moved from one that was replaced; an edit between the blocks shows in the time alone.
So does one of a file beside it that holds a part of it: a mask, attributes of polygons, sources of a VRT."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tiledseg.config.checks import checked
from tiledseg.errors import RasterError, ReadError
from tiledseg.geometry.box import Box
from tiledseg.raster.array_names import MEMORY, array_of, file_of, parse_array_name
from tiledseg.raster.array_open import open_array, open_named
from tiledseg.raster.composed import label_of, open_composed, parse_composed
from tiledseg.raster.gdal_reader import GdalReader
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.mirrored_reader import RasterReader
from tiledseg.raster.tile_store import StoreReader, is_tile_store, parse_store_name
from tiledseg.system.files import irregular_kind, is_zarr
from tiledseg.system.outputs import files_below

__all__ = ["RasterReader", "open_raster"]


@checked
def open_raster(
    path: str | Path, bands: Sequence[int] | None = None, nodata: float | None = None, references: bool = False
) -> RasterReader:
    """Open a raster for reading boxes.

    `path`: a file, an s3://, gs://, az:// or http(s):// URL, a /vsi... path, one raster of a tile store ("tiles.h5#0"),
    or a variable of a Zarr store or netCDF file ("store.zarr:/reflectance"). `bands`: numbers from 1 as in GDAL, in the
    order wanted; all but an alpha band where None. `nodata` takes the place of the file's own nodata value.
    `references`: also formats that read further files and URLs, such as VRT and WMS.

    Raises RasterError, in one line, where the file is missing, truncated or no raster, or lacks one of `bands`, and for
    anything else that goes wrong inside.
    """
    path = str(path)
    if composed := parse_composed(path):
        return open_composed(
            composed,
            bands,
            lambda name, own, is_image: open_raster(name, own, nodata if is_image else None, references),
        )
    if path.startswith(MEMORY):
        if (array := array_of(path)) is None:
            raise RasterError(f"{path} is no array of this program any more; give its xarray.DataArray again")
        source = str(array.encoding.get("source", ""))  # of rioxarray and xarray: the file that it lies in
        return open_array(path, array, bands, nodata, "DataArray", (source,) if os.path.exists(source) else ())
    if parse_store_name(path) or is_tile_store(path):
        return StoreReader(path, bands, nodata)
    name = parse_array_name(path)
    if name is not None:
        return open_named(path, name, bands, nodata)
    return GdalReader(path, bands, nodata, references)


class KnownReader(RasterReader):
    """A raster of `info`, opened by `opener` at its first read. That raises ReadError, of this rank alone, where the
    raster cannot be opened here or has changed since `info` was read."""

    wraps = True

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
                try:
                    source = self._opener()
                except RasterError as error:
                    raise ReadError(str(error)) from error
                both = self.info, source.info
                then, now = (f"{i.height} x {i.width} px, {i.bands} bands of {i.dtype}" for i in both)
                if then == now:
                    then, now = (f"a file of {i.size} bytes" for i in both)  # which tells compressed images apart
                if then != now:
                    source.close()
                    raise ReadError(
                        f"{self.info.path} was {then} when the run began and is {now}; see that all ranks have the "
                        "same files, and start the run again"
                    )
                self._source, self.held = source, (source,)
        return self._source.read(box)

    def close(self) -> None:
        self._closed = True
        super().close()


_BLOCK = 1 << 16


@dataclass(frozen=True)
class Beside:
    """A file that holds a part of a raster, as it was found: its path from the raster's folder, its size, and its time
    of change in seconds."""

    path: str
    bytes: int
    written: float


@dataclass(frozen=True)
class Identity:
    """A raster as it was found: `sample` is of its bytes and size (and the number in a tile store), `written` its time
    of change in seconds. Both are None for what is no local file, which its path alone names. `beside`: the other local
    files that hold a part of it; None where an older checkpoint did not record them."""

    path: str
    sample: str | None = None
    written: float | None = None
    beside: tuple[Beside, ...] | None = None

    @property
    def label(self) -> str:
        """Return the path for messages."""
        return label_of(self.path)

    def is_at(self, other: Identity) -> bool:
        """Return True if both have one path."""
        return self.path == other.path or os.path.realpath(self.path) == os.path.realpath(other.path)

    def holds_what(self, other: Identity) -> bool:
        """Return True if both have one content, as far as the sample tells."""
        return self.sample is not None and self.sample == other.sample

    def changed_since(self, earlier: Identity) -> bool:
        """Return True if the raster has other content than it had, or one of its files was written to."""
        if (self.sample, self.written) != (earlier.sample, earlier.written):
            return True
        return None not in (self.beside, earlier.beside) and self.beside != earlier.beside


def identify(path: str, beside: Iterable[str] = ()) -> Identity:
    """Return the identity of a raster, given as `open_raster` takes it; `beside`: the other files that hold a part of
    it. That of an image of several rasters is of all their bytes, and of the last change; that of a Zarr store of the
    names and sizes of its files, and of the newest time."""
    if composed := parse_composed(path):
        parts = [identify(name) for name in composed.files()]
        words = "/".join(part.sample or part.path for part in parts)
        written = max((part.written for part in parts if part.written is not None), default=None)
        return Identity(path, hashlib.sha256(words.encode()).hexdigest()[:32], written, _states(beside, _folder(path)))
    name = parse_store_name(path)
    file = file_of(path) if name is None else name.store
    if is_zarr(file):
        chunks = sorted((str(each.relative_to(file)), each.stat()) for each in files_below(file))
        digest = hashlib.sha256("".join(f"{chunk}\0{status.st_size}\0" for chunk, status in chunks).encode())
        return Identity(path, digest.hexdigest()[:32], max((each.st_mtime for _, each in chunks), default=0.0), ())
    if irregular_kind(file) is not None or not os.path.isfile(file):
        return Identity(path)
    about = os.stat(file)
    digest = hashlib.sha256(f"{name and (name.number, name.labels)}{about.st_size}".encode())
    with open(file, "rb") as opened:
        for start in (0, max(0, about.st_size // 2 - _BLOCK // 2), max(0, about.st_size - _BLOCK)):
            opened.seek(start)
            digest.update(opened.read(_BLOCK))
    return Identity(path, digest.hexdigest()[:32], about.st_mtime, _states(beside, _folder(file)))


def _folder(path: str) -> str:
    """Return the folder from which the files beside a raster are named."""
    return "/" if parse_composed(path) else os.path.dirname(os.path.abspath(file_of(path)))


def _states(beside: Iterable[str], folder: str) -> tuple[Beside, ...]:
    states = {os.path.relpath(part, folder): os.stat(part) for part in beside if os.path.exists(part)}
    return tuple(Beside(part, status.st_size, status.st_mtime) for part, status in sorted(states.items()))


def written_since(earlier: Iterable[Identity]) -> tuple[str, ...]:
    """Return the paths of files that have changed, each once."""
    changed = []
    for each in earlier:
        folder = _folder(each.path)
        if identify(each.path, (os.path.join(folder, part.path) for part in each.beside or ())).changed_since(each):
            changed.append(each.label)
    return tuple(dict.fromkeys(changed))
