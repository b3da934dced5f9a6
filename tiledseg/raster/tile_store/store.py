"""A tile store: an HDF5 file that holds each tile's context, halo included, in one slot.

    /                    attributes format, version, done (written last)
    /images/00000        attributes raster: JSON of the source raster and of its tiling; crc32: of that text
        pixels           (tiles, C, H, W), the context at [:, :height, :width] of its slot
        invalid          uint8 (tiles, H, W), 1 where a pixel does not count; nothing is stored where every pixel counts
    /labels/00000        the same for the cores of the labels, raw values; absent without labels

Chunks are whole rows of one slot. HDF5 keeps a checksum of each chunk and of its own metadata, but none of texts, for
which crc32 stands: damage is an error.
A store `tiles.h5` holds rasters named `tiles.h5#0`, `tiles.h5#1`, ... and their labels `tiles.h5#0:labels`, ...
"""

from __future__ import annotations

import json
import os
import re
import zlib
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from affine import Affine

from tiledseg.errors import RasterError
from tiledseg.geometry.halo import Footprint
from tiledseg.geometry.tiling import Tiling, make_tiling
from tiledseg.raster.georeferencing import named_crs
from tiledseg.raster.info import RasterInfo, as_json, from_json
from tiledseg.raster.retrying import reading

if TYPE_CHECKING:
    import h5py

FORMAT = "tiledseg tiles"
VERSION = 3
DAMAGED = "copy the store again, or cut it again with tiledseg tile"

_NAME = re.compile(r"(?P<store>.+)#(?P<index>\d+)(?P<labels>:labels)?")
_SIGNATURE = b"\x89HDF\r\n\x1a\n"


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
    """Return True for a local file that is a tile store of any version, or an HDF5 file by its name."""
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
    """Open a store for reading. Raises RasterError for a file that is no finished store of this version."""
    import h5py

    with reading(f"open the tile store {path}", DAMAGED):
        file = h5py.File(path, "r", locking="best-effort")
        try:
            written = [file.attrs.get(key) for key in ("format", "version", "done")]
        except BaseException:
            file.close()
            raise
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


def store_images(path: str) -> tuple[StoreName, ...]:
    """Return the names of all images of the store. Raises RasterError where it cannot be read."""
    with open_store(path) as file, reading(f"open the tile store {path}", DAMAGED):
        return tuple(StoreName(path, number, labels=False) for number in range(count_rasters(file, "images")))


def count_rasters(file: h5py.File, kind: str) -> int:
    """Return how many "images" or "labels" a store holds."""
    return len(file[kind]) if kind in file else 0


def described(file: h5py.File, name: StoreName) -> str:
    """Return the JSON of a raster and of its tiling. Raises RasterError where the store lacks it, or it is damaged."""
    if name.group not in file:
        count = count_rasters(file, name.kind)
        raise RasterError(f"{name} does not exist: {name.store} holds {count} {name.kind}, counted from 0")
    attributes = file[name.group].attrs
    text = str(attributes["raster"])
    if int(attributes["crc32"]) != checksum(text):
        raise RasterError(f"{name} has a description that is not the one written; {DAMAGED}")
    return text


def checksum(text: str) -> int:
    """Return the checksum that stands beside a raster's JSON: HDF5 keeps texts in a heap that has none."""
    return zlib.crc32(text.encode(errors="surrogateescape"))


def load_info(file: h5py.File, name: StoreName) -> RasterInfo:
    """Return one raster of a store, its tiling included. Raises RasterError where datasets do not fit the JSON."""
    with reading(f"open the tile store {name}", DAMAGED):
        raster = json.loads(described(file, name))
        pixels, invalid = slots(file, name)
        size, grid = (raster["height"], raster["width"]), (raster["grid"][0], raster["grid"][1])
        if grid[0] * grid[1] != len(pixels):
            raise RasterError(f"{name} holds {len(pixels)} tiles, but its grid is {list(grid)}; {DAMAGED}")
        tiling = make_tiling(size, grid, Footprint(**raster["footprint"]))
        info = _decode(raster, str(name), tiling, bool(invalid.id.get_storage_size()))
        shape = (len(tiling), *slot_shape(name.labels, info, tiling))
        if (pixels.shape, pixels.dtype.name) != (shape, info.dtype) or invalid.shape != (shape[0], *shape[2:]):
            raise RasterError(
                f"{name} holds tiles of {pixels.shape} {pixels.dtype}, not {shape} {info.dtype}; {DAMAGED}"
            )
        return info


def slots(file: h5py.File, name: StoreName) -> tuple[h5py.Dataset, h5py.Dataset]:
    """Return a raster's pixels and invalid pixels. Raises RasterError where they lie in another file or place."""
    import h5py

    paths = [name.kind, name.group, f"{name.group}/pixels", f"{name.group}/invalid"]
    datasets = file[paths[2]], file[paths[3]]
    own = all(isinstance(file.get(path, getlink=True), h5py.HardLink) for path in paths)
    if not own or any(dataset.chunks is None for dataset in datasets):
        raise RasterError(f"{name} links to pixels elsewhere, which no cut store does; {DAMAGED}")
    return datasets


def slot_shape(labels: bool, info: RasterInfo, tiling: Tiling) -> tuple[int, int, int]:
    """Return (C, H, W) of each slot: the largest context, or core of labels."""
    return (info.bands, *(tiling.core_max if labels else tiling.context_max))


def encode(info: RasterInfo, tiling: Tiling, source: dict[str, Any]) -> str:
    """Return one raster and its tiling as JSON. Two cuts with equal JSON are the same."""
    drawn = {"drawn": info.drawn, "class_names": info.class_names} if info.holds_classes else {}
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
            **drawn,
        }
    )


def _decode(raster: dict[str, Any], name: str, tiling: Tiling, has_mask: bool) -> RasterInfo:
    palette = raster["palette"]
    return RasterInfo(
        name,
        *tiling.raster,
        raster["bands"],
        str(np.dtype(raster["dtype"])),
        crs=named_crs(name, raster["crs"]) if raster["crs"] else None,
        transform=Affine(*raster["transform"]) if raster["transform"] else None,
        ground=from_json(raster["ground"]),
        nodata=raster["nodata"],
        block_shape=tiling.context_max,
        has_mask=has_mask,
        band_numbers=tuple(raster["band_numbers"]),
        driver="tiles",
        palette=tuple((index, tuple(colour)) for index, colour in palette) if palette else None,
        tiling=tiling,
        files=(name.rpartition("#")[0],),
        class_names=tuple((number, class_name) for number, class_name in raster.get("class_names", ())),
        holds_classes="class_names" in raster,
    )
