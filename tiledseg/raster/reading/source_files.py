"""The files of a raster: those that reading opens, and those that are cut off or damaged."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from rasterio.errors import RasterioError
from rasterio.io import DatasetReader

from tiledseg.errors import RasterError
from tiledseg.raster.names import is_remote
from tiledseg.raster.reading.gdal_open import DRIVERS, files_beside, local_file
from tiledseg.system.files import irregular_kind

_VRT_HEAD_BYTES = 1024


def source_files(path: str, dataset: Any) -> tuple[str, ...]:
    """Return the local files of an open `dataset`: its own, those beside it, and a VRT's sources at any depth."""
    if is_remote(path):
        return ()
    file = local_file(path)
    if dataset.driver in DRIVERS and file is not None:
        return (file, *files_beside(file))
    found = dict.fromkeys([path, *dataset.files] if os.path.exists(path) else dataset.files)
    waiting = [file for file in found if file != path] if dataset.driver == "VRT" else []
    while waiting:
        for file in _listed_by(waiting.pop()):
            if file not in found:
                found[file] = None
                waiting.append(file)
    return tuple(found)


def _listed_by(file: str) -> list[str]:
    """Return the files that a VRT names; none for any other file. GDAL lists the sources of the outermost VRT only."""
    if not os.path.isfile(file) or irregular_kind(file) is not None:
        return []
    with open(file, "rb") as handle:
        if b"<VRTDataset" not in handle.read(_VRT_HEAD_BYTES):
            return []
    try:
        with DatasetReader(file, driver=["VRT"], sharing=False) as dataset:
            return list(dataset.files)
    except RasterioError:
        return []


_MOST_BLOCKS = 1 << 16  # looked up one by one at about 5 microseconds each
_PNG_END = b"IEND\xaeB`\x82"


def check_complete(path: str, dataset: Any) -> None:
    """Raise RasterError where a local TIFF has blocks past the end of the file or blocks of uncompressed pixels with
    fewer bytes than pixels, or where a PNG lacks its last chunk.

    `dataset` is rasterio's. In TIFFs of more than 65536 blocks the last ones are looked at: writers put them last.
    Other formats, and files at URLs, tell when they are read. Uncompressed blocks do not: GDAL reads windows of
    them by their place in the file, and takes what comes after a block for its pixels.
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
        blocks = list(_blocks(dataset))
        needed = max((block.offset + block.length for block in blocks), default=0)
        if needed > size:
            raise RasterError(f"{path} is truncated: it has {size} bytes of at least {needed}; copy it again")
        short = [block for block in blocks if block.length < block.pixel_bytes]
        if short and _is_plain(dataset):
            rows, cols = dataset.block_shapes[0]
            raise RasterError(
                f"{path} has {short[0].length} bytes for a block of {rows} x {cols} px, "
                f"whose pixels take {short[0].pixel_bytes}; its header is damaged: copy it again"
            )


@dataclass(frozen=True)
class _Block:
    offset: int  # bytes, in the file
    length: int  # bytes, as the header says
    pixel_bytes: int  # that its pixels inside the image take uncompressed


def _blocks(dataset: Any) -> Iterator[_Block]:
    """Yield the blocks that the file holds, without those that it leaves out as empty."""
    rows, cols = dataset.block_shapes[0]
    down, across = -(-dataset.height // rows), -(-dataset.width // cols)
    by_band = dataset.tags(ns="IMAGE_STRUCTURE").get("INTERLEAVE") == "BAND"
    bands = dataset.indexes if by_band else (1,)
    pixel_bytes = np.dtype(dataset.dtypes[0]).itemsize * (1 if by_band else dataset.count)
    for band in bands:
        for block in range(max(0, down * across - max(1, _MOST_BLOCKS // len(bands))), down * across):
            row, col = divmod(block, across)
            offset = dataset.get_tag_item(f"BLOCK_OFFSET_{col}_{row}", "TIFF", bidx=band)
            length = dataset.get_tag_item(f"BLOCK_SIZE_{col}_{row}", "TIFF", bidx=band)
            if offset and length:
                # A last strip may end with the image; a tile is whole, but its pixels outside are read by nobody.
                inside = min(rows, dataset.height - row * rows) * cols
                yield _Block(int(offset), int(length), inside * pixel_bytes)


def _is_plain(dataset: Any) -> bool:
    """Return True if a block is its pixels one after the other: not compressed, not packed, no colours at half
    resolution."""
    structure = dataset.tags(ns="IMAGE_STRUCTURE")
    packed = "NBITS" in dataset.tags(1, ns="IMAGE_STRUCTURE")
    return "COMPRESSION" not in structure and "SOURCE_COLOR_SPACE" not in structure and not packed
