"""A plain tiled GeoTIFF: not compressed, so that each block has its place in the file before there are any pixels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
from numpy.typing import NDArray

from tiledseg.config.map_formats import BLOCK, BlockBytes, block_bytes
from tiledseg.errors import OutputError
from tiledseg.raster.georeferencing import placement
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.labels.classes import ClassRecord
from tiledseg.raster.maps.legend import colormap, tags


def bytes_of(info: RasterInfo, bands: int, dtype: str) -> BlockBytes:
    """Of the blocks of a raster of the grid of `info`."""
    return block_bytes(info.height, info.width, bands * np.dtype(dtype).itemsize)


def _profile(info: RasterInfo, bands: int, dtype: str, big: bool) -> dict[str, Any]:
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
        "bigtiff": "yes" if big else "no",
    }


def create(
    path: Path,
    info: RasterInfo,
    bands: int,
    dtype: str,
    legend: Sequence[ClassRecord],
    descriptions: Sequence[str],
    big: bool,
) -> None:
    """Make the file, a BigTIFF or not, with the grid (size, CRS, transform) of `info`: its blocks are holes."""
    with rasterio.open(path, "w", **_profile(info, bands, dtype, big)) as dataset:
        if legend:
            dataset.write_colormap(1, colormap(legend))
            dataset.update_tags(1, **tags(legend))
        for band, description in enumerate(descriptions, start=1):
            dataset.set_band_description(band, description)


def add_meaning(path: Path, nodata: float | None, scale: float | None) -> None:
    """What values mean. A second step: a file made with a nodata value that is not 0 would be filled with it first."""
    if nodata is None and scale is None:
        return
    with rasterio.open(path, "r+", driver="GTiff") as dataset:
        if nodata is not None:
            dataset.nodata = nodata
        if scale is not None:
            dataset.scales, dataset.offsets = [scale] * dataset.count, [0.0] * dataset.count


def block_offsets(path: Path, bands: int, overview: int | None = None) -> NDArray[np.int64]:
    """Offsets as the file states them, of its pixels or of an overview, by its number from 0; OutputError unless blocks
    are whole, distinct and inside the file."""
    level = {} if overview is None else {"overview_level": overview}
    with rasterio.open(path, driver="GTiff", **level) as dataset:
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


def _blocks(size: int) -> int:
    return -(-size // BLOCK)
