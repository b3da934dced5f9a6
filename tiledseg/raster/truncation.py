"""Finding a cut-off file when it is opened, before anything is computed from it."""

from __future__ import annotations

import os
from typing import Any

from tiledseg.errors import RasterError
from tiledseg.raster.sources import is_remote

_MOST_BLOCKS = 1 << 16  # looked up one by one at about 5 microseconds each
_PNG_END = b"IEND\xaeB`\x82"


def check_complete(path: str, dataset: Any) -> None:
    """Raise RasterError where a local TIFF has blocks past the end of the file, or a PNG lacks its last chunk.

    `dataset` is rasterio's. In TIFFs of more than 65536 blocks the last ones are looked at: writers put them last.
    Other formats, and files behind URLs, tell when they are read.
    """
    if is_remote(path) or not os.path.isfile(path):
        return
    size = os.path.getsize(path)
    if dataset.driver == "PNG":
        with open(path, "rb") as file:
            file.seek(max(0, size - 4096))
            if _PNG_END not in file.read():
                raise RasterError(f"{path} is truncated: a PNG of {size} bytes without its end; copy it again")
    if dataset.driver in ("GTiff", "COG"):
        needed = _last_byte(dataset)
        if needed > size:
            raise RasterError(f"{path} is truncated: it has {size} bytes of at least {needed}; copy it again")


def _last_byte(dataset: Any) -> int:
    """Where the last block ends, in bytes from the start of the file."""
    rows, cols = dataset.block_shapes[0]
    down, across = -(-dataset.height // rows), -(-dataset.width // cols)
    bands = dataset.indexes if dataset.tags(ns="IMAGE_STRUCTURE").get("INTERLEAVE") == "BAND" else (1,)
    blocks = down * across
    last = 0
    for band in bands:
        for block in range(max(0, blocks - max(1, _MOST_BLOCKS // len(bands))), blocks):
            row, col = divmod(block, across)
            offset = dataset.get_tag_item(f"BLOCK_OFFSET_{col}_{row}", "TIFF", bidx=band)
            length = dataset.get_tag_item(f"BLOCK_SIZE_{col}_{row}", "TIFF", bidx=band)
            if offset and length:
                last = max(last, int(offset) + int(length))
    return last
