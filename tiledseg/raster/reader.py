"""The opening of any raster (file, URL, tile store, array), and the identity of a raster's file over time.

An identity holds the path, a hash of the size and of three blocks of 64 KiB (begin, middle, end), and the time of the
last change. The hash tells a moved file from a replaced one. An edit between the blocks shows in the time alone, and so
does an edit of a companion file: a mask, attributes of polygons, sources of a VRT."""

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
from tiledseg.raster.composed import Composed, Raster, files_of, label_of, open_composed, parse_raster
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
    order wanted; None: all but an alpha band. `nodata` replaces the file's own nodata value. `references`: also
    formats that read further files and URLs, such as VRT and WMS.

    Raises RasterError, in one line, if the file is missing, truncated or no raster, if it lacks one of `bands`, and
    for any other fault.
    """
    return _open(parse_raster(str(path)), bands, nodata, references)


def _open(path: Raster, bands: Sequence[int] | None, nodata: float | None, references: bool) -> RasterReader:
    if isinstance(path, Composed):
        return open_composed(
            path, bands, lambda part, own, is_image: _open(part, own, nodata if is_image else None, references)
        )
    if path.startswith(MEMORY):
        if (array := array_of(path)) is None:
            raise RasterError(f"{path} is no array of this program any more; give its xarray.DataArray again")
        source = str(array.encoding.get("source", ""))  # the array's file, as rioxarray and xarray record it
        return open_array(path, array, bands, nodata, "DataArray", (source,) if os.path.exists(source) else ())
    if parse_store_name(path) or is_tile_store(path):
        return StoreReader(path, bands, nodata)
    name = parse_array_name(path)
    if name is not None:
        return open_named(path, name, bands, nodata)
    return GdalReader(path, bands, nodata, references)


class KnownReader(RasterReader):
    """A raster with known `info`, opened by `opener` at its first read. The read raises ReadError, on this rank alone,
    if the raster cannot be opened here or has changed since `info` was read."""

    wraps = True

    def __init__(self, info: RasterInfo, opener: Callable[[], RasterReader]) -> None:
        self.info = info
        self._opener = opener
        self._source: RasterReader | None = None
        self._lock = threading.Lock()

    def _read_inside(self, box: Box) -> tuple[NDArray, NDArray[np.bool_]]:
        with self._lock:
            if self._source is None:
                try:
                    source = self._opener()
                except RasterError as error:
                    raise ReadError(str(error)) from error
                both = self.info, source.info
                then, now = (f"{i.height} x {i.width} px, {i.bands} bands of {i.dtype}" for i in both)
                if then == now:
                    then, now = (f"a file of {i.size} bytes" for i in both)  # compressed images differ in size
                if then != now:
                    source.close()
                    raise ReadError(
                        f"{self.info.path} was {then} when the run began and is {now}; give all ranks the same files, "
                        "and start the run again"
                    )
                self._source, self.held = source, (source,)
        return self._source.read(box)


_BLOCK = 1 << 16


@dataclass(frozen=True)
class Beside:
    """A companion file of a raster: path relative to the raster's folder, size, and time of change in Unix seconds."""

    path: str
    bytes: int
    written: float


@dataclass(frozen=True)
class Identity:
    """The identity of a raster. `sample`: hash of some bytes, the size, and the number in a tile store. `written`: time
    of change in Unix seconds. Both are None for a raster that is no local file. `beside`: its companion files; None in
    older checkpoints."""

    path: str
    sample: str | None = None
    written: float | None = None
    beside: tuple[Beside, ...] | None = None

    @property
    def label(self) -> str:
        """Return the path for messages."""
        return label_of(self.path)

    def is_at(self, other: Identity) -> bool:
        """Return True if both have the same path."""
        return self.path == other.path or os.path.realpath(self.path) == os.path.realpath(other.path)

    def holds_what(self, other: Identity) -> bool:
        """Return True if both have the same sample."""
        return self.sample is not None and self.sample == other.sample

    def changed_since(self, earlier: Identity) -> bool:
        """Return True if the content has changed, or one of the raster's files was written to."""
        if (self.sample, self.written) != (earlier.sample, earlier.written):
            return True
        return None not in (self.beside, earlier.beside) and self.beside != earlier.beside


def identify(path: str, beside: Iterable[str] = ()) -> Identity:
    """Return the identity of a raster, given as for `open_raster`; `beside`: its companion files. An image of several
    rasters hashes the samples of all, with their newest time. A Zarr store hashes the names and sizes of its files,
    with their newest time."""
    raster = parse_raster(path)
    if isinstance(raster, Composed):
        parts = [identify(file) for file in files_of(raster)]
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
    """Return the folder to which the paths of companion files are relative."""
    return "/" if isinstance(parse_raster(path), Composed) else os.path.dirname(os.path.abspath(file_of(path)))


def _states(beside: Iterable[str], folder: str) -> tuple[Beside, ...]:
    states = {os.path.relpath(part, folder): os.stat(part) for part in beside if os.path.exists(part)}
    return tuple(Beside(part, status.st_size, status.st_mtime) for part, status in sorted(states.items()))


def written_since(earlier: Iterable[Identity]) -> tuple[str, ...]:
    """Return the paths of the rasters that have changed since `earlier`, each once."""
    changed = []
    for each in earlier:
        folder = _folder(each.path)
        if identify(each.path, (os.path.join(folder, part.path) for part in each.beside or ())).changed_since(each):
            changed.append(each.label)
    return tuple(dict.fromkeys(changed))
