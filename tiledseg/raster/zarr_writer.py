"""Maps as Zarr 3 stores with GeoZarr's and CF's attributes: CRS, transform, names of dims, coordinates, classes.

Ranks have filled the plain GeoTIFF, whose blocks are the store's chunks. They then share the chunks: each is written by
one rank, whole. The store has a temporary name until it is whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
from rasterio.windows import Window

from tiledseg.config.map_formats import BLOCK
from tiledseg.errors import ConfigError, OutputError, install
from tiledseg.raster.array_place import flags
from tiledseg.system.outputs import check_ending

CLASSES, SHARES = "classes", "probabilities"
"""Names of the variables."""
_WHOLE = {"array.write_empty_chunks": True}  # a chunk that is not there is damage


def check_zarr(key: str, path: str | Path) -> None:
    """Raise ConfigError where zarr is not installed, OutputError for a name that is there, or has another ending."""
    try:
        import zarr  # noqa: F401
    except ImportError:
        raise ConfigError(f"--format zarr needs zarr: {install('zarr')}") from None
    if Path(path).exists():
        raise OutputError(f"{key} {path} is there; remove it, or choose another output")
    check_ending(key, str(path), ".zarr")


def begin_store(plain: Path, store: Path, compress: str, legend: Sequence[str]) -> None:
    """Make a store of the grid and the meaning of the file `plain`, without its chunks. On one rank."""
    import zarr
    from zarr.codecs import GzipCodec, ZstdCodec

    codecs = {"auto": [ZstdCodec()], "zstd": [ZstdCodec()], "deflate": [GzipCodec()], "none": None}
    with zarr.config.set(_WHOLE), rasterio.open(plain, driver="GTiff") as dataset:
        place: dict[str, Any] = {}
        transform, wkt = dataset.transform, dataset.crs.to_wkt() if dataset.crs else None
        mapping = {"crs_wkt": wkt, "spatial_ref": wkt} if wkt else {}
        if not transform.is_identity:
            place = {"spatial:transform": list(transform)[:6]} | ({"proj:wkt2": wkt} if wkt else {})
            mapping["GeoTransform"] = " ".join(map(repr, transform.to_gdal()))
        attributes = {"grid_mapping": "spatial_ref", "spatial:dimensions": ["y", "x"], **place}
        if dataset.dtypes[0] == "uint8":  # NaN never is a pixel's value, and need not be said
            attributes["_FillValue"] = int(dataset.nodata)
        if dataset.scales[0] != 1:
            attributes["scale_factor"] = dataset.scales[0]
        root = zarr.create_group(store, zarr_format=3, attributes={"Conventions": "CF-1.11"}, overwrite=True)
        shares = not legend
        root.create_array(
            SHARES if shares else CLASSES,
            shape=(dataset.count, *dataset.shape) if shares else dataset.shape,
            chunks=(1, BLOCK, BLOCK) if shares else (BLOCK, BLOCK),
            dtype=dataset.dtypes[0],
            dimension_names=("class", "y", "x") if shares else ("y", "x"),
            compressors=codecs[compress],
            fill_value=dataset.nodata,
            attributes=attributes | ({"class_names": list(dataset.descriptions)} if shares else flags(legend)),
        )
        sides = (("y", dataset.height, transform.f, transform.e), ("x", dataset.width, transform.c, transform.a))
        for name, count, start, step in sides if place and transform.is_rectilinear else ():
            degrees = {"y": "latitude", "x": "longitude"} if dataset.crs and dataset.crs.is_geographic else {}
            words = {"axis": name.upper(), "standard_name": degrees.get(name, f"projection_{name}_coordinate")}
            data = start + step * (np.arange(count) + 0.5)
            root.create_array(name, data=data, dimension_names=(name,), attributes=words)
        root.create_array("spatial_ref", data=np.array(0), attributes=mapping)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Zarr 3 does not name it yet; web servers list no folder
            zarr.consolidate_metadata(store, zarr_format=3)


def write_chunks(plain: Path, store: Path, rank: int, size: int, beat: Callable[[], None]) -> None:
    """Write this rank's chunks of a begun store: every `size`-th one."""
    import zarr

    with zarr.config.set(_WHOLE), rasterio.open(plain, driver="GTiff") as dataset:
        group = zarr.open_group(store, mode="r+", zarr_format=3, use_consolidated=False)
        array: Any = group[CLASSES if CLASSES in group else SHARES]
        rows, cols = (-(-side // BLOCK) for side in dataset.shape)
        for chunk in range(rank, dataset.count * rows * cols, size):
            band, row, col = np.unravel_index(chunk, (dataset.count, rows, cols))
            window = Window(col * BLOCK, row * BLOCK, BLOCK, BLOCK).intersection(Window(0, 0, *dataset.shape[::-1]))
            part = tuple(slice(start, stop) for start, stop in window.toranges())
            array[part if array.ndim == 2 else (int(band), *part)] = dataset.read(int(band) + 1, window=window)
            beat()
