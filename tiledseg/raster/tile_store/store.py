"""A tile store: an HDF5 file in which each context lies in one piece, halo included.

    (user block)         the header that reading needs, see `store_header`
    /                    attributes format, version, images, labels (their numbers)
    /images/00000        attribute raster: JSON of the source raster and of its tiling
        boxes            int64 (tiles, 3, 4): core, context, output as (row start, row stop, col start, col stop)
        pixels           (tiles, C, H, W), the context at [:, :height, :width] of its slot
        invalid          uint8 (tiles, H, W), 1 where a pixel does not count; never written where state is 1
        state            uint8 (tiles): 0 absent, 1 every pixel is valid, 2 some are not
        checksums        uint32 (tiles): CRC-32 of a tile's number, state, slot of pixels and, in state 2, of invalid
    /labels/00000        the same for the cores of the labels, raw values; absent without labels

All arrays are contiguous and uncompressed, so a tile is one run of bytes at a known place: it is read with one `pread`,
by any number of threads, past the HDF5 library and its global lock, and compared with its checksum each time. A store
that does not agree with itself is refused. docs/decisions tells why.

A store `tiles.h5` holds rasters named `tiles.h5#0`, `tiles.h5#1`, ... and their labels `tiles.h5#0:labels`, ...
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np
from affine import Affine
from numpy.typing import NDArray

from tiledseg.errors import RasterError
from tiledseg.geometry.box import Box
from tiledseg.geometry.halo import Footprint
from tiledseg.geometry.interval import Interval
from tiledseg.geometry.tiling import Tile, Tiling
from tiledseg.raster.georeferencing import named_crs
from tiledseg.raster.ground_control import as_json, from_json
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.tile_store.header import CHANGED, Header, Raster, changed, is_tile_store, read_header
from tiledseg.raster.unforeseen import reading
from tiledseg.records import dataclass

ABSENT, ALL_VALID, SOME_INVALID = 0, 1, 2
FILLED = ("state", "checksums", "pixels", "invalid")
"""The datasets that are filled tile by tile; all else of a file is sealed once it is laid out."""

_NAME = re.compile(r"(?P<store>.+)#(?P<index>\d+)(?P<labels>:labels)?")


class StoreName(NamedTuple):
    """One raster of a store: image `number`, or its labels."""

    store: str
    number: int
    labels: bool

    def __str__(self) -> str:
        return f"{self.store}#{self.key}"

    @property
    def key(self) -> str:
        """The raster's name in the header: "3", "3:labels"."""
        return f"{self.number}{':labels' if self.labels else ''}"


def parse_store_name(path: str) -> StoreName | None:
    """The raster that `tiles.h5#3` or `tiles.h5#3:labels` names; None for any other path."""
    match = _NAME.fullmatch(path)
    if match is None or os.path.exists(path) or not is_tile_store(match["store"]):
        return None
    return StoreName(match["store"], int(match["index"]), bool(match["labels"]))


def parse_key(key: str) -> tuple[int, bool]:
    """(number, whether labels) of a raster's name in the header."""
    number, _, labels = key.partition(":")
    return int(number), bool(labels)


def store_images(path: str) -> tuple[StoreName, ...]:
    """The names of all images of the store. Raises RasterError where it cannot be read."""
    rasters = read_header(path).rasters
    return tuple(StoreName(path, number, labels=False) for number in range(count(rasters, labels=False)))


def count(rasters: Iterable[str], labels: bool) -> int:
    """How many images, or labels, there are among the names of a header."""
    return sum(name.endswith(":labels") == labels for name in rasters)


@dataclass(frozen=True)
class Slots:
    """Where the tiles of one raster lie in the file: slot `i`, of `shape` (C, H, W), holds the pixels of `boxes[i]`.

    `at` is the first byte of each dataset in `FILLED`."""

    info: RasterInfo
    tiling: Tiling
    boxes: tuple[Box, ...]
    shape: tuple[int, int, int]
    at: Mapping[str, int]
    states: NDArray[np.uint8]
    checksums: NDArray[np.uint32]

    @property
    def pixels_bytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.info.dtype).itemsize

    @property
    def invalid_bytes(self) -> int:
        return self.shape[1] * self.shape[2]

    def pixels_of(self, index: int) -> int:
        return self.at["pixels"] + index * self.pixels_bytes

    def invalid_of(self, index: int) -> int:
        return self.at["invalid"] + index * self.invalid_bytes


def load_slots(header: Header, name: StoreName) -> Slots:
    """What is to be known of one raster before its tiles are read. Raises RasterError where the store lacks it, or does
    not agree with itself."""
    described = header.rasters.get(name.key)
    if described is None:
        kind = "labels" if name.labels else "images"
        raise RasterError(
            f"{name} does not exist: {name.store} holds {count(header.rasters, name.labels)} {kind}, counted from 0"
        )
    with reading(f"open the tile store {name}", CHANGED):
        tiling, info = _decode(described, name, header.size)
        shape = slot_shape(name.labels, info, tiling)
        sizes = {key: stop - start for key, (start, stop) in described.places.items()}
        wanted = {key: math.prod(s) * np.dtype(t).itemsize for key, (s, t) in layouts(info, len(tiling), shape).items()}
        if sizes != {key: wanted[key] for key in FILLED}:
            raise changed(str(name), "the size of its tiles")
        at = {key: start for key, (start, _) in described.places.items()}
        states = np.fromfile(name.store, np.uint8, len(tiling), offset=at["state"])
        checksums = np.fromfile(name.store, "<u4", len(tiling), offset=at["checksums"])
    boxes = tuple(tile.core if name.labels else tile.context for tile in tiling.tiles)
    info = replace(info, block_shape=shape[1:], has_mask=bool((states == SOME_INVALID).any()))
    return Slots(info, tiling, boxes, shape, at, states, checksums)


def slot_shape(labels: bool, info: RasterInfo, tiling: Tiling) -> tuple[int, int, int]:
    """(C, H, W) of each slot: the largest context, or core of labels."""
    return (info.bands, *(tiling.core_max if labels else tiling.context_max))


def layouts(info: RasterInfo, tiles: int, shape: tuple[int, int, int]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each dataset of a raster."""
    return {
        "boxes": ((tiles, 3, 4), "<i8"),
        "state": ((tiles,), "|u1"),
        "checksums": ((tiles,), "<u4"),
        "pixels": ((tiles, *shape), np.dtype(info.dtype).newbyteorder("<").str),
        "invalid": ((tiles, *shape[1:]), "|u1"),
    }


def encode(info: RasterInfo, tiling: Tiling, source: dict[str, Any]) -> str:
    """One raster and its tiling as JSON: what a store keeps, and what two cuts must share to be the same."""
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


def encode_boxes(tiling: Tiling) -> NDArray[np.int64]:
    """Core, context and output of each tile, int64 (tiles, 3, 4)."""
    return np.array([[_edges(box) for box in (t.core, t.context, t.output)] for t in tiling.tiles], np.int64)


def _decode(described: Raster, name: StoreName, size: int) -> tuple[Tiling, RasterInfo]:
    raster = json.loads(described.raster)
    rows, cols = raster["grid"]
    if rows * cols > size:  # a byte a tile at least
        raise changed(str(name), f"its grid of {raster['grid']}")
    boxes = np.fromfile(name.store, "<i8", rows * cols * 12, offset=described.boxes).reshape(-1, 3, 4)
    tiles = tuple(
        Tile(i, divmod(i, cols), *(Box(Interval(a, b), Interval(c, d)) for a, b, c, d in edges))
        for i, edges in enumerate(boxes.tolist())
    )
    shape = raster["height"], raster["width"]
    tiling = Tiling(shape, (rows, cols), Footprint(**raster["footprint"]), tiles)
    palette = raster["palette"]
    info = RasterInfo(
        str(name),
        *shape,
        raster["bands"],
        raster["dtype"],
        crs=named_crs(str(name), raster["crs"]) if raster["crs"] else None,
        transform=Affine(*raster["transform"]) if raster["transform"] else None,
        ground=from_json(raster["ground"]),
        nodata=raster["nodata"],
        band_numbers=tuple(raster["band_numbers"]),
        driver="tiles",
        palette=tuple((index, tuple(colour)) for index, colour in palette) if palette else None,
        tiling=tiling,
        class_names=tuple((number, class_name) for number, class_name in raster.get("class_names", ())),
        holds_classes="class_names" in raster,
    )
    return tiling, info


def _edges(box: Box) -> tuple[int, int, int, int]:
    return box.row.start, box.row.stop, box.col.start, box.col.stop
