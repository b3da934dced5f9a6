"""Writing a tile store under a temporary name, which becomes its own once the store is whole."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tiledseg.config.checks import shown
from tiledseg.errors import OutputError
from tiledseg.geometry.tiling import Tile, Tiling
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.mirrored_reader import RasterReader, prefetch
from tiledseg.raster.remote import is_named
from tiledseg.raster.tile_store import (
    FORMAT,
    VERSION,
    StoreName,
    checksum,
    count_rasters,
    described,
    encode,
    is_tile_store,
    open_store,
    slot_shape,
    slots,
)
from tiledseg.system.files import replacing, temporary
from tiledseg.system.outputs import Output, whole
from tiledseg.system.run_lock import check_unclaimed, claimed, is_at, taken

if TYPE_CHECKING:
    import h5py

_CHUNK_BYTES = 4 << 20
Opener = Callable[[int], AbstractContextManager[RasterReader]]
"""Opens a raster by the number of its image."""


@dataclass(frozen=True)
class StorePlan:
    """The rasters of a store: images, their labels (or None) and how each is cut."""

    images: tuple[RasterInfo, ...]
    labels: tuple[RasterInfo, ...] | None
    tilings: tuple[Tiling, ...]

    def rasters(self) -> Iterator[tuple[StoreName, RasterInfo, Tiling]]:
        """Yield every raster with its name, in no file yet."""
        for number, (info, tiling) in enumerate(zip(self.images, self.tilings, strict=True)):
            yield StoreName("", number, labels=False), info, tiling
            if self.labels is not None:
                yield StoreName("", number, labels=True), self.labels[number], tiling

    @property
    def files(self) -> tuple[str, ...]:
        """Return all files that the rasters are read from."""
        return tuple(file for _, info, _ in self.rasters() for file in info.files)

    @property
    def tiles(self) -> int:
        """Return the number of tiles of all images."""
        return sum(map(len, self.tilings))

    @property
    def bytes(self) -> int:
        """Return bytes of the pixels. Invalid pixels take more, only where there are some."""
        sizes = (
            np.prod(slot_shape(name.labels, info, tiling)) * np.dtype(info.dtype).itemsize * len(tiling)
            for name, info, tiling in self.rasters()
        )
        return int(sum(sizes))


def store_output(path: str, plan: StorePlan) -> Output:
    """Return the files that writing the store touches, and its bytes where it is not there yet."""
    return whole("--output", path, 0 if os.path.exists(path) else plan.bytes)


def is_cut(path: str, plan: StorePlan) -> bool:
    """Return True where the store at `path` is the one that `plan` makes, False where nothing is there.

    Raises OutputError for another store or another file, RasterError for a store that cannot be read.
    """
    if not os.path.exists(path):
        check_unclaimed(temporary(path), path)
        return False
    if not is_tile_store(path):
        raise OutputError(f"{path} exists and is no tile store; remove it or give another --output")
    advice = "remove it, or give another --output"
    with open_store(path) as file:
        counts = tuple(count_rasters(file, kind) for kind in ("images", "labels"))
        planned = len(plan.images), len(plan.labels or ())
        if counts != planned:
            raise OutputError(
                f"{path} holds {counts[0]} images and {counts[1]} labels, not the {planned[0]} and {planned[1]} of "
                f"this command; {advice}"
            )
        for name, info, tiling in plan.rasters():
            own = name._replace(store=path)
            written, now = described(file, own), json.loads(_identity(info, tiling))
            slots(file, own)
            for key, value in now.items():
                if written.get(key) != value:
                    raise OutputError(
                        f"{path} was cut from another state of {info.path}: its {key} was {shown(written.get(key))}, "
                        f"now it is {shown(value)}; {advice}"
                    )
    return True


def write_store(path: str, plan: StorePlan, image: Opener, label: Opener, advance: Callable[[int], object]) -> None:
    """Cut every raster of `plan` into the store at `path`, where nothing is.

    `advance` is called with the image's number after each tile. A run that is killed leaves a temporary file, which the
    next run replaces. Raises RasterError where a raster cannot be read, WriteError where the disk takes no more.
    """
    with replacing(path) as part, _new_file(part, path) as (file, check):
        file.attrs.update(format=FORMAT, version=VERSION)
        for name, info, tiling in plan.rasters():
            pixels, invalid = _create(file, name, info, tiling)
            with (label if name.labels else image)(name.number) as reader:

                def load(tile: Tile, name: StoreName = name, reader: RasterReader = reader) -> tuple[NDArray, NDArray]:
                    return reader.read(tile.core if name.labels else tile.context)

                arrays = prefetch(tiling.tiles, load, threads=2, depth=2)
                for tile, (pixels_CHW, valid_HW) in zip(tiling.tiles, arrays, strict=True):
                    height, width = valid_HW.shape
                    pixels[tile.index, :, :height, :width] = pixels_CHW
                    if not valid_HW.all():
                        invalid[tile.index, :height, :width] = ~valid_HW
                    check()
                    if not name.labels:
                        advance(name.number)
        file.attrs["done"] = True


@contextmanager
def _new_file(part: Path, path: str) -> Iterator[tuple[h5py.File, Callable[[], None]]]:
    """Yield a new HDF5 file and a function that raises what the disk has refused. Other jobs are kept from `part`."""
    import h5py

    with _HdfTarget(part, "xb+") as target, claimed(part, path):

        def check() -> None:
            if target.error is not None:
                raise target.error

        with h5py.File(target, "w", libver="latest") as file:
            yield file, check
        check()
        if not is_at(target.fileno(), part) or os.path.exists(path):
            raise taken(path)


class _HdfTarget(io.FileIO):
    """A file that keeps a refused write, or a signal's, as `error`: HDF5 crashes where a write fails in its close."""

    error: BaseException | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        end = self.tell() + len(view)
        try:
            while view and self.error is None:
                view = view[os.write(self.fileno(), view) :]
        except BaseException as error:
            self.error = error
        return self.seek(end)

    def truncate(self, size: int | None = None) -> int:
        try:
            os.truncate(self.fileno(), size or 0)
        except BaseException as error:
            self.error = error
        return size or 0


def _create(file: h5py.File, name: StoreName, info: RasterInfo, tiling: Tiling) -> tuple[h5py.Dataset, h5py.Dataset]:
    """Create the empty datasets of a raster, in chunks of whole rows of one tile."""
    group = file.create_group(name.group)
    text = _identity(info, tiling)
    group.attrs.update(raster=text, crc32=checksum(text))
    bands, height, width = slot_shape(name.labels, info, tiling)
    dtype = np.dtype(info.dtype)
    pieces = -(-bands * height * width * dtype.itemsize // _CHUNK_BYTES)
    rows = -(-height // min(pieces, height))
    options = {"fletcher32": True, "track_times": False}
    shape, chunk = (len(tiling), bands, height, width), (1, bands, rows, width)
    pixels = group.create_dataset("pixels", shape, dtype, chunks=chunk, **options)
    invalid = group.create_dataset("invalid", (shape[0], *shape[2:]), "u1", chunks=(1, rows, width), **options)
    return pixels, invalid


def _identity(info: RasterInfo, tiling: Tiling) -> str:
    """Return the JSON of a raster with the state of its file, and of those beside it that hold a part of it."""
    source: dict[str, Any] = {"path": info.path, **_state(info.path)}
    beside = {path: _state(path) for path in info.beside}
    return encode(info, tiling, {**source, "beside": beside} if beside else source)


def _state(path: str) -> dict[str, int]:
    if is_named(path) or not os.path.exists(path):
        return {}
    status = os.stat(path)
    return {"bytes": status.st_size, "modified_ns": status.st_mtime_ns}
