"""A tile store: an HDF5 file with each tile's context, halo included, in one slot.

    /                    attributes format, version, done (written last)
    /images/00000        attributes raster: JSON of the source raster and of its tiling; crc32: of that text
        pixels           (tiles, C, H, W), the context at [:, :height, :width] of its slot
        invalid          uint8 (tiles, H, W), 1 at invalid pixels; nothing is stored if all are valid
    /labels/00000        the same for the cores of the labels, raw values; absent without labels

Chunks are whole rows of one slot. HDF5 keeps a checksum of each chunk and of its own metadata; crc32 protects the text.
A store `tiles.h5` holds rasters named `tiles.h5#0`, `tiles.h5#1`, ... and their labels `tiles.h5#0:labels`, ...
A store is written under a temporary name and renamed when it is whole.
"""

from __future__ import annotations

import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from affine import Affine
from numpy.typing import NDArray

from tiledseg.errors import RasterError
from tiledseg.geometry.box import Box
from tiledseg.geometry.halo import Footprint
from tiledseg.geometry.tiling import Tiling, make_tiling
from tiledseg.raster.info import GroundControl, RasterInfo, named_crs
from tiledseg.raster.mirrored_reader import HandlePool, RasterReader, prefetch, reading
from tiledseg.raster.statistics import NO_VALID_PIXEL
from tiledseg.system.files import writing
from tiledseg.system.outputs import unfinished

if TYPE_CHECKING:
    import h5py

FORMAT = "tiledseg tiles"
VERSION = 3
DAMAGED = "copy the store again, or cut it again with tiledseg tile"

_NAME = re.compile(r"(?P<store>.+)#(?P<index>\d+)(?P<labels>:labels)?")
_PLAIN = ("height", "width", "bands", "dtype", "nodata", "band_numbers", "palette")
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_CHUNK_BYTES = 4 << 20
Opener = Callable[[int], AbstractContextManager[RasterReader]]
"""Opens a raster by the number of its image."""


class StoreName(NamedTuple):
    """One raster of a store: image `number`, or its labels."""

    store: str
    number: int
    labels: bool

    def __str__(self) -> str:
        return f"{self.store}#{self.number}{':labels' if self.labels else ''}"

    @property
    def kind(self) -> str:
        return "labels" if self.labels else "images"

    @property
    def group(self) -> str:
        return f"{self.kind}/{self.number:05d}"


def is_tile_store(path: str) -> bool:
    """Return True for a local tile store of any version, and for any HDF5 file that ends in .h5 or .hdf5."""
    if not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as file:
            first = file.read(len(FORMAT))
    except OSError:
        return False
    return first == FORMAT.encode() or (first.startswith(_SIGNATURE) and path.endswith((".h5", ".hdf5")))


def parse_store_name(path: str) -> StoreName | None:
    """Return the raster that `tiles.h5#3` or `tiles.h5#3:labels` names; None for any other path."""
    match = _NAME.fullmatch(path)
    if match is None or os.path.exists(path) or not is_tile_store(match["store"]):
        return None
    return StoreName(match["store"], int(match["index"]), bool(match["labels"]))


def open_store(path: str) -> h5py.File:
    """Open a store for reading. Raises RasterError unless it is a finished store of this version."""
    import h5py

    with reading(f"open the tile store {path}", DAMAGED):
        file = h5py.File(path, "r", locking="best-effort")
        written = [file.attrs.get(key) for key in ("format", "version", "done")]
    if written == [FORMAT, VERSION, True]:
        return file
    file.close()
    if written[0] != FORMAT:
        raise RasterError(f"{path} is no tile store: it lacks the attribute format; cut one with tiledseg tile")
    if written[1] != VERSION:
        raise RasterError(
            f"tile store {path} has version {written[1]}, this program reads version {VERSION}; remove it and cut it "
            "again with tiledseg tile"
        )
    raise RasterError(f"tile store {path} is unfinished; remove it and cut it again with tiledseg tile")


def store_images(path: str) -> list[tuple[str, str | None]]:
    """Return the names of a store's images, each with its labels' (None without); of the one raster that `path` names.
    Raises RasterError if the store cannot be read."""
    one = parse_store_name(path)
    if one is not None and one.labels:
        return [(path, None)]
    store = path if one is None else one.store
    with open_store(store) as file, reading(f"open the tile store {store}", DAMAGED):
        numbers = range(len(file.get("images", ()))) if one is None else [one.number]
        labelled = "labels" in file
    names = [StoreName(store, number, labels=False) for number in numbers]
    return [(str(name), str(name._replace(labels=True)) if labelled else None) for name in names]


def _described(file: h5py.File, name: StoreName) -> tuple[dict[str, Any], h5py.Dataset, h5py.Dataset]:
    """Return a raster's description, pixels and invalid pixels. Raises RasterError if the store lacks it, if it is
    damaged, or if it links to another file or place."""
    import h5py

    if name.group not in file:
        count = len(file.get(name.kind, ()))
        raise RasterError(f"{name} does not exist: {name.store} holds {count} {name.kind}, counted from 0")
    with reading(f"open the tile store {name}", DAMAGED):
        attributes = file[name.group].attrs
        text = str(attributes["raster"])
        if int(attributes["crc32"]) != _checksum(text):
            raise RasterError(f"{name} has a damaged description; {DAMAGED}")
        paths = [name.kind, name.group, f"{name.group}/pixels", f"{name.group}/invalid"]
        pixels, invalid = file[paths[2]], file[paths[3]]
        own = all(isinstance(file.get(path, getlink=True), h5py.HardLink) for path in paths)
        if not own or pixels.chunks is None or invalid.chunks is None:
            raise RasterError(f"{name} links to pixels elsewhere; {DAMAGED}")
        return json.loads(text), pixels, invalid


def _checksum(text: str) -> int:
    return zlib.crc32(text.encode(errors="surrogateescape"))


def _slot_shape(labels: bool, info: RasterInfo, tiling: Tiling) -> tuple[int, int, int]:
    """Return (C, H, W) of each slot: the largest context, or core of labels."""
    return (info.bands, *(tiling.core_max if labels else tiling.context_max))


class StoreReader(RasterReader):
    """A raster of a tile store. A box inside a stored context is read from it; any other is assembled from cores."""

    def __init__(self, path: str, bands: Sequence[int] | None = None, nodata: float | None = None) -> None:
        parsed = parse_store_name(path)
        count = len(store_images(path)) if parsed is None else 1
        if count != 1:
            raise RasterError(f"{path} holds {count} images; name one of them, such as {path}#0")
        name = parsed or StoreName(path, 0, labels=False)
        with open_store(name.store) as file:
            raster, pixels, invalid = _described(file, name)
            with reading(f"open the tile store {name}", DAMAGED):
                self.info = _info(raster, str(name), bool(invalid.id.get_storage_size()))
                tiling = self.info.tiling
                assert tiling is not None, "a store says how it was cut"
                shape, dtype = (len(tiling), *_slot_shape(name.labels, self.info, tiling)), self.info.dtype
                if (pixels.shape, pixels.dtype) != (shape, dtype) or invalid.shape != (shape[0], *shape[2:]):
                    raise RasterError(
                        f"{name} holds tiles of {pixels.shape} {pixels.dtype}, not {shape} {dtype}; {DAMAGED}"
                    )
        if bands is not None and tuple(bands) * self.info.times != self.info.band_numbers:
            raise RasterError(
                f"data.bands is {list(bands)} but {name} was cut with bands {list(self.info.band_numbers)}; leave "
                "data.bands out, or cut the store again with --bands"
            )
        own = self.info.nodata
        if nodata is not None and nodata != own and not (nodata != nodata and own != own):  # both may be NaN
            raise RasterError(
                f"data.nodata is {nodata} but {name} was cut with {own}; leave data.nodata out, or cut the store "
                "again with --nodata"
            )
        self._name, self._tiles = name, tiling.tiles
        self._boxes = [tile.core if name.labels else tile.context for tile in tiling.tiles]
        self._handles = HandlePool(lambda: open_store(name.store))
        self.held = (self._handles,)

    def _read(self, box: Box) -> tuple[NDArray, NDArray[np.bool_]]:
        slot = next((index for index, whole in enumerate(self._boxes) if whole.contains(box)), None)
        return super()._read(box) if slot is None else self._read_slot(slot, box)

    def _read_inside(self, box: Box) -> tuple[NDArray, NDArray[np.bool_]]:
        pixels_CHW = np.empty((self.info.bands, *box.shape), self.info.dtype)
        valid_HW = np.empty(box.shape, np.bool_)
        for tile in self._tiles:
            part = box.clip(tile.core)
            if part.area:
                at = part.relative_to(box).slices
                pixels_CHW[:, *at], valid_HW[at] = self._read_slot(tile.index, part)
        return pixels_CHW, valid_HW

    def _read_slot(self, index: int, box: Box) -> tuple[NDArray, NDArray[np.bool_]]:
        """Return pixels and validity of a box within slot `index`."""
        at = box.relative_to(self._boxes[index]).slices
        with self._handles.borrow() as file:
            _, pixels, invalid = _described(file, self._name)
            pixels_CHW = pixels[index, :, *at]
            valid_HW = invalid[index, *at] == 0 if self.info.has_mask else np.ones(box.shape, np.bool_)
        return pixels_CHW, valid_HW


def _info(raster: dict[str, Any], name: str, has_mask: bool) -> RasterInfo:
    known = {key: _tuples(value) for key, value in raster.items()}
    tiling = make_tiling((known["height"], known["width"]), known["grid"], Footprint(**raster["footprint"]))
    return RasterInfo(
        name,
        **{key: known[key] for key in _PLAIN},
        crs=named_crs(name, known["crs"]) if known["crs"] else None,
        transform=Affine(*known["transform"]) if known["transform"] else None,
        ground=GroundControl(*known["ground"]) if known["ground"] else None,
        block_shape=tiling.context_max,
        has_mask=has_mask,
        driver="tiles",
        tiling=tiling,
        files=(name.rpartition("#")[0],),
        class_names=known.get("class_names", ()),
        holds_classes="class_names" in known,
        times=known.get("times", 1),
    )


def _tuples(value: Any) -> Any:
    """Return a value of JSON with tuples for its lists."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@dataclass(frozen=True)
class StorePlan:
    """The rasters of a store: images, their labels (or None), and their tilings."""

    images: tuple[RasterInfo, ...]
    labels: tuple[RasterInfo, ...] | None
    tilings: tuple[Tiling, ...]

    def rasters(self) -> Iterator[tuple[StoreName, RasterInfo, Tiling]]:
        """Yield every raster with its name (without a file) and its tiling."""
        for number, (info, tiling) in enumerate(zip(self.images, self.tilings, strict=True)):
            yield StoreName("", number, labels=False), info, tiling
            if self.labels is not None:
                yield StoreName("", number, labels=True), self.labels[number], tiling

    @property
    def bytes(self) -> int:
        """Return the bytes of the pixels, without those of `invalid`."""
        sizes = (
            np.prod(_slot_shape(name.labels, info, tiling)) * np.dtype(info.dtype).itemsize * len(tiling)
            for name, info, tiling in self.rasters()
        )
        return int(sum(sizes))


def write_store(path: str, plan: StorePlan, image: Opener, label: Opener, advance: Callable[[int], object]) -> None:
    """Cut every raster of `plan` into a new store at `path`.

    `advance` is called with the image's number after each tile. A killed run leaves a temporary folder, which the next
    run replaces. Raises RasterError if a raster cannot be read, WriteError if the disk refuses a write.
    """
    import h5py

    with writing(path), unfinished(path) as output, _HdfTarget(output.file(), "xb+") as target:
        with h5py.File(target, "w", libver="latest") as file:
            file.attrs.update(format=FORMAT, version=VERSION)
            any_valid = False
            for name, info, tiling in plan.rasters():
                pixels, invalid = _create(file, name, info, tiling)
                boxes = [tile.core if name.labels else tile.context for tile in tiling.tiles]
                with (label if name.labels else image)(name.number) as reader:
                    arrays = prefetch(boxes, reader.read, threads=2, depth=2)
                    for tile, (pixels_CHW, valid_HW) in zip(tiling.tiles, arrays, strict=True):
                        height, width = valid_HW.shape
                        pixels[tile.index, :, :height, :width] = pixels_CHW
                        if not valid_HW.all():
                            invalid[tile.index, :height, :width] = ~valid_HW
                        target.check()
                        if not name.labels:
                            any_valid = any_valid or bool(valid_HW.any())
                            advance(name.number)
            if not any_valid:
                raise RasterError(NO_VALID_PIXEL)
            file.attrs["done"] = True
        target.check()
        output.publish(replaces=False)


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


def _create(file: h5py.File, name: StoreName, info: RasterInfo, tiling: Tiling) -> tuple[h5py.Dataset, h5py.Dataset]:
    """Create the empty datasets of a raster, in chunks of whole rows of one tile."""
    group = file.create_group(name.group)
    raster: dict[str, Any] = {"source": info.path, "ground": info.ground, **{key: getattr(info, key) for key in _PLAIN}}
    raster["crs"] = info.crs.to_wkt() if info.crs else None
    raster["transform"] = list(info.transform)[:6] if info.transform is not None else None
    raster |= {"grid": tiling.grid, "footprint": asdict(tiling.footprint), "times": info.times}
    text = json.dumps(raster | ({"class_names": info.class_names} if info.holds_classes else {}))
    group.attrs.update(raster=text, crc32=_checksum(text))
    bands, height, width = _slot_shape(name.labels, info, tiling)
    dtype = np.dtype(info.dtype)
    pieces = -(-bands * height * width * dtype.itemsize // _CHUNK_BYTES)
    rows = -(-height // min(pieces, height))
    options = {"fletcher32": True, "track_times": False}
    shape, chunk = (len(tiling), bands, height, width), (1, bands, rows, width)
    pixels = group.create_dataset("pixels", shape, dtype, chunks=chunk, **options)
    invalid = group.create_dataset("invalid", (shape[0], *shape[2:]), "u1", chunks=(1, rows, width), **options)
    return pixels, invalid
