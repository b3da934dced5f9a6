"""The files of a raster: those that reading opens, and those that are cut off or damaged."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from rasterio.errors import RasterioError
from rasterio.io import DatasetReader

from tiledseg.errors import RasterError
from tiledseg.raster.names import is_remote
from tiledseg.raster.reading.gdal_open import DRIVERS, files_beside, local_file
from tiledseg.system.files import irregular_kind

_VRT_HEAD_BYTES = 1024
_MOST_BLOCKS = 1 << 16  # looked up one by one at about 5 microseconds each
_PNG_END = b"IEND\xaeB`\x82"


def source_files(path: str, dataset: Any) -> tuple[str, ...]:
    """Return the local files of an open `dataset`: its own, those beside it, and a VRT's sources at any depth."""
    if is_remote(path):
        return ()
    file = local_file(path)
    if dataset.driver in DRIVERS and file is not None:
        return (file, *files_beside(file))
    files = dict.fromkeys([path, *dataset.files] if os.path.exists(path) else dataset.files)
    waiting = [file for file in files if file != path] if dataset.driver == "VRT" else []
    while waiting:  # GDAL lists the sources of the outermost VRT only
        new = [file for file in _files_of_vrt(waiting.pop()) if file not in files]
        files |= dict.fromkeys(new)
        waiting += new
    return tuple(files)


def _files_of_vrt(file: str) -> list[str]:
    """Return the files that a VRT names; none for any other file."""
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


def check_complete(path: str, dataset: Any) -> None:
    """Raise RasterError for a local TIFF with blocks past the end of its file, or with blocks of uncompressed pixels of
    fewer bytes than their pixels take, and for a PNG without its last chunk.

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
    if dataset.driver != "GTiff":
        return
    structure = dataset.tags(ns="IMAGE_STRUCTURE")
    packed = "NBITS" in dataset.tags(1, ns="IMAGE_STRUCTURE")
    plain = "COMPRESSION" not in structure and "SOURCE_COLOR_SPACE" not in structure and not packed
    for end, length, needed in _blocks(dataset, structure.get("INTERLEAVE") == "BAND"):
        if end > size:
            raise RasterError(f"{path} is truncated: it has {size} bytes of at least {end}; copy it again")
        if plain and length < needed:
            rows, cols = dataset.block_shapes[0]
            raise RasterError(
                f"{path} has {length} bytes for a block of {rows} x {cols} px, whose pixels take {needed}; its header "
                "is damaged: copy it again"
            )


def _blocks(dataset: Any, by_band: bool) -> Iterator[tuple[int, int, int]]:
    """Yield of each block its end in the file, its bytes there, and the bytes of its pixels inside the image. Empty
    blocks are left out of a file."""
    rows, cols = dataset.block_shapes[0]
    down, across = -(-dataset.height // rows), -(-dataset.width // cols)
    bands = dataset.indexes if by_band else (1,)
    pixel_bytes = np.dtype(dataset.dtypes[0]).itemsize * (1 if by_band else dataset.count)
    for band in bands:
        for block in range(max(0, down * across - max(1, _MOST_BLOCKS // len(bands))), down * across):
            row, col = divmod(block, across)
            offset, length = (
                int(dataset.get_tag_item(f"BLOCK_{what}_{col}_{row}", "TIFF", bidx=band) or 0)
                for what in ("OFFSET", "SIZE")
            )
            if offset and length:
                # A last strip may end with the image; a tile is whole, but its pixels outside are read by nobody.
                yield offset + length, length, min(rows, dataset.height - row * rows) * cols * pixel_bytes
