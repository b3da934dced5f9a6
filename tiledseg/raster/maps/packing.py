"""A finished raster as people open it: compressed, and with overviews, from the plain file that the ranks have written.

Pixels can be put in place by any rank only in a file that is not compressed (`writer`). So one rank packs that file
once it is whole, by GDAL's own drivers, under a further name that is not the final one.

`cog`: a Cloud-Optimized GeoTIFF, with overviews. `gtiff`: a tiled GeoTIFF without. Either is read by whatever reads a
GeoTIFF.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
import rasterio.shutil
from rasterio.errors import RasterioError

from tiledseg.config.map_formats import BLOCK, Packing, block_bytes
from tiledseg.errors import WriteError
from tiledseg.system.writing import flush, write_error, writing

_CACHE_BYTES = 256 << 20
_SHARES_LEVEL = 1
"""Of compression: higher ones take several times the time, and a tenth of the bytes of shares at most."""

_LEVEL_NAMES = {"deflate": "zlevel", "zstd": "zstd_level"}
_LOOK_SECONDS = 0.5


def packed_name(temporary: Path) -> Path:
    """Where the plain file `temporary` is packed into, until that is whole."""
    return temporary.with_name(f"{temporary.name}.packed")


def packing_names(temporary: Path) -> tuple[Path, ...]:
    """All that packing writes: the file, what GDAL keeps beside it, and its overviews while they are made."""
    name = packed_name(temporary)
    return name, *(name.with_name(name.name + end) for end in (".aux.xml", ".ovr.tmp", ".msk.ovr.tmp"))


def remove_packed(temporary: Path) -> None:
    """Away with everything that packing has left."""
    for name in packing_names(temporary):
        with contextlib.suppress(OSError):
            name.unlink(missing_ok=True)


def pack(plain: Path, packing: Packing, path: Path, threads: int = 1, beat: Callable[[], None] = lambda: None) -> None:
    """Pack the whole file `plain` into `packed_name(plain)`, flushed to the disk, by `threads` threads.

    `path` is the final name, for messages. `beat` is called while the files grow. The bytes do not depend on the
    threads. Raises WriteError, with nothing left, where that cannot be written or does not lie where `plain` does.
    """
    remove_packed(plain)
    try:
        _in_thread(lambda: _copy(plain, packing, threads), lambda: _size(plain), beat)
        _check_same(plain, packed_name(plain), path)
        with writing(path):
            flush(packed_name(plain))
    except BaseException as error:
        remove_packed(plain)
        if isinstance(error, RasterioError):
            raise write_error(path, error) from error
        raise


def _copy(plain: Path, packing: Packing, threads: int) -> None:
    with (
        rasterio.Env(**_settings(threads)),
        rasterio.open(plain, driver="GTiff") as dataset,
    ):
        rasterio.shutil.copy(dataset, packed_name(plain), **_options(dataset, packing, threads))


def _settings(threads: int) -> dict[str, Any]:
    """GDAL's. It maps the plain file, which no job shortens (`claim`), into memory, in place of copying its blocks. It
    would compress overviews twice: in the file in which it makes them, and in the one that is kept."""
    common = {"GDAL_NUM_THREADS": str(threads), "GDAL_CACHEMAX": _CACHE_BYTES, "GTIFF_DIRECT_IO": "NO"}
    return {**common, "GTIFF_VIRTUAL_MEM_IO": "YES", "COG_TMP_COMPRESSION": "NONE"}


def _options(dataset: Any, packing: Packing, threads: int) -> dict[str, Any]:
    """What GDAL's drivers take, each by its own names."""
    dtype = np.dtype(dataset.dtypes[0])
    blocks = block_bytes(dataset.height, dataset.width, dataset.count * dtype.itemsize)
    found: dict[str, Any] = {
        "compress": packing.codec,
        "num_threads": threads,
        "bigtiff": "yes" if packing.is_big(blocks) else "no",
    }
    cog = packing.format == "cog"
    if cog:
        found |= {"driver": "COG", "blocksize": BLOCK, "overview_resampling": "average" if packing.average else "mode"}
    else:
        found |= {"driver": "GTiff", "tiled": "yes", "blockxsize": BLOCK, "blockysize": BLOCK, "interleave": "band"}
    if packing.average and packing.codec in _LEVEL_NAMES:
        found["level" if cog else _LEVEL_NAMES[packing.codec]] = _SHARES_LEVEL
    if dtype.kind == "f" and packing.codec != "none":
        found["predictor"] = "floating_point" if cog else "3"
    return found


def _check_same(plain: Path, packed: Path, path: Path) -> None:
    """GDAL says nothing of what a driver cannot keep."""
    with rasterio.open(plain, driver="GTiff") as ours, rasterio.open(packed, driver="GTiff") as theirs:
        for what, of in _KEPT.items():
            if of(ours) != of(theirs):
                raise WriteError(
                    f"cannot write {path}: GDAL's driver has not kept the {what}; take --format gtiff --compress none"
                )


def _points(dataset: Any) -> tuple[Any, ...]:
    points, crs = dataset.gcps
    return crs, *((p.row, p.col, p.x, p.y, p.z) for p in points)


_KEPT: dict[str, Callable[[Any], Any]] = {
    "size": lambda d: (d.count, d.height, d.width),
    "type": lambda d: d.dtypes,
    "CRS": lambda d: d.crs,
    "transform": lambda d: tuple(d.transform),
    "nodata value": lambda d: str(d.nodata),  # NaN is not NaN
    "colours": lambda d: _colours(d),
    "names of the classes": lambda d: {key: name for key, name in d.tags(1).items() if key.startswith("CLASS_")},
    "names of the bands": lambda d: d.descriptions,
    "scales": lambda d: (d.scales, d.offsets),
    "ground control points": _points,
    "rational polynomial coefficients": lambda d: d.rpcs and d.rpcs.to_dict(),
}


def _colours(dataset: Any) -> Any:
    try:
        return dataset.colormap(1)
    except ValueError:  # there are none
        return None


def _size(plain: Path) -> int:
    """Bytes on the disk of all that packing writes."""
    found = 0
    for name in packing_names(plain):
        with contextlib.suppress(OSError):
            found += name.stat().st_size
    return found


def _in_thread(work: Callable[[], None], size: Callable[[], int], beat: Callable[[], None]) -> None:
    """`work` in a thread of its own, to its end, with a `beat` whenever `size` has changed: GDAL says nothing on the
    way, and a job whose ranks all stand still is ended (`comm.watching.watch`)."""
    faults: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            faults.append(error)

    thread = threading.Thread(target=run, name="packing")
    thread.start()
    before = size()
    try:
        while thread.is_alive():
            thread.join(_LOOK_SECONDS)
            now = size()
            if now != before:
                before = now
                beat()
    finally:
        thread.join()  # a signal ends the wait, not GDAL
    if faults:
        raise faults[0]
