"""Reading one raster of a tile store: each context in one read, compared with its checksum."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tiledseg.errors import RasterError
from tiledseg.geometry.box import Box
from tiledseg.raster.handles import HandlePool
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.mirrored_reader import RasterReader
from tiledseg.raster.tile_store.header import add_checksum, changed, first_checksum, read_header
from tiledseg.raster.tile_store.store import (
    ABSENT,
    ALL_VALID,
    Slots,
    StoreName,
    load_slots,
    parse_store_name,
    store_images,
)

_PIECE = 4 << 20  # bytes of a slot that is only gone through


class StoreReader(RasterReader):
    """One raster of a tile store. A box within a stored context is read from it alone; any other is put together."""

    def __init__(self, path: str, bands: Sequence[int] | None = None, nodata: float | None = None) -> None:
        name = parse_store_name(path) or _only_image(path)
        self._slots = load_slots(read_header(name.store), name)
        self.info = replace(self._slots.info, files=(name.store,))
        _check_complete(name, self._slots)
        _check_options(self.info, bands, nodata)
        self._checked: set[int] = set()  # slots whose checksum fits, for boxes that ask for a part of one
        self._handles: HandlePool[int] = HandlePool(path, lambda: os.open(name.store, os.O_RDONLY), os.close)
        rows, cols = self._slots.tiling.grid
        self._rows = tuple(self._slots.boxes[i * cols].row for i in range(rows))
        self._cols = tuple(self._slots.boxes[j].col for j in range(cols))

    def _read(self, box: Box) -> tuple[NDArray, NDArray[np.bool_]]:
        row = next((i for i, interval in enumerate(self._rows) if interval.contains(box.row)), None)
        col = next((j for j, interval in enumerate(self._cols) if interval.contains(box.col)), None)
        if row is None or col is None:
            return super()._read(box)
        with self._handles.borrow() as handle:
            return self._read_part(handle, row * len(self._cols) + col, box)

    def _read_inside(self, box: Box) -> tuple[NDArray, NDArray[np.bool_]]:
        pixels_CHW = np.empty((self.info.bands, *box.shape), self.info.dtype)
        valid_HW = np.empty(box.shape, np.bool_)
        with self._handles.borrow() as handle:
            for tile in self._slots.tiling.tiles:
                part = box.clip(tile.core)
                if part.area:
                    rows, cols = part.relative_to(box).slices
                    pixels_CHW[:, rows, cols], valid_HW[rows, cols] = self._read_part(handle, tile.index, part)
        return pixels_CHW, valid_HW

    def _read_part(self, handle: int, index: int, box: Box) -> tuple[NDArray, NDArray[np.bool_]]:
        """Pixels and validity of a box within slot `index`: one read of the whole slot where the box has half of its
        rows or more (any context has), else only the rows needed. Either way the slot's checksum is known to fit."""
        inner = box.relative_to(self._slots.boxes[index])
        if 2 * inner.height >= self._slots.shape[1]:
            pixels_CHW, invalid_HW = self._read_slot(handle, index)
            pixels_CHW = pixels_CHW[:, *inner.slices]
            invalid_HW = None if invalid_HW is None else invalid_HW[inner.slices]
        else:
            if index not in self._checked:
                self._check_slot(handle, index)
            pixels_CHW, invalid_HW = self._read_rows(handle, index, inner)
        return pixels_CHW, np.ones(box.shape, np.bool_) if invalid_HW is None else invalid_HW == 0

    def _read_slot(self, handle: int, index: int) -> tuple[NDArray, NDArray[np.uint8] | None]:
        slots, path = self._slots, self.info.path
        checksum = first_checksum(index, int(slots.states[index]))
        pixels_CHW, invalid_HW = np.empty(slots.shape, self.info.dtype), None
        _read_exactly(handle, pixels_CHW, slots.pixels_of(index), path)
        checksum = add_checksum(checksum, pixels_CHW)
        if slots.states[index] != ALL_VALID:
            invalid_HW = np.empty(slots.shape[1:], np.uint8)
            _read_exactly(handle, invalid_HW, slots.invalid_of(index), path)
            checksum = add_checksum(checksum, invalid_HW)
        self._compare(index, checksum)
        return pixels_CHW, invalid_HW

    def _check_slot(self, handle: int, index: int) -> None:
        """Go through a slot, of any size, in pieces."""
        slots = self._slots
        checksum = first_checksum(index, int(slots.states[index]))
        runs = [(slots.pixels_of(index), slots.pixels_bytes)]
        if slots.states[index] != ALL_VALID:
            runs.append((slots.invalid_of(index), slots.invalid_bytes))
        for start, size in runs:
            for at in range(start, start + size, _PIECE):
                piece = np.empty(min(_PIECE, start + size - at), np.uint8)
                _read_exactly(handle, piece, at, self.info.path)
                checksum = add_checksum(checksum, piece)
        self._compare(index, checksum)
        self._checked.add(index)

    def _compare(self, index: int, checksum: int) -> None:
        if checksum != self._slots.checksums[index]:
            row, col = self._slots.tiling.tiles[index].position
            raise changed(self.info.path, f"tile {index} (row {row}, column {col} of the grid)")

    def _read_rows(self, handle: int, index: int, inner: Box) -> tuple[NDArray, NDArray[np.uint8] | None]:
        slots, dtype = self._slots, np.dtype(self.info.dtype)
        pixels_CHW = self._rows_of(handle, slots.pixels_of(index), slots.shape, inner, dtype)
        if slots.states[index] == ALL_VALID:
            return pixels_CHW, None
        at, shape = slots.invalid_of(index), (1, *slots.shape[1:])
        return pixels_CHW, self._rows_of(handle, at, shape, inner, np.dtype(np.uint8))[0]

    def _rows_of(self, handle: int, at: int, shape: tuple[int, int, int], box: Box, dtype: np.dtype) -> NDArray:
        """A box of an array of `shape` that starts `at` bytes into the file."""
        bands, height, width = shape
        rows_CHW = np.empty((bands, box.height, width), dtype)
        for band, rows_HW in enumerate(rows_CHW):
            start = at + (band * height + box.row.start) * width * dtype.itemsize
            _read_exactly(handle, rows_HW, start, self.info.path)
        return rows_CHW[:, :, box.col.slice]

    def release(self) -> None:
        self._handles.release()

    def close(self) -> None:
        self._handles.close()


def _read_exactly(handle: int, into: NDArray, at: int, path: str) -> None:
    view = memoryview(into.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
    while view:
        try:
            count = os.preadv(handle, [view], at)
        except OSError as error:
            raise RasterError(f"cannot read {path} at byte {at}: {error.strerror}; copy the store again") from error
        if count == 0:
            raise RasterError(f"{path} is truncated: nothing at byte {at}; copy the store again, or cut it again")
        view, at = view[count:], at + count


def _only_image(path: str) -> StoreName:
    names = store_images(path)
    if len(names) != 1:
        raise RasterError(f"{path} holds {len(names)} images; name one of them, such as {path}#0")
    return names[0]


def _check_complete(name: StoreName, slots: Slots) -> None:
    absent = int(np.count_nonzero(slots.states == ABSENT))
    if absent:
        raise RasterError(f"{name} lacks {absent} of {len(slots.states)} tiles; run tiledseg tile again")


def _check_options(info: RasterInfo, bands: Sequence[int] | None, nodata: float | None) -> None:
    """A store is cut for its bands and its nodata value: validity was decided then."""
    if bands is not None and tuple(bands) != info.band_numbers:
        raise RasterError(
            f"data.bands is {list(bands)} but {info.path} was cut with bands {list(info.band_numbers)}; "
            "leave data.bands out, or cut the store again with --bands"
        )
    both_nan = nodata != nodata and info.nodata != info.nodata
    if nodata is not None and nodata != info.nodata and not both_nan:
        raise RasterError(
            f"data.nodata is {nodata} but {info.path} was cut with {info.nodata}; leave data.nodata out, or cut the "
            "store again with --nodata"
        )
