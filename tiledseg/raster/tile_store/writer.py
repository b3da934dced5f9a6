"""Writing a tile store from many ranks, so that a killed run goes on where it stood.

One rank lays the file out under the name `tiles.h5.partial`: all groups, attributes and contiguous datasets, sparse, no
pixel yet. From then on each tile has its place, and any rank puts it there with `pwrite`; its state byte follows once
the pixels are on the disk. After a barrier of the caller one rank renames the file. A tile is thus either absent or
whole wherever a run is killed, and the bytes of the final file depend on the rasters and the plan only.

    store = begin_store(path, plan)                                 one rank; broadcast the value
    write_tiles(store, images, labels, plan.tilings, share)         every rank, its share of store.missing
    publish_store(store, plan)                                      one rank, after a barrier
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiledseg.errors import OutputError
from tiledseg.geometry.tiling import Tiling
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.mirrored_reader import RasterReader
from tiledseg.raster.names import is_named
from tiledseg.raster.prefetch import prefetch
from tiledseg.raster.tile_reference import TileReference
from tiledseg.raster.tile_store.header import (
    add_checksum,
    first_checksum,
    is_tile_store,
    read_header,
    seal_file,
    user_block,
)
from tiledseg.raster.tile_store.layout import lay_out_hdf5
from tiledseg.raster.tile_store.sparse_file import SparseFile
from tiledseg.raster.tile_store.store import (
    ABSENT,
    ALL_VALID,
    FILLED,
    SOME_INVALID,
    Slots,
    StoreName,
    count,
    encode,
    load_slots,
    parse_key,
    slot_shape,
)
from tiledseg.system.claim import check_unclaimed
from tiledseg.system.outputs import Output, temporary
from tiledseg.system.writing import flush, replacing, writing


@dataclass(frozen=True)
class StorePlan:
    """What goes into a store: images, their labels (or None) and how each is cut."""

    images: tuple[RasterInfo, ...]
    labels: tuple[RasterInfo, ...] | None
    tilings: tuple[Tiling, ...]

    def rasters(self) -> Iterator[tuple[StoreName, RasterInfo, Tiling]]:
        """Every raster of the store with its name (of no file yet)."""
        for number, (info, tiling) in enumerate(zip(self.images, self.tilings, strict=True)):
            yield StoreName("", number, labels=False), info, tiling
        for number, (info, tiling) in enumerate(zip(self.labels or (), self.tilings, strict=self.labels is not None)):
            yield StoreName("", number, labels=True), info, tiling

    @property
    def files(self) -> tuple[str, ...]:
        """All files that the rasters are read from."""
        return tuple(file for _, info, _ in self.rasters() for file in info.files)

    @property
    def bytes(self) -> int:
        """What the pixels take on the disk. Validity takes more only where pixels are invalid."""
        sizes = (
            np.prod(slot_shape(name.labels, info, tiling)) * np.dtype(info.dtype).itemsize * len(tiling)
            for name, info, tiling in self.rasters()
        )
        return int(sum(sizes))


@dataclass(frozen=True)
class StoreState:
    """A laid-out store: its final name, its name until then, whether it has its final name, and the tiles it lacks."""

    path: str
    partial: str
    finished: bool
    missing: tuple[TileReference, ...]


def store_output(path: str, plan: StorePlan) -> Output:
    """The files that writing the store at `path` touches, and its bytes where none of them are there yet."""
    partial = Path(_partial(path))
    there = any(os.path.exists(name) for name in (path, partial))
    return Output("--output", path, (partial, temporary(partial)), 0 if there else plan.bytes)


def _partial(path: str) -> str:
    return f"{path}.partial"


def begin_store(path: str, plan: StorePlan) -> StoreState:
    """Lay the store out, or find what a killed run left of it.

    The caller has asked `check_outputs` about `store_output`. Raises OutputError where a store of that name, finished
    or not, was cut from other rasters or in another way, WriteError where the disk does not take it.
    """
    partial = _partial(path)
    if os.path.exists(path):
        if not is_tile_store(path):
            raise OutputError(f"{path} exists and is no tile store; remove it or give another --output")
        _check_same(path, plan)
        return StoreState(path, partial, True, ())
    if os.path.exists(partial):
        _check_same(partial, plan)
    else:
        check_unclaimed(temporary(partial), path)
        _lay_out(Path(partial), plan)
    return StoreState(path, partial, False, _missing(partial, plan))


def write_tiles(
    store: StoreState,
    images: Mapping[int, RasterReader],
    labels: Mapping[int, RasterReader] | None,
    tilings: Sequence[Tiling],
    share: Sequence[TileReference],
    written: Callable[[TileReference], object] = lambda tile: None,
) -> None:
    """Read the tiles of `share` and put them in place; one thread reads ahead. `written` is called after each tile.

    `images` and `labels` are the readers of the images in the share, by image number.

    Raises RasterError where a raster cannot be read, WriteError where the disk does not take a tile.
    """

    ends = {tile.image: at for at, tile in enumerate(share)}  # where each image is done with

    def load(at: int) -> list[tuple[StoreName, NDArray, NDArray[np.bool_]]]:
        tile = share[at]
        place = tilings[tile.image].tiles[tile.tile]
        found = [(StoreName("", tile.image, False), *images[tile.image].read(place.context))]
        if labels is not None:
            found.insert(0, (StoreName("", tile.image, True), *labels[tile.image].read(place.core)))
        if ends[tile.image] == at:
            for readers in (images, labels or {}):
                if tile.image in readers:
                    readers[tile.image].release()
        return found

    if not share:
        return
    with _StoreWriter(store.partial) as writer:
        loaded = prefetch(range(len(share)), load, threads=1, depth=2)
        for tile, rasters in zip(share, loaded, strict=True):
            writer.write(tile.tile, rasters)
            written(tile)


def publish_store(store: StoreState, plan: StorePlan) -> None:
    """Give the store its final name, if it has not got it yet. Raises OutputError where a tile is still absent, or
    where another job's store, or that of a source that has changed since, stands in the place of this one's."""
    if store.finished:
        return
    _check_same(store.partial, plan)
    header = read_header(store.partial)
    names = (StoreName(store.partial, *parse_key(key)) for key in header.rasters)
    absent = [str(name) for name in names if not load_slots(header, name).states.all()]
    if absent:
        raise OutputError(f"{store.partial} lacks tiles in {absent[0]}; run the command again")
    with writing(store.path):
        os.replace(store.partial, store.path)
        flush(Path(store.path).parent)


class _StoreWriter:
    """Puts tiles into a laid-out store."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._slots: dict[StoreName, Slots] = {}

    def __enter__(self) -> _StoreWriter:
        with writing(self._path):
            self._handle = os.open(self._path, os.O_WRONLY)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)

    def write(self, index: int, rasters: Sequence[tuple[StoreName, NDArray, NDArray[np.bool_]]]) -> None:
        """Pixels and checksums first, then, once they are on the disk, the state of each raster in the order given."""
        with writing(self._path):
            states = [(name, self._write_pixels(self._of(name), index, *arrays)) for name, *arrays in rasters]
            os.fdatasync(self._handle)
            for name, state in states:
                _write_all(self._handle, np.array([state], np.uint8), self._of(name).at["state"] + index)

    def _write_pixels(self, slots: Slots, index: int, pixels_CHW: NDArray, valid_HW: NDArray[np.bool_]) -> int:
        dtype = np.dtype(slots.info.dtype).newbyteorder("<")
        state = ALL_VALID if valid_HW.all() else SOME_INVALID
        pixels_CHW = _in_slot(pixels_CHW.astype(dtype, copy=False), slots.shape)
        _write_all(self._handle, pixels_CHW, slots.pixels_of(index))
        checksum = add_checksum(first_checksum(index, state), pixels_CHW)
        if state == SOME_INVALID:
            invalid_CHW = _in_slot((~valid_HW).astype(np.uint8)[None], (1, *slots.shape[1:]))
            _write_all(self._handle, invalid_CHW, slots.invalid_of(index))
            checksum = add_checksum(checksum, invalid_CHW)
        _write_all(self._handle, np.array([checksum], "<u4"), slots.at["checksums"] + 4 * index)
        return state

    def _of(self, name: StoreName) -> Slots:
        if name not in self._slots:
            self._slots[name] = load_slots(read_header(self._path), name._replace(store=self._path))
        return self._slots[name]


def _in_slot(pixels_CHW: NDArray, shape: tuple[int, int, int]) -> NDArray:
    """The pixels in the upper left corner of a slot of zeros."""
    if pixels_CHW.shape == shape:
        return np.ascontiguousarray(pixels_CHW)
    slot_CHW = np.zeros(shape, pixels_CHW.dtype)
    slot_CHW[:, : pixels_CHW.shape[1], : pixels_CHW.shape[2]] = pixels_CHW
    return slot_CHW


def _write_all(handle: int, values: NDArray, at: int) -> None:
    view = memoryview(values.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
    while view:
        count = os.pwrite(handle, view, at)
        view, at = view[count:], at + count


def _lay_out(partial: Path, plan: StorePlan) -> None:
    """Write the empty store under `partial`, in one step as seen from outside."""
    described = {name.key: _identity(info, tiling) for name, info, tiling in plan.rasters()}
    start, empty = user_block(described, FILLED), SparseFile()
    seal_file(empty, start, lay_out_hdf5(empty, plan.rasters(), described, start))
    with replacing(partial) as part:
        empty.save(str(part))
    with writing(partial):
        flush(partial.parent)


def _identity(info: RasterInfo, tiling: Tiling) -> str:
    """With the state of the raster's file, and of those beside it that hold a part of it."""
    source: dict[str, Any] = {"path": info.path, **_state(info.path)}
    beside = {path: _state(path) for path in info.beside}
    return encode(info, tiling, {**source, "beside": beside} if beside else source)


def _state(path: str) -> dict[str, int]:
    """Of a local file."""
    if is_named(path) or not os.path.exists(path):
        return {}
    status = os.stat(path)
    return {"bytes": status.st_size, "modified_ns": status.st_mtime_ns}


def _check_same(path: str, plan: StorePlan) -> None:
    """Raise OutputError where the store at `path` is not the one that `plan` makes."""
    advice = "remove it, or give another --output"
    header = read_header(path)
    counts = tuple(count(header.rasters, labels) for labels in (False, True))
    wanted = len(plan.images), len(plan.labels or ())
    if counts != wanted:
        raise OutputError(
            f"{path} holds {counts[0]} images and {counts[1]} labels, not the {wanted[0]} and {wanted[1]} asked "
            f"for; {advice}"
        )
    for name, info, tiling in plan.rasters():
        slots = load_slots(header, name._replace(store=path))
        if slots.tiling.grid != tiling.grid or slots.tiling.footprint != tiling.footprint:
            raise OutputError(f"{path} was cut with {_cut(slots.tiling)}, now it is {_cut(tiling)}; {advice}")
        if header.rasters[name.key].raster != _identity(info, tiling):
            raise OutputError(
                f"{path} was cut from another state of {info.path} (file, bands or nodata differ); {advice}"
            )


def _cut(tiling: Tiling) -> str:
    footprint = tiling.footprint
    return f"grid {list(tiling.grid)}, halo ({footprint.before}, {footprint.after}), alignment {footprint.alignment}"


def _missing(partial: str, plan: StorePlan) -> tuple[TileReference, ...]:
    """The image's state is written last, so it speaks for its labels too."""
    header = read_header(partial)
    names = (StoreName(partial, number, labels=False) for number in range(len(plan.images)))
    states = [load_slots(header, name).states for name in names]
    return tuple(
        TileReference(number, int(tile))
        for number, state in enumerate(states)
        for tile in np.flatnonzero(state == ABSENT)
    )
