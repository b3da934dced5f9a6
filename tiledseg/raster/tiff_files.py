"""The files of a map: the plain GeoTIFF that the ranks fill, the packed one that GDAL makes of it, and its legend.

Plain: tiled and not compressed, so that each block has its place in the file before there are any pixels.
Packed: `cog`, a Cloud-Optimized GeoTIFF with overviews, or `gtiff`, a tiled GeoTIFF without; by GDAL's own drivers.

A GeoTIFF keeps a colour for each value, and names only as tags of our own (CLASS_0, CLASS_1, ...), by which `evaluate`
knows them. `map.tif.aux.xml` (GDAL's own) has the names of the categories, `map.qml` the style by which QGIS shows the
map.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

import numpy as np
import rasterio
import rasterio.shutil

from tiledseg.config.map_formats import BLOCK, BlockBytes, Packing, block_bytes
from tiledseg.errors import WriteError
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.labels.classes import ClassRecord, in_hex
from tiledseg.system.files import delete, flush, write_error, writing

_CACHE_BYTES = 256 << 20
_SHARES_LEVEL = 1
"""Compression level of probabilities: higher ones take several times the time, and save a tenth of the bytes."""

_LEVEL_NAMES = {"deflate": "zlevel", "zstd": "zstd_level"}
_LOOK_SECONDS = 0.5


def bytes_of(info: RasterInfo, bands: int, dtype: str) -> BlockBytes:
    """Return the bytes of a raster's blocks on the grid of `info`."""
    return block_bytes(info.height, info.width, bands * np.dtype(dtype).itemsize)


def packed_name(plain: Path) -> Path:
    """Return the name of the packed file of `plain` until it is whole."""
    return plain.with_name(f"{plain.name}.packed")


def packing_names(plain: Path) -> tuple[Path, ...]:
    """Return all names that packing writes: the file, its sidecar, and GDAL's overviews while they are made."""
    name = packed_name(plain)
    return name, *(name.with_name(name.name + end) for end in (".aux.xml", ".ovr.tmp", ".msk.ovr.tmp"))


def remove(names: Sequence[Path]) -> None:
    """Delete files and folders, as far as they are there."""
    for name in names:
        with contextlib.suppress(OSError):
            delete(name)


def pack(plain: Path, packing: Packing, path: Path, threads: int = 1, beat: Callable[[], None] = lambda: None) -> None:
    """Pack the whole file `plain` into `packed_name(plain)`, flushed to the disk, by `threads` threads.

    `path` is the final name, for messages. `beat` is called meanwhile: GDAL reports no progress. The bytes are the same
    by any number of threads. Raises WriteError, with nothing left, where the file cannot be written or says less than
    `plain`: GDAL's drivers say nothing of what they cannot keep.
    """
    remove(packing_names(plain))
    try:
        with ThreadPoolExecutor(1) as pool:  # a signal ends the wait, not GDAL: the pool waits for its end
            copy = pool.submit(_copy, plain, packing, threads)
            while not wait([copy], _LOOK_SECONDS).done:
                beat()
            copy.result()
        with rasterio.open(plain, driver="GTiff") as ours, rasterio.open(packed_name(plain), driver="GTiff") as theirs:
            kept = meaning(theirs)
            lost = [what for what, value in meaning(ours).items() if kept[what] != value]
        if lost:
            raise WriteError(
                f"cannot write {path}: GDAL's driver has not kept the {lost[0]}; take --format gtiff --compress none"
            )
        with writing(path):
            flush(packed_name(plain))
    except BaseException as error:
        remove(packing_names(plain))
        if isinstance(error, Exception) and type(error).__module__.startswith("rasterio"):  # not all are RasterioErrors
            raise write_error(path, error) from error
        raise


def _copy(plain: Path, packing: Packing, threads: int) -> None:
    settings = {
        "GDAL_NUM_THREADS": str(threads),
        "GDAL_CACHEMAX": _CACHE_BYTES,
        "GTIFF_VIRTUAL_MEM_IO": "YES",  # maps the plain file, which no job shortens (`claim`), into memory
        "COG_TMP_COMPRESSION": "NONE",  # compresses overviews once
    }
    with rasterio.Env(**settings), rasterio.open(plain, driver="GTiff") as dataset:
        rasterio.shutil.copy(dataset, packed_name(plain), **_options(dataset, packing, threads))


def _options(dataset: Any, packing: Packing, threads: int) -> dict[str, Any]:
    """Return the creation options; the drivers name them differently."""
    dtype = np.dtype(dataset.dtypes[0])
    blocks = block_bytes(dataset.height, dataset.width, dataset.count * dtype.itemsize)
    options: dict[str, Any] = {
        "compress": packing.codec,
        "num_threads": threads,
        "bigtiff": "yes" if packing.is_big(blocks) else "no",
    }
    cog = packing.format == "cog"
    if cog:
        resampling = "average" if packing.average else "mode"
        options |= {"driver": "COG", "blocksize": BLOCK, "overview_resampling": resampling}
    else:
        options |= {"driver": "GTiff", "tiled": "yes", "blockxsize": BLOCK, "blockysize": BLOCK, "interleave": "band"}
    if packing.average and packing.codec in _LEVEL_NAMES:
        options["level" if cog else _LEVEL_NAMES[packing.codec]] = _SHARES_LEVEL
    if dtype.kind == "f" and packing.codec != "none":
        options["predictor"] = "floating_point" if cog else "3"
    return options


def meaning(dataset: Any) -> dict[str, Any]:
    """Return all that a file says of its pixels, by the words of a message."""
    try:
        colours = dataset.colormap(1)
    except ValueError:  # it has none
        colours = None
    points, crs_of_points = dataset.gcps
    return {
        "size": (dataset.count, dataset.height, dataset.width),
        "type": dataset.dtypes,
        "CRS": dataset.crs,
        "transform": tuple(dataset.transform),
        "nodata value": str(dataset.nodata),  # NaN is not NaN
        "colours": colours,
        "names of the classes": {key: name for key, name in dataset.tags(1).items() if key.startswith("CLASS_")},
        "names of the bands": dataset.descriptions,
        "scales": (dataset.scales, dataset.offsets),
        "ground control points": (crs_of_points, [(p.row, p.col, p.x, p.y, p.z) for p in points]),
        "rational polynomial coefficients": dataset.rpcs and dataset.rpcs.to_dict(),
    }


def add_names(sidecar: Path, classes: Sequence[ClassRecord]) -> None:
    """Put the names into GDAL's file beside a map, of which all else stays."""
    root = Xml.Element("PAMDataset")
    with contextlib.suppress(FileNotFoundError):
        root = Xml.parse(sidecar).getroot()
    band = root.find("PAMRasterBand[@band='1']")
    if band is None:
        band = Xml.SubElement(root, "PAMRasterBand", band="1")
    names = Xml.SubElement(band, "CategoryNames")
    for one in classes:
        Xml.SubElement(names, "Category").text = one.name
    Xml.ElementTree(root).write(sidecar, encoding="utf-8")


def style_path(path: Path) -> Path:
    """Return the name under which QGIS looks for the style of a raster."""
    return path.with_suffix(".qml")


def style_of(classes: Sequence[ClassRecord]) -> bytes:
    """Return QGIS's style of a class map, as XML: a colour and a name for each number."""
    root = Xml.Element("qgis", version="3.22", styleCategories="Symbology")
    pipe = Xml.SubElement(root, "pipe")
    renderer = Xml.SubElement(pipe, "rasterrenderer", type="paletted", band="1", opacity="1", alphaBand="-1")
    palette = Xml.SubElement(renderer, "colorPalette")
    for number, one in enumerate(classes):
        colour = in_hex(one.colour)
        Xml.SubElement(palette, "paletteEntry", value=str(number), label=one.name, color=colour, alpha="255")
    return Xml.tostring(root, encoding="utf-8", xml_declaration=True)
