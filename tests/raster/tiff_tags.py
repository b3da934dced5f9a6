"""Changing a number in the header of a TIFF file, as a flipped byte does."""

from __future__ import annotations

import struct
from pathlib import Path

ROWS_PER_STRIP, TILE_WIDTH, TILE_LENGTH = 278, 322, 323


def change_tag(path: Path, tag: int, value: int) -> None:
    """Set the (single) value of a tag in the first directory of a little-endian TIFF, and nothing else."""
    data = bytearray(path.read_bytes())
    (directory,) = struct.unpack_from("<I", data, 4)
    (entries,) = struct.unpack_from("<H", data, directory)
    for entry in range(directory + 2, directory + 2 + 12 * entries, 12):
        if struct.unpack_from("<H", data, entry)[0] == tag:
            kind, count = struct.unpack_from("<HI", data, entry + 2)
            assert count == 1, f"tag {tag} has {count} values"
            struct.pack_into({3: "<H", 4: "<I"}[kind], data, entry + 8, value)
            path.write_bytes(data)
            return
    raise AssertionError(f"{path} has no tag {tag}")
