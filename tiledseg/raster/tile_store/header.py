"""What a tile store says of itself, ahead of its HDF5: a sealed header, and a checksum of each tile.

The header lies in the file's user block, which HDF5 leaves to others:

    tiledseg tiles 2 000000001234 <SHA-256 of the text that follows>
    {"size": bytes of the file, "start": where the HDF5 begins, "outside": SHA-256 of all bytes but the tiles',
     "rasters": {"0": {"raster": the source and its tiling, "boxes": first byte, "places": bytes of each dataset},
                 "0:labels": ...}}

Reading needs nothing but the header, so no HDF5 of a stranger's is ever parsed, and no link in it is followed: a
damaged HDF5 can make that library run forever. The seals tell damage and edits, not forgery.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import IO

from numpy.typing import NDArray

from tiledseg.errors import RasterError
from tiledseg.raster.tile_store.sparse_file import SparseFile
from tiledseg.raster.unforeseen import reading
from tiledseg.records import dataclass

FORMAT = "tiledseg tiles"
VERSION = 2
CHANGED = "copy the store again, or cut it again with tiledseg tile"
SMALLEST = 4096
"""Bytes of a user block: HDF5 wants a power of two; a page keeps what follows on pages."""

_FIRST = re.compile(rb"tiledseg tiles (\d+) (\d{12}) ([0-9a-f]{64})\n")
_FIRST_BYTES = len(FORMAT) + 1 + 1 + 1 + 12 + 1 + 64 + 1
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_PIECE = 4 << 20

Range = tuple[int, int]


@dataclass(frozen=True)
class Raster:
    """One raster of a store: `raster` is the JSON of its source and tiling, `boxes` the first byte of the tiles' boxes,
    `places` the bytes (start, stop) of each dataset that is filled tile by tile."""

    raster: str
    boxes: int
    places: Mapping[str, Range]


@dataclass(frozen=True)
class Header:
    """`rasters` by name ("0", "0:labels"), `size` of the file, `start` of its HDF5, seal of all but the tiles."""

    size: int
    start: int
    outside: str
    rasters: Mapping[str, Raster]


def is_tile_store(path: str) -> bool:
    """Whether the path is a local file that calls itself a tile store (damaged or not), or an HDF5 file by its name."""
    if not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as file:
            first = file.read(len(FORMAT))
    except OSError:
        return False
    return first == FORMAT.encode() or (first.startswith(_SIGNATURE) and path.endswith((".h5", ".hdf5")))


def read_header(path: str) -> Header:
    """The header of a store that agrees with it. Raises RasterError for any other file."""
    with reading(f"open the tile store {path}", CHANGED), open(path, "rb") as file:
        header = _parse(path, file)
        size = os.fstat(file.fileno()).st_size
        if size < header.size:
            raise RasterError(f"{path} is truncated: it has {size} bytes of {header.size}; {CHANGED}")
        if size > header.size:
            raise changed(path, f"its size ({size} bytes, not {header.size})")
        if _seal_outside(file, header.start, header.size, header.rasters.values()) != header.outside:
            raise changed(path, "its HDF5 description")
        return header


def _parse(path: str, file: IO[bytes]) -> Header:
    match = _FIRST.fullmatch(file.read(_FIRST_BYTES))
    if match is None:
        raise RasterError(
            f"{path} is no tile store of version {VERSION}: it has no header, as those cut by an older one have none "
            "(or its header is damaged); remove it and cut it again with tiledseg tile"
        )
    if int(match[1]) != VERSION:
        raise RasterError(
            f"tile store {path} has version {int(match[1])}, this program reads {VERSION}; remove it and cut it again "
            "with tiledseg tile"
        )
    length = int(match[2])
    if length > os.fstat(file.fileno()).st_size:
        raise RasterError(f"{path} is truncated: its header alone takes {length} bytes; {CHANGED}")
    text = file.read(length)
    if hashlib.sha256(text).hexdigest().encode() != match[3]:
        raise changed(path, "its header")
    value = json.loads(text)
    rasters = {name: Raster(**raster) for name, raster in value["rasters"].items()}
    return Header(value["size"], value["start"], value["outside"], rasters)


def user_block(rasters: Mapping[str, str], datasets: Iterable[str]) -> int:
    """Bytes to leave ahead of the HDF5 for the header of `rasters` (their JSON by name)."""
    widest = dict.fromkeys(datasets, (10**18, 10**18))
    needed = len(_encode(Header(10**18, 10**18, "0" * 64, {n: Raster(t, 10**18, widest) for n, t in rasters.items()})))
    return max(SMALLEST, 1 << (needed - 1).bit_length())


def seal_file(file: IO[bytes] | SparseFile, start: int, rasters: Mapping[str, Raster]) -> None:
    """Put the header of a laid-out store ahead of its HDF5, in the user block that was left for it."""
    size = file.seek(0, os.SEEK_END)
    data = _encode(Header(size, start, _seal_outside(file, start, size, rasters.values()), rasters))
    assert len(data) <= start, "user_block left too little"
    file.seek(0)
    file.write(data)


def _encode(header: Header) -> bytes:
    text = json.dumps(asdict(header)).encode()
    first = f"{FORMAT} {VERSION} {len(text):012d} {hashlib.sha256(text).hexdigest()}\n"
    return first.encode() + text


def _seal_outside(file: IO[bytes] | SparseFile, start: int, size: int, rasters: Iterable[Raster]) -> str:
    """SHA-256 of the bytes from `start` to `size` of a file that are in no dataset of `rasters`."""
    found = hashlib.sha256()
    at = start
    tiles = sorted((begin, end) for raster in rasters for begin, end in raster.places.values())
    for begin, end in (*tiles, (size, size)):
        file.seek(at)
        while at < begin:
            piece = file.read(min(_PIECE, begin - at))
            if not piece:
                break
            found.update(piece)
            at += len(piece)
        at = max(at, end)
    return found.hexdigest()


def first_checksum(index: int, state: int) -> int:
    """The CRC-32 of a tile's number and state, which its pixels go on from."""
    return zlib.crc32(f"tile {index} state {state}".encode())


def add_checksum(before: int, values: NDArray) -> int:
    """The checksum with `values`, contiguous, added."""
    return zlib.crc32(values.data, before)


def changed(what: str, part: str) -> RasterError:
    """The error of a store that does not agree with itself."""
    return RasterError(f"{what} was changed or damaged since it was cut: {part} does not fit its checksum; {CHANGED}")
