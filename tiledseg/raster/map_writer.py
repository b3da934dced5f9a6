"""The writing of one raster by many ranks: each pixel once, by its owner, and no rank waits for another.

One rank lays out an uncompressed tiled GeoTIFF in the output's temporary folder (`system.outputs.unfinished`). In such
a file a block's offset is known before its pixels, so any rank writes its rectangles with `pwrite`: no
read-modify-write, no lock, no gathering. One rank makes a `RasterLayout` and broadcasts it; every rank writes by a
`raster_writer`; after a barrier one rank calls `pack_layout` and `publish`. The bytes depend on the pixels only.

The plain file is the format `gtiff`; GDAL's driver packs it to `cog`, a Cloud-Optimized GeoTIFF with overviews. A
GeoTIFF keeps a colour for each value, and names only in our tags CLASS_0, CLASS_1, ..., which `evaluate` reads.
`map.tif.aux.xml` (GDAL's format) has the names of the categories, `map.qml` the style for QGIS.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
import rasterio.shutil
from numpy.typing import NDArray
from rasterio.errors import NotGeoreferencedWarning

from tiledseg.config.words import BLOCK, PLAIN, ZARR, Packing
from tiledseg.errors import OutputError, WriteError
from tiledseg.geometry.box import Box
from tiledseg.raster.info import RasterInfo, meaning, place_of, placement
from tiledseg.raster.labels.classes import ClassRecord, add_names, style_of
from tiledseg.raster.zarr_writer import begin_store, check_zarr
from tiledseg.system.files import replacing, temporary, writing
from tiledseg.system.outputs import Output, Unfinished, whole

SIDECARS = (".ovr", ".msk", ".aux.xml")
_CACHE_BYTES = 256 << 20
_SHARES_LEVEL = 1
"""Compression level of probabilities: a higher one takes several times as long and saves a tenth of the bytes."""

_LOOK_SECONDS = 0.5


class RasterLayout:
    """A laid-out raster with the offset of each block: a value to broadcast.

    `plain`: the laid-out file, which gets the final name if it is not packed. `offsets`: int64 (bands, block rows,
    block cols), bytes from the start of the file. `notes`: georeferencing of the source that the file cannot keep.
    """

    def __init__(
        self,
        output: Unfinished,
        info: RasterInfo,
        bands: int,
        dtype: str,
        nodata: float | None = None,
        legend: Sequence[ClassRecord] = (),
        descriptions: Sequence[str] = (),
        packing: Packing = PLAIN,
    ) -> None:
        """Create the plain file of `output`, with the grid (size, CRS, transform) of `info`.

        `legend`: a name and a colour for each value from 0, for one band of uint8. `packing`: format of the final file.
        Unwritten pixels hold 0. The caller has run `check_outputs` on `raster_output`. Raises WriteError if the file
        cannot be made.
        """
        self.output, self.path, self.packing = output, output.path, packing
        self.bands, self.dtype, self.legend = bands, dtype, tuple(legend)
        self.plain = output.file("plain") if packing.second_file else output.file()
        profile = {"driver": "GTiff", "height": info.height, "width": info.width, "count": bands, "dtype": dtype}
        profile |= {"tiled": True, "blockxsize": BLOCK, "blockysize": BLOCK, "interleave": "band"}
        profile |= {"compress": "none", "endianness": "little", "bigtiff": "if_safer"}
        profile |= {"photometric": "minisblack"}  # else GDAL takes the last of four byte bands for alpha
        with writing(self.path), warnings.catch_warnings():
            warnings.simplefilter("ignore", NotGeoreferencedWarning)  # the source may lack georeferencing too
            with rasterio.open(self.plain, "w", **profile, **placement(info)) as dataset:
                if legend:
                    dataset.write_colormap(1, dict(enumerate(one.colour for one in legend)))
                    dataset.update_tags(1, **{f"CLASS_{number}": one.name for number, one in enumerate(legend)})
                for band, description in enumerate(descriptions, start=1):
                    dataset.set_band_description(band, description)
            with rasterio.open(self.plain, "r+", driver="GTiff") as dataset:
                if nodata is not None:  # set at creation, GDAL would fill the file with it
                    dataset.nodata = nodata
                kept, place = meaning(dataset), place_of(info.crs, info.transform, info.ground)
            lost = [what for what in place if kept[what] != place[what]]
            self.notes = [f"the map does not keep the {what} of {info.path}" for what in lost]
            if packing.format == ZARR and info.ground is not None:
                self.notes.append(f"a Zarr store does not keep the ground control of {info.path}")
            style = self.path.with_suffix(".qml")
            if legend and packing.format != ZARR and style.exists() and style.read_bytes() != style_of(legend):
                here = f"the style beside {self.path} stays as it was"
                self.notes.append(f"{here}; remove it for one of this map's classes")
            self.offsets = block_offsets(self.plain, bands)


def block_offsets(path: Path, bands: int) -> NDArray[np.int64]:
    """Return the offsets of all blocks (bands, block rows, block cols) of the plain file. Raises OSError unless
    blocks are distinct and inside the file."""
    with rasterio.open(path, driver="GTiff") as dataset:
        expected = BLOCK * BLOCK * np.dtype(dataset.dtypes[0]).itemsize
        shape = bands, -(-dataset.height // BLOCK), -(-dataset.width // BLOCK)
        offsets = np.zeros(shape, np.int64)
        for band, row, col in np.ndindex(shape):
            tag = dataset.get_tag_item(f"BLOCK_OFFSET_{col}_{row}", "TIFF", bidx=band + 1)
            offsets[band, row, col] = int(tag or 0)
    ordered = np.sort(offsets, axis=None)
    inside = ordered[0] > 0 and ordered[-1] + expected <= path.stat().st_size
    if not inside or (np.diff(ordered) < expected).any():
        raise OSError("its blocks are incomplete, overlap, or lie beyond its end")
    return offsets


def raster_output(
    key: str, path: str | Path, info: RasterInfo, bands: int, dtype: str, packing: Packing = PLAIN, legend: bool = False
) -> Output:
    """Return the files that writing a raster on the grid of `info` touches, and its bytes. `key`: the flag."""
    size = packing.bytes(info.height, info.width, bands * np.dtype(dtype).itemsize)
    if packing.format == ZARR:
        check_zarr(key, path)
        return whole(key, path, size)
    output, style = whole(key, path, size, SIDECARS), Path(path).with_suffix(".qml")
    return replace(output, beside=(*output.beside, style, temporary(style))) if legend else output


Write = Callable[[Box, NDArray], None]
"""Writes the pixels (bands, height, width) of a box inside the raster, of the layout's dtype. Threads may share it.
Memory: a copy of one block."""


@contextmanager
def raster_writer(layout: RasterLayout) -> Iterator[Write]:
    """Yield a function that writes rectangles of pixels into a laid-out raster, one for each process. The file is
    flushed to the disk at the block's end.

    Raises OutputError if the file is gone or was replaced, WriteError if a write fails.
    """
    dtype = np.dtype(layout.dtype).newbyteorder("<")
    try:
        descriptor = os.open(layout.plain, os.O_WRONLY | os.O_CLOEXEC)
    except OSError as error:
        words = f"cannot write {layout.path}: {layout.plain} {error.strerror}; all ranks must see one file system"
        raise OutputError(words) from None

    def write(box: Box, pixels_CHW: NDArray) -> None:
        for part in box.blocks(BLOCK, BLOCK):
            rows, cols = part.relative_to(box).slices
            row, row_in_block = divmod(part.row.start, BLOCK)
            col, col_in_block = divmod(part.col.start, BLOCK)
            for band in range(layout.bands):
                start = int(layout.offsets[band, row, col]) + (row_in_block * BLOCK + col_in_block) * dtype.itemsize
                pixels = np.ascontiguousarray(pixels_CHW[band, rows, cols], dtype)
                with writing(layout.path):  # whole rows are contiguous in the file
                    for line in [slice(None)] if part.width == BLOCK else range(part.height):
                        _put(descriptor, pixels[line].reshape(-1), start)
                        start += BLOCK * dtype.itemsize

    try:
        layout.output.check_ours()
        yield write
        with writing(layout.path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put(descriptor: int, pixels: NDArray, offset: int) -> None:
    data = pixels.data.cast("B")
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def begin_chunks(layout: RasterLayout) -> None:
    """Create the Zarr store of a map without chunks, on one rank, after every writer is closed."""
    layout.output.check_ours()
    with writing(layout.path):
        names = [one.name for one in layout.legend]
        begin_store(layout.plain, layout.output.file(), layout.packing.compress, names)


def pack_layout(layout: RasterLayout, threads: int = 1, beat: Callable[[], None] = lambda: None) -> None:
    """Make the final file of the layout's packing from the plain one; a Zarr store is there already (`begin_chunks`).

    Call it on one rank, after every writer is closed. Raises OutputError if another job has replaced the laid-out file,
    and WriteError.
    """
    layout.output.check_ours()
    if layout.packing.format == ZARR:
        return
    with writing(layout.path):
        if layout.packing.second_file:
            _pack(layout, threads, beat)
        if layout.legend:
            add_names(layout.output.file("whole.aux.xml"), layout.legend)


def _pack(layout: RasterLayout, threads: int, beat: Callable[[], None]) -> None:
    """Pack the plain file with `threads` threads; the bytes do not depend on `threads`.

    `beat` is called meanwhile, because GDAL reports no progress. Raises WriteError if the file cannot be written or
    lacks metadata of the plain one, which GDAL's drivers drop silently.
    """
    with ThreadPoolExecutor(1) as pool:  # a signal ends the wait, but not GDAL: the pool waits for it
        copy = pool.submit(_copy, layout, threads)
        while not wait([copy], _LOOK_SECONDS).done:
            beat()
        copy.result()
    files = (rasterio.open(file, driver="GTiff") for file in (layout.plain, layout.output.file()))
    with next(files) as ours, next(files) as theirs:
        kept = meaning(theirs)
        lost = [what for what, value in meaning(ours).items() if kept[what] != value]
    if lost:
        raise WriteError(f"cannot write {layout.path}: GDAL's driver has not kept the {lost[0]}; use --format gtiff")


def _copy(layout: RasterLayout, threads: int) -> None:
    packing = layout.packing
    options: dict[str, Any] = {"compress": packing.codec, "num_threads": threads, "bigtiff": "if_safer"}
    options |= {"blocksize": BLOCK, "overview_resampling": "average" if packing.average else "mode"}
    if packing.average and packing.codec != "none":
        options["level"] = _SHARES_LEVEL
    if np.dtype(layout.dtype).kind == "f" and packing.codec != "none":
        options["predictor"] = "floating_point"
    settings = {
        "GDAL_NUM_THREADS": str(threads),
        "GDAL_CACHEMAX": _CACHE_BYTES,
        "GTIFF_VIRTUAL_MEM_IO": "YES",  # map the plain file, which no other job shortens, into memory
        "COG_TMP_COMPRESSION": "NONE",  # compress overviews once
    }
    with rasterio.Env(**settings), rasterio.open(layout.plain, driver="GTiff") as dataset:
        rasterio.shutil.copy(dataset, layout.output.file(), driver="COG", **options)


def publish(layout: RasterLayout) -> None:
    """Give the finished file its name, in place of an older one with its overviews and statistics; write the style of a
    class map in a TIFF, unless one is there.

    Call it on one rank, after `pack_layout`. Raises errors of `Unfinished.publish`.
    """
    layout.output.publish(SIDECARS, replaces=layout.packing.format != ZARR)
    style = layout.path.with_suffix(".qml")
    if layout.legend and layout.packing.format != ZARR and not style.exists():
        with replacing(style) as part:
            part.write_bytes(style_of(layout.legend))
