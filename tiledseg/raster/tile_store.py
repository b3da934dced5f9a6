"""Tile stores: rasters and their labels in chunks of one Zarr store, written by all ranks, or of one HDF5 file
(netCDF-4), written by one rank. `array_open` reads both.

    /               attributes `tiledseg`: {"images": [has a mask, ...], "labels": [...]}, sealed; in HDF5 `done`
    /0              image 0 and its labels, with the coordinates y and x, and the CRS in `spatial_ref`
    /0/images       (band, y, x); `/0/images_valid` (y, x): 0 at invalid pixels, if some may be invalid
    /0/labels       (y, x), or (colour, y, x), raw values; `/0/labels_valid`

A store has a temporary name until it is complete.
"""

from __future__ import annotations

import importlib.util
import io
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tiledseg.config.map_formats import ZARR
from tiledseg.errors import ConfigError, OutputError, install
from tiledseg.geometry.box import Box
from tiledseg.raster.array_names import DONE, HDF5, OWN, STORED, TILES, sealed
from tiledseg.raster.array_place import flags
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.mirrored_reader import RasterReader, prefetch
from tiledseg.raster.zarr_writer import CONVENTIONS, WHOLE, check_zarr, consolidate, write_place
from tiledseg.system.files import delete, flush, temporary, writing
from tiledseg.system.outputs import check_ending, files_below
from tiledseg.system.run_lock import check_unclaimed, claimed, taken

_LARGEST_SIDE = {HDF5: 512, ZARR: 2048}
"""Largest side of a chunk in pixels. A Zarr chunk is a file; Zarr's codecs take at most 2 GiB."""

Opener = Callable[[int], AbstractContextManager[RasterReader]]
"""Opens a raster by the number of its image."""


@dataclass(frozen=True)
class StorePlan:
    """The rasters of a store: images, their labels (or None), and the side lengths (rows, cols) of each image's tiles.
    `format`: "hdf5" or "zarr"."""

    images: tuple[RasterInfo, ...]
    labels: tuple[RasterInfo, ...] | None
    tiles: tuple[tuple[int, int], ...]
    format: str = HDF5

    def rasters(self) -> Iterator[tuple[int, str, RasterInfo, list[int]]]:
        """Yield the number of the image, "images" or "labels", the raster, and the sides of its chunks."""
        for number, tile in enumerate(self.tiles):
            sides = [min(side, _LARGEST_SIDE[self.format]) for side in tile]
            yield number, "images", self.images[number], sides
            if self.labels is not None:
                yield number, "labels", self.labels[number], sides

    @property
    def bytes(self) -> int:
        """Return the bytes of the pixels, without masks."""
        rasters = (info for _, _, info, _ in self.rasters())
        return sum(info.bands * info.height * info.width * np.dtype(info.dtype).itemsize for info in rasters)


def check_store(key: str, path: str, form: str) -> None:
    """Raise ConfigError if the format's libraries are missing, OutputError if the path exists or has another ending."""
    if form == ZARR:
        return check_zarr(key, path)
    if importlib.util.find_spec("h5netcdf") is None:
        raise ConfigError(f"--format hdf5 needs h5netcdf: {install('zarr')}")
    check_ending(key, path, *STORED)
    if os.path.exists(path):
        raise OutputError(f"{key} {path} is there; remove it, or choose another output")


@contextmanager
def store_made(output: str) -> Iterator[Path]:
    """Yield a temporary name for a store, claimed by this job and emptied of a killed job's files. At the end of the
    block the store is flushed to the disk and renamed to `output`."""
    path, part = Path(output), temporary(output)
    store = part.with_name(f"{part.name}.packed")
    with writing(path):
        check_unclaimed(part, path)
        part.touch()
        with claimed(part, path):
            try:
                delete(store)
                yield store
                for file in files_below(store) or [store]:
                    flush(file)
                if path.exists():
                    raise taken(path)
                os.rename(store, path)
            finally:
                delete(store)
                delete(part)


def begin_zarr(store: Path, plan: StorePlan) -> None:
    """Create a Zarr store of the plan's rasters without chunks, on one rank."""
    import zarr

    with zarr.config.set(WHOLE):
        _create(zarr.create_group(store, zarr_format=3, attributes=CONVENTIONS, overwrite=True), plan)
        consolidate(store)


def write_tiles(
    store: Path, plan: StorePlan, image: Opener, label: Opener, rank: int, size: int, beat: Callable[[], object]
) -> bool:
    """Write this rank's chunks: of a Zarr store every `size`-th one, of an HDF5 file all on rank 0. Return True if an
    image has a valid pixel in them. `beat` is called after each chunk."""
    if plan.format == ZARR:
        import zarr

        with zarr.config.set(WHOLE):
            root = zarr.open_group(store, mode="r+", zarr_format=3, use_consolidated=False)
            return _fill(root, plan, image, label, rank, size, beat)
    if rank:
        return False
    import h5netcdf

    with _HdfTarget(store, "xb+") as target:
        with h5netcdf.File(target, "w", libver="latest") as file:
            group = _HdfGroup(file)
            _create(group, plan)

            def checked() -> None:
                target.check()
                beat()

            any_valid = _fill(group, plan, image, label, 0, 1, checked)
            file.attrs[DONE] = 1
        target.check()
    return any_valid


def _create(root: Any, plan: StorePlan) -> None:
    """Create the arrays of all rasters without chunks, and the attributes."""
    masks = {"images": [info.has_mask for info in plan.images], "labels": [info.has_mask for info in plan.labels or ()]}
    root.attrs[TILES] = _fixed(sealed(masks)) if plan.format == HDF5 else sealed(masks)
    place: dict[str, Any] = {}
    for number, kind, info, sides in plan.rasters():
        group = root.require_group(str(number))
        if kind == "images":
            place = write_place(group, info.shape, info.transform, info.crs)
        bands = (info.bands,) if kind == "images" or info.bands > 1 else ()
        names = dict(info.class_names) if kind == "labels" else {}
        own = sealed({key: getattr(info, key) for key in OWN})
        group.create_array(
            kind,
            shape=(*bands, *info.shape),
            chunks=(*bands, *sides),
            dtype=info.dtype,
            dimension_names=("band" if kind == "images" else "colour", "y", "x")[-len(bands) - 2 :],
            attributes=place | flags(list(names.values()), list(names)) | {TILES: own},
        )
        if info.has_mask:
            how = {"shape": info.shape, "chunks": tuple(sides), "dimension_names": ("y", "x"), "attributes": place}
            group.create_array(f"{kind}_valid", dtype="uint8", **how)


def _fill(
    root: Any, plan: StorePlan, image: Opener, label: Opener, rank: int, size: int, beat: Callable[[], object]
) -> bool:
    turn, any_valid = 0, False
    for number, kind, info, sides in plan.rasters():
        group = root[str(number)]
        boxes = list(Box.of_shape(info.shape).blocks(*sides))
        own = boxes[(rank - turn) % size :: size]
        turn += len(boxes)
        with (image if kind == "images" else label)(number) as reader:
            read = prefetch(own, reader.read, threads=2, depth=2)
            for box, (pixels_CHW, valid_HW) in zip(own, read, strict=True):
                whole = kind == "images" or info.bands > 1
                group[kind][(..., *box.slices)] = pixels_CHW if whole else pixels_CHW[0]
                if info.has_mask:
                    group[f"{kind}_valid"][box.slices] = valid_HW
                any_valid = any_valid or (kind == "images" and bool(valid_HW.any()))
                beat()
    return any_valid


class _HdfGroup:
    """A group of an HDF5 file with the functions of Zarr's groups that are used here."""

    def __init__(self, group: Any) -> None:
        self._group, self.attrs = group, group.attrs

    def require_group(self, name: str) -> _HdfGroup:
        return _HdfGroup(self._group.groups.get(name) or self._group.create_group(name))

    def create_array(
        self,
        name: str,
        attributes: dict[str, Any],
        dimension_names: tuple[str, ...] = (),
        data: Any = None,
        shape: tuple[int, ...] = (),
        chunks: tuple[int, ...] | None = None,
        dtype: Any = None,
    ) -> None:
        for dim, side in zip(dimension_names, shape if data is None else data.shape, strict=True):
            if dim not in self._group.dimensions:
                self._group.dimensions[dim] = side
        checked = {"chunks": chunks, "fletcher32": True} if chunks else {}
        self._group.create_variable(name, dimension_names, dtype, data, **checked).attrs.update(
            {key: _fixed(value) for key, value in attributes.items()}
        )

    def __getitem__(self, name: str) -> Any:
        found = self._group[name]
        return _HdfGroup(found) if name in self._group.groups else found


def _fixed(value: Any) -> Any:
    """Return a text with a fixed length: HDF5 has a checksum of it, and none of its heap of texts of other lengths."""
    return np.bytes_(value.encode()) if isinstance(value, str) and value.isascii() else value


class _HdfTarget(io.FileIO):
    """A file that records a failed write, or a signal's exception, as `error`: HDF5 crashes if a write fails while it
    closes the file."""

    error: BaseException | None = None

    def check(self) -> None:
        """Raise the recorded error."""
        if self.error is not None:
            raise self.error

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
