"""Room for overviews in a plain GeoTIFF of holes, laid out as a Cloud-Optimized GeoTIFF is: directories before data.

What a file says of itself (grid, CRS, names, nodata) is as GDAL has written it; this module moves it to the file's
start, and adds a directory for each overview. Blocks lie from the smallest overview to the raster itself, a band after
the other, each row by row. Around a block is room for what the layout has there: `FRAME` bytes before it, its size, and
after it, the last of it once more.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tiledseg.config.map_formats import BLOCK, overview_shapes

FRAME = 4
_WORD = 8

_TYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
_LONG, _LONG8 = 4, 16
_REDUCED, _WIDTH, _HEIGHT, _BANDS, _OFFSETS, _SIZES = 254, 256, 257, 277, 324, 325
_OF_OVERVIEWS = (258, 259, 262, 277, 284, 322, 323, 338, 339, 42113)
"""Tags that an overview has of its raster: how values and blocks are kept, and, by the last, what means no data."""

_WORDS = (
    b"LAYOUT=IFDS_BEFORE_DATA\nBLOCK_ORDER=ROW_MAJOR\nBLOCK_LEADER=SIZE_AS_UINT4\n"
    b"BLOCK_TRAILER=LAST_4_BYTES_REPEATED\nKNOWN_INCOMPATIBLE_EDITION=NO\n "
)
_LAYOUT = b"GDAL_STRUCTURAL_METADATA_SIZE=%06d bytes\n%b" % (len(_WORDS), _WORDS)
"""By which GDAL knows the layout, and where it marks a file that somebody has changed."""


class _Form(NamedTuple):
    """Of a TIFF: its first bytes, and the struct formats of a directory's length, an entry without its value, and an
    offset."""

    magic: bytes
    length: str
    entry: str
    offset: str

    @property
    def offset_bytes(self) -> int:
        return struct.calcsize(self.offset)

    @property
    def entry_bytes(self) -> int:
        return struct.calcsize(self.entry) + self.offset_bytes


_CLASSIC = _Form(b"II*\0", "<H", "<HHI", "<I")
_BIG = _Form(b"II+\0\x08\0\0\0", "<Q", "<HHQ", "<Q")


class _Entry(NamedTuple):
    """Of a directory: a tag, and its value: a number of a type, and the bytes of all."""

    tag: int
    type: int
    values: int
    data: bytes


def make_room(path: Path, height: int, width: int) -> None:
    """Lay the file out anew, for itself and all its overviews; its blocks stay holes. The raster has height x width
    pixels in blocks of BLOCK x BLOCK, which are not compressed, of each band by itself."""
    with path.open("r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            form, entries = _read(data)
        head, size = _laid_out(form, entries, [(height, width), *overview_shapes(height, width)])
        file.truncate(0)
        file.write(head)
        file.truncate(size)


def _read(data: mmap.mmap) -> tuple[_Form, list[_Entry]]:
    """A file's form, and its first directory."""
    form = _CLASSIC if data[: len(_CLASSIC.magic)] == _CLASSIC.magic else _BIG
    (at,) = struct.unpack_from(form.offset, data, len(form.magic))
    (count,) = struct.unpack_from(form.length, data, at)
    at += struct.calcsize(form.length)
    found = []
    for _ in range(count):
        tag, kind, values = struct.unpack_from(form.entry, data, at)
        at += struct.calcsize(form.entry)
        size, start = _TYPE_BYTES[kind] * values, at
        if size > form.offset_bytes:
            (start,) = struct.unpack_from(form.offset, data, at)
        found.append(_Entry(tag, kind, values, data[start : start + size]))
        at += form.offset_bytes
    return form, found


def _laid_out(form: _Form, entries: Sequence[_Entry], shapes: Sequence[tuple[int, int]]) -> tuple[bytes, int]:
    """All directories, as the file's first bytes, and the bytes of the file. `shapes`: of the raster and overviews."""
    size = _value(entries, _SIZES)
    counts = [_value(entries, _BANDS) * -(-height // BLOCK) * -(-width // BLOCK) for height, width in shapes]

    def head(first: int) -> bytes:
        """With frames from an offset on."""
        start = len(form.magic) + form.offset_bytes + len(_LAYOUT)
        found = form.magic + struct.pack(form.offset, start + start % 2) + _LAYOUT + bytes(start % 2)
        for at, (shape, count) in enumerate(zip(shapes, counts, strict=True)):
            own = _of_overview(entries, shape) if at else entries
            begin = first + sum(counts[at + 1 :]) * (size + 2 * FRAME) + FRAME
            found += _directory(form, _with_blocks(form, own, begin, count, size), len(found), at + 1 == len(shapes))
        return found

    first = -(-len(head(0)) // _WORD) * _WORD
    return head(first), first + sum(counts) * (size + 2 * FRAME)


def _value(entries: Sequence[_Entry], tag: int) -> int:
    """The first number of a tag's value."""
    found = next(entry for entry in entries if entry.tag == tag)
    return int.from_bytes(found.data[: _TYPE_BYTES[found.type]], "little")


def _of_overview(entries: Sequence[_Entry], shape: tuple[int, int]) -> list[_Entry]:
    own = {_REDUCED: 1, _HEIGHT: shape[0], _WIDTH: shape[1]}
    found = [_Entry(tag, _LONG, 1, struct.pack("<I", value)) for tag, value in own.items()]
    return found + [entry for entry in entries if entry.tag in _OF_OVERVIEWS]


def _with_blocks(form: _Form, entries: Sequence[_Entry], begin: int, count: int, size: int) -> list[_Entry]:
    """The entries with those of `count` blocks, of which the first lies at `begin`."""
    offsets = np.arange(count, dtype=np.int64) * (size + 2 * FRAME) + begin
    kind, dtype = (_LONG8, "<u8") if form is _BIG else (_LONG, "<u4")
    blocks = [
        _Entry(_OFFSETS, kind, count, offsets.astype(dtype).tobytes()),
        _Entry(_SIZES, _LONG, count, np.full(count, size, "<u4").tobytes()),
    ]
    return [entry for entry in entries if entry.tag not in (_OFFSETS, _SIZES)] + blocks


def _directory(form: _Form, entries: Sequence[_Entry], at: int, is_last: bool) -> bytes:
    """Of these entries, at an offset, with the values that do not fit into it after it; the next directory follows."""
    table = struct.pack(form.length, len(entries))
    values_at = at + len(table) + len(entries) * form.entry_bytes + form.offset_bytes
    values = b""
    for entry in sorted(entries):
        table += struct.pack(form.entry, *entry[:3])
        if len(entry.data) <= form.offset_bytes:
            table += entry.data.ljust(form.offset_bytes, b"\0")
        else:
            table += struct.pack(form.offset, values_at + len(values))
            values += entry.data + bytes(-len(entry.data) % _WORD)
    table += struct.pack(form.offset, 0 if is_last else values_at + len(values))
    return table + values
