"""Reading a tile store: an HDF5 file in which each context lies in one piece, halo included.

    /                    attributes format, version, images
    /images/00000        attribute raster: JSON of the source raster and of its tiling
        boxes            int64 (tiles, 3, 4): core, context, output as (row start, row stop, col start, col stop)
        pixels           (tiles, C, H, W), the context at [:, :height, :width] of its slot
        invalid          uint8 (tiles, H, W), 1 where a pixel does not count; never written where state is 1
        state            uint8 (tiles): 0 absent, 1 every pixel is valid, 2 some are not
    /labels/00000        the same for the cores of the labels, raw values; absent without labels

All arrays are contiguous and uncompressed, so a tile is one run of bytes at a known place: it is read with one `pread`,
by any number of threads, past the HDF5 library and its global lock. docs/decisions tells why.

A store `tiles.h5` holds rasters named `tiles.h5#0`, `tiles.h5#1`, ... and their labels `tiles.h5#0:labels`, ...
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import h5py
import numpy as np
from affine import Affine
from numpy.typing import NDArray
from rasterio.crs import CRS

from tiledseg.errors import RasterError
from tiledseg.geometry.box import Box
from tiledseg.geometry.halo import Footprint
from tiledseg.geometry.interval import Interval
from tiledseg.geometry.tiling import Tile, Tiling
from tiledseg.raster.georeferencing import as_json, from_json
from tiledseg.raster.handles import HandlePool
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.mirrored_reader import RasterReader

FORMAT = "tiledseg tiles"
VERSION = 1
ABSENT, ALL_VALID, SOME_INVALID = 0, 1, 2

_NAME = re.compile(r"(?P<store>.+)#(?P<index>\d+)(?P<labels>:labels)?")


class StoreName(NamedTuple):
    """One raster of a store: image `number`, or its labels."""

    store: str
    number: int
    labels: bool

    def __str__(self) -> str:
        return f"{self.store}#{self.number}{':labels' if self.labels else ''}"


def parse_store_name(path: str) -> StoreName | None:
    """The raster that `tiles.h5#3` or `tiles.h5#3:labels` names; None for any other path."""
    match = _NAME.fullmatch(path)
    if match is None or os.path.exists(path) or not is_tile_store(match["store"]):
        return None
    return StoreName(match["store"], int(match["index"]), bool(match["labels"]))


def is_tile_store(path: str) -> bool:
    """Whether the path is a local file that calls itself a tile store (damaged or not)."""
    if not os.path.isfile(path) or not h5py.is_hdf5(path):
        return False
    try:
        with h5py.File(path, "r", locking="best-effort") as file:
            return file.attrs.get("format") == FORMAT
    except OSError:  # HDF5, but cut off
        return path.endswith((".h5", ".hdf5"))


def store_images(path: str) -> tuple[StoreName, ...]:
    """The names of all images of the store. Raises RasterError where it cannot be read."""
    with open_store(path) as file:
        return tuple(StoreName(path, number, labels=False) for number in range(int(file.attrs["images"])))


def open_store(path: str) -> h5py.File:
    """The HDF5 file behind a store. Raises RasterError where it is truncated, or of a later version."""
    try:
        file = h5py.File(path, "r", locking="best-effort")
    except OSError as error:
        reason = " ".join(str(error).split())
        raise RasterError(f"cannot open the tile store {path}: {reason}; copy it again, or cut it again") from error
    version = int(file.attrs.get("version", 0))
    if version != VERSION:
        file.close()
        raise RasterError(f"tile store {path} has version {version}, this program reads {VERSION}; cut it again")
    return file


@dataclass(frozen=True)
class Slots:
    """Where the tiles of one raster lie in the file: slot `i`, of `shape` (C, H, W), holds the pixels of `boxes[i]`."""

    info: RasterInfo
    tiling: Tiling
    boxes: tuple[Box, ...]
    shape: tuple[int, int, int]
    pixels_at: int
    invalid_at: int
    state_at: int
    states: NDArray[np.uint8]

    @property
    def pixels_bytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.info.dtype).itemsize

    @property
    def invalid_bytes(self) -> int:
        return self.shape[1] * self.shape[2]


def load_slots(file: h5py.File, name: StoreName) -> Slots:
    """What is to be known of one raster before its tiles are read. Raises RasterError where the store lacks it."""
    kind = "labels" if name.labels else "images"
    group = file.get(f"{kind}/{name.number:05d}")
    if group is None:
        count = len(file.get(kind, ()))
        raise RasterError(f"{name} does not exist: {name.store} holds {count} {kind}, counted from 0")
    pixels, invalid, state = (group[key] for key in ("pixels", "invalid", "state"))
    pixels_at, invalid_at, state_at = (dataset.id.get_offset() for dataset in (pixels, invalid, state))
    if None in (pixels_at, invalid_at, state_at):
        raise RasterError(f"{name} is not contiguous any more (repacked?); cut the store again")
    states = state[()]
    tiling, info = _decode(str(group.attrs["raster"]), group["boxes"][()], str(name))
    boxes = tuple(tile.core if name.labels else tile.context for tile in tiling.tiles)
    info = replace(info, block_shape=pixels.shape[2:], has_mask=bool((states == SOME_INVALID).any()))
    return Slots(info, tiling, boxes, pixels.shape[1:], pixels_at, invalid_at, state_at, states)


class StoreReader(RasterReader):
    """One raster of a tile store. A box within a stored context is read from it alone; any other is put together."""

    def __init__(self, path: str, bands: Sequence[int] | None = None, nodata: float | None = None) -> None:
        name = parse_store_name(path) or _only_image(path)
        with open_store(name.store) as file:
            self._slots = load_slots(file, name)
        self.info = self._slots.info
        _check_complete(name, self._slots)
        _check_options(self.info, bands, nodata)
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
        """Pixels and validity of a box within slot `index`."""
        slots = self._slots
        inner = box.relative_to(slots.boxes[index])
        at = slots.pixels_at + index * slots.pixels_bytes
        pixels_CHW = self._read_array(handle, at, slots.shape, inner, np.dtype(self.info.dtype))
        if slots.states[index] == ALL_VALID:
            return pixels_CHW, np.ones(box.shape, np.bool_)
        at = slots.invalid_at + index * slots.invalid_bytes
        invalid_CHW = self._read_array(handle, at, (1, *slots.shape[1:]), inner, np.dtype(np.uint8))
        return pixels_CHW, invalid_CHW[0] == 0

    def _read_array(self, handle: int, at: int, shape: tuple[int, int, int], box: Box, dtype: np.dtype) -> NDArray:
        """A box of an array of `shape` that starts `at` bytes into the file.

        One read of all of it where the box has half of its rows or more (any context has), else only the rows needed.
        """
        bands, height, width = shape
        if 2 * box.height >= height:
            whole_CHW = np.empty(shape, dtype)
            _read_exactly(handle, whole_CHW, at, self.info.path)
            return whole_CHW[:, *box.slices]
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
        raise RasterError(f"{name} lacks {absent} of {len(slots.states)} tiles; run python -m tiledseg.tile again")
    size = os.path.getsize(name.store)
    needed = slots.pixels_at + len(slots.boxes) * slots.pixels_bytes
    if size < needed:
        raise RasterError(f"{name.store} is truncated: it has {size} bytes of at least {needed}; copy it again")


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


def encode(info: RasterInfo, tiling: Tiling, source: dict[str, Any]) -> str:
    """One raster and its tiling as JSON: what a store keeps, and what two cuts must share to be the same."""
    return json.dumps(
        {
            "source": source,
            "height": info.height,
            "width": info.width,
            "bands": info.bands,
            "dtype": info.dtype,
            "crs": info.crs.to_wkt() if info.crs else None,
            "transform": list(info.transform)[:6] if info.transform is not None else None,
            "ground": as_json(info.ground),
            "nodata": info.nodata,
            "band_numbers": list(info.band_numbers),
            "palette": info.palette,
            "grid": list(tiling.grid),
            "footprint": asdict(tiling.footprint),
        }
    )


def encode_boxes(tiling: Tiling) -> NDArray[np.int64]:
    """Core, context and output of each tile, int64 (tiles, 3, 4)."""
    return np.array([[_edges(box) for box in (t.core, t.context, t.output)] for t in tiling.tiles], np.int64)


def _decode(text: str, boxes: NDArray[np.int64], path: str) -> tuple[Tiling, RasterInfo]:
    raster = json.loads(text)
    cols = raster["grid"][1]
    tiles = tuple(
        Tile(i, divmod(i, cols), *(Box(Interval(a, b), Interval(c, d)) for a, b, c, d in rows))
        for i, rows in enumerate(boxes.tolist())
    )
    shape = raster["height"], raster["width"]
    tiling = Tiling(shape, tuple(raster["grid"]), Footprint(**raster["footprint"]), tiles)
    palette = raster["palette"]
    info = RasterInfo(
        path,
        *shape,
        raster["bands"],
        raster["dtype"],
        crs=CRS.from_wkt(raster["crs"]) if raster["crs"] else None,
        transform=Affine(*raster["transform"]) if raster["transform"] else None,
        ground=from_json(raster["ground"]),
        nodata=raster["nodata"],
        band_numbers=tuple(raster["band_numbers"]),
        driver="tiles",
        palette=tuple((index, tuple(colour)) for index, colour in palette) if palette else None,
        tiling=tiling,
    )
    return tiling, info


def _edges(box: Box) -> tuple[int, int, int, int]:
    return box.row.start, box.row.stop, box.col.start, box.col.stop
