"""Writing one raster from many ranks: every pixel once, by its owner, without any rank waiting for another.

One rank lays out an uncompressed tiled GeoTIFF under a temporary name beside the final one. In such a file a block's
place is known before its pixels are, so any rank can put its rectangles in place with `pwrite`: no read-modify-write,
no lock, no gathering. After a barrier of the caller one rank gives the file its final name.

    layout_ = lay_out(path, info, bands=1, dtype="uint8", nodata=255)     one rank; broadcast the value
    with RasterWriter(layout_) as writer:                                 every rank
        writer.write(box, pixels_CHW)
    publish(layout_)                                                      one rank, after a barrier

The bytes of the file depend on the pixels only, not on how, when or by whom they were written.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import rasterio
from numpy.typing import NDArray
from rasterio.errors import NotGeoreferencedWarning

from tiledseg.claim import check_unclaimed, taken
from tiledseg.errors import OutputError, WriteError
from tiledseg.geometry.box import Box
from tiledseg.outputs import Output, temporary, whole
from tiledseg.raster.georeferencing import lost, placement
from tiledseg.raster.info import RasterInfo
from tiledseg.writing import writing

BLOCK = 512
"""Side of a block, pixels."""

_CLASSIC_LIMIT = 4_000_000_000
"""Bytes above which a file is BigTIFF: classic TIFF has 32-bit offsets, and needs room for its directory."""

_SIDECARS = (".ovr", ".msk", ".aux.xml")


@dataclass(frozen=True, eq=False)
class RasterLayout:
    """Where each block of a laid-out raster lies: a value to broadcast.

    `offsets` is int64 (bands, block rows, block cols), bytes from the start of the file; `inode` tells the laid-out
    file from one that another job has put in its place. `notes` say what of the source's place the file cannot keep.
    """

    path: Path
    temporary: Path
    inode: int
    bands: int
    height: int
    width: int
    dtype: str
    offsets: NDArray[np.int64]
    notes: tuple[str, ...] = ()


def lay_out(
    path: str | Path,
    info: RasterInfo,
    bands: int,
    dtype: str,
    nodata: float | None = None,
    colormap: Mapping[int, Sequence[int]] | None = None,
    descriptions: Sequence[str] = (),
) -> RasterLayout:
    """Create the file for `path` under a temporary name, with the grid (size, CRS, transform) of `info`.

    `colormap` maps a value to (red, green, blue) of 0 ... 255, for one band of uint8. Unwritten pixels hold 0.
    The caller has asked `check_outputs` about `raster_output`. Raises OutputError where the file cannot be
    made, or another job is writing it.
    """
    path = Path(path)
    part = temporary(path)
    check_unclaimed(part, path)
    try:
        part.unlink(missing_ok=True)
        _own_sidecar(part).unlink(missing_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotGeoreferencedWarning)  # where the source has no place either
            _create(part, _profile(info, bands, dtype), nodata, colormap, descriptions)
            offsets = _block_offsets(part, bands)
            notes = _lost(part, info)
        inode = part.stat().st_ino
    except BaseException as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
            _own_sidecar(part).unlink(missing_ok=True)
        if isinstance(error, (OSError, rasterio.errors.RasterioError)):
            raise OutputError(f"cannot write {path}: {_reason(error)}; choose another output") from None
        raise
    return RasterLayout(path, part, inode, bands, info.height, info.width, dtype, offsets, notes)


def raster_output(key: str, path: str | Path, info: RasterInfo, bands: int, dtype: str) -> Output:
    """The files that writing a raster of the grid of `info` touches, and its bytes; `key` is the flag that named it."""
    output = whole(key, path, _bytes(info, bands, dtype), _SIDECARS)
    return replace(output, beside=(*output.beside, *map(_own_sidecar, output.beside[:1])))


def _bytes(info: RasterInfo, bands: int, dtype: str) -> int:
    return bands * _blocks(info.height) * _blocks(info.width) * BLOCK * BLOCK * np.dtype(dtype).itemsize


def _profile(info: RasterInfo, bands: int, dtype: str) -> dict[str, Any]:
    return {
        "driver": "GTiff",
        "height": info.height,
        "width": info.width,
        "count": bands,
        "dtype": dtype,
        **placement(info),
        "tiled": True,
        "blockxsize": BLOCK,
        "blockysize": BLOCK,
        "interleave": "band",
        "compress": "none",
        "endianness": "little",
        "bigtiff": "yes" if _bytes(info, bands, dtype) > _CLASSIC_LIMIT else "no",
    }


def _create(
    path: Path,
    profile: dict[str, Any],
    nodata: float | None,
    colormap: Mapping[int, Sequence[int]] | None,
    descriptions: Sequence[str],
) -> None:
    with rasterio.open(path, "w", **profile) as dataset:
        if colormap is not None:
            dataset.write_colormap(1, {value: tuple(colour) for value, colour in colormap.items()})
        for band, description in enumerate(descriptions, start=1):
            dataset.set_band_description(band, description)
    if nodata is None:
        return
    # In a second step: a file made with a nodata value other than 0 is filled with it, every byte written twice.
    with rasterio.open(path, "r+", driver="GTiff") as dataset:
        dataset.nodata = nodata


def _block_offsets(path: Path, bands: int) -> NDArray[np.int64]:
    """Offsets as the file states them; OutputError unless blocks are whole, distinct and inside the file."""
    with rasterio.open(path, driver="GTiff") as dataset:
        shape = bands, _blocks(dataset.height), _blocks(dataset.width)
        expected = BLOCK * BLOCK * np.dtype(dataset.dtypes[0]).itemsize
        offsets = np.zeros(shape, np.int64)
        for band, row, col in np.ndindex(shape):
            offset, size = (
                int(dataset.get_tag_item(f"BLOCK_{what}_{col}_{row}", "TIFF", bidx=band + 1) or 0)
                for what in ("OFFSET", "SIZE")
            )
            if offset <= 0 or size != expected:
                raise OutputError(f"block ({row}, {col}) was laid out as {size} bytes at {offset}")
            offsets[band, row, col] = offset
    ordered = np.sort(offsets, axis=None)
    if (np.diff(ordered) < expected).any() or ordered[-1] + expected > path.stat().st_size:
        raise OutputError("its blocks were laid out to overlap, or beyond its end")
    return offsets


def _lost(path: Path, info: RasterInfo) -> tuple[str, ...]:
    with rasterio.open(path, driver="GTiff") as dataset:
        return lost(info, dataset)


def _blocks(size: int) -> int:
    return -(-size // BLOCK)


class RasterWriter:
    """Puts rectangles of pixels in place in a laid-out raster; a handle of its own for each process.

    Raises OutputError where the file is gone or was replaced, WriteError where a write fails. Threads may share one
    writer.
    """

    def __init__(self, layout: RasterLayout) -> None:
        self.layout = layout
        self._dtype = np.dtype(layout.dtype).newbyteorder("<")
        self._raster = Box.of_shape((layout.height, layout.width))
        self._descriptor = _open(layout)

    def write(self, box: Box, pixels_CHW: NDArray) -> None:
        """Write the pixels of `box` (inside the raster), of the layout's dtype, shape (bands, height, width).

        Memory: a copy of one block. ValueError where shape, dtype or box do not fit.
        """
        layout = self.layout
        if pixels_CHW.shape != (layout.bands, *box.shape) or pixels_CHW.dtype != np.dtype(layout.dtype):
            raise ValueError(
                f"pixels are {pixels_CHW.shape} {pixels_CHW.dtype}, the layout wants "
                f"{(layout.bands, *box.shape)} {layout.dtype}"
            )
        if not self._raster.contains(box):
            raise ValueError(f"{box} is not inside the raster {self._raster}")
        for block in box.blocks(BLOCK, BLOCK):
            rows, cols = block.relative_to(box).slices
            for band in range(layout.bands):
                self._write_part(band, block, pixels_CHW[band, rows, cols])

    def _write_part(self, band: int, part: Box, pixels_HW: NDArray) -> None:
        row, row_in_block = divmod(part.row.start, BLOCK)
        col, col_in_block = divmod(part.col.start, BLOCK)
        item = self._dtype.itemsize
        start = int(self.layout.offsets[band, row, col]) + (row_in_block * BLOCK + col_in_block) * item
        pixels = np.ascontiguousarray(pixels_HW, self._dtype)
        if part.width == BLOCK:  # whole rows follow each other in the file
            self._put(pixels.reshape(-1), start)
            return
        for line in range(part.height):
            self._put(pixels[line], start + line * BLOCK * item)

    def _put(self, pixels: NDArray, offset: int) -> None:
        data = pixels.data.cast("B")
        while data:
            with writing(self.layout.path):
                written = os.pwrite(self._descriptor, data, offset)
            data, offset = data[written:], offset + written

    def close(self) -> None:
        """Flush to the disk and let go of the file; a second call does nothing."""
        if self._descriptor < 0:
            return
        descriptor, self._descriptor = self._descriptor, -1
        try:
            with writing(self.layout.path):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def __enter__(self) -> RasterWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(WriteError):  # the first error is the one to show
            self.close()


def _open(layout: RasterLayout) -> int:
    try:
        descriptor = os.open(layout.temporary, os.O_WRONLY | os.O_CLOEXEC)
    except OSError as error:
        raise OutputError(
            f"cannot write {layout.path}: {layout.temporary} {_reason(error)}; all ranks must see one file system"
        ) from None
    if os.fstat(descriptor).st_ino != layout.inode:
        os.close(descriptor)
        raise taken(layout.path)
    return descriptor


def publish(layout: RasterLayout) -> None:
    """Give the finished file its final name, replacing an older one and its overviews and statistics.

    Call it on one rank, after every writer is closed. Raises OutputError, and leaves an older file as it was, where
    another job has replaced the laid-out file, and WriteError where it is gone or cannot be renamed.
    """
    with writing(layout.path):
        if layout.temporary.stat().st_ino != layout.inode:
            raise taken(layout.path)
        _replace_sidecars(layout)
        os.replace(layout.temporary, layout.path)


def _replace_sidecars(layout: RasterLayout) -> None:
    """Away with the old file's, which do not describe the new one; its own holds what of its place a TIFF cannot."""
    for suffix in _SIDECARS:
        layout.path.with_name(layout.path.name + suffix).unlink(missing_ok=True)
    if _own_sidecar(layout.temporary).exists():
        os.replace(_own_sidecar(layout.temporary), _own_sidecar(layout.path))


def _own_sidecar(path: Path) -> Path:
    return path.with_name(f"{path.name}.aux.xml")


def discard(layout: RasterLayout) -> None:
    """Remove the unfinished file; nothing where it is gone or another job's."""
    with contextlib.suppress(OSError):
        if layout.temporary.stat().st_ino == layout.inode:
            layout.temporary.unlink()
            _own_sidecar(layout.temporary).unlink(missing_ok=True)


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).split("\n")[0]
