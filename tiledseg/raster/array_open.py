"""The one place where a Zarr store or a netCDF file is opened: by xarray, with zarr-python and h5netcdf."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from tiledseg.errors import RasterError, install
from tiledseg.raster.array_names import NETCDF, TILES, ArrayName
from tiledseg.raster.array_place import dims_of, nodata_of
from tiledseg.raster.array_reader import ArrayReader
from tiledseg.raster.composed import VALID, Composed, open_composed
from tiledseg.raster.gdal_open import CACHE_BYTES
from tiledseg.raster.mirrored_reader import RasterReader, reading
from tiledseg.raster.remote import is_remote
from tiledseg.system.files import irregular_kind

_CLASSIC = b"CDF"


def open_named(path: str, name: ArrayName, bands: Sequence[int] | None, nodata: float | None) -> RasterReader:
    """Return the reader of a variable of a store; where `tiledseg tile` has cut it, with its mask."""
    remote = is_remote(name.store)
    if not remote and not os.path.exists(name.store):
        raise RasterError(f"{name.store} does not exist; give the path or URL of a Zarr store or netCDF file")
    try:
        import h5netcdf  # noqa: F401
        import xarray
        import zarr  # noqa: F401
    except ImportError:
        raise RasterError(f"{path} needs xarray, zarr and h5netcdf: {install('zarr')}") from None
    group, _, variable = name.variable.rpartition("/")
    how: dict[str, Any] = {"mask_and_scale": False, "decode_times": False, "decode_coords": "all", "cache": False}
    with reading(f"open {path}", "give a Zarr store or netCDF file, with one of its groups"):
        if name.store.lower().endswith(NETCDF):
            place, store, engine = name.store, None, _netcdf_engine(name.store)
        else:
            from tiledseg.raster.zarr_store import open_store

            place = store = open_store(name.store)
            engine = "zarr"
        how |= {"group": group} if group else {}
        how |= {"driver_kwds": {"rdcc_nbytes": CACHE_BYTES // 4}} if engine == "h5netcdf" else {}
        dataset = xarray.open_dataset(place, engine=engine, chunks=None, **how)
    try:
        array = _variable(path, name, dataset, group, variable)
        if store is not None:
            fill = array.encoding.get("fill_value", array.attrs.get("_FillValue"))
            nothing = nodata_of(array) if nodata is None else nodata
            number = fill is not None and np.dtype(type(fill)).kind in "iuf"
            store.lacks = number and (bool(fill != fill) or nothing == float(fill))  # NaN is not NaN
        about = ("Zarr" if store else "netCDF", () if remote else (name.store,), dataset.close)
        reader = ArrayReader(path, array, bands, nodata, *about, *([store.forget] if store else []))
        masked = TILES in array.attrs and f"{array.name}_valid" in dataset.variables
    except BaseException:
        dataset.close()
        raise
    if not masked:
        return reader
    image, mask = Composed(path, VALID, (path, f"{path}_valid")), ArrayName(name.store, f"{name.variable}_valid")
    return open_composed(image, bands, lambda at, *_: reader if at == path else open_named(at, mask, None, None))


def _variable(path: str, name: ArrayName, dataset: Any, group: str, variable: str) -> Any:
    """Return the variable that is named, or the only one with rows and columns."""
    images = sorted(str(each) for each in dataset.data_vars if dims_of(dataset[each]) is not None)
    prefix = f"{name.store}:/{group}/" if group else f"{name.store}:/"
    named = ", ".join(prefix + each for each in images[:8]) or "none has x and y"
    if variable and variable not in dataset.variables:
        raise RasterError(f"{name.store} has no variable {variable}; give one of: {named}")
    if not variable and TILES in dataset.attrs:
        raise RasterError(f"{name.store} is a tile store; name one of its rasters, such as {name.store}:/0/labels")
    if not variable and len(images) != 1:
        raise RasterError(f"{name.store} has {len(images)} variables with x and y; name one: {named}")
    return dataset[variable or images[0]]


def stored_tiles(place: str) -> list[tuple[str, str | None]]:
    """Return the names of the images, and of their labels, that `tiledseg tile` has put into a store; none for any
    other store."""
    if place.lower().endswith(NETCDF) or importlib.util.find_spec("zarr") is None:
        return []
    import zarr

    from tiledseg.raster.zarr_store import open_store

    try:
        words: Any = zarr.open_group(open_store(place), mode="r").attrs.get(TILES)
    except (ValueError, KeyError, OSError, TypeError):  # no group: an array, nothing, or damage, which opening tells
        return []
    if not isinstance(words, dict):
        return []

    with reading(f"open {place}", "cut it again with tiledseg tile"):
        images = [f"{place}:/{at}/images" for at in range(len(words["images"]))]
        labels: list[str | None] = [f"{place}:/{at}/labels" for at in range(len(words["labels"]))]
        return list(zip(images, labels or [None] * len(images), strict=True))


def _netcdf_engine(file: str) -> str:
    """Return xarray's reader of a netCDF file. Raises RasterError for one that names other files, or is at a URL."""
    if is_remote(file):
        raise RasterError(f"{file} is netCDF at a URL, where Zarr alone is read; copy it here, or write Zarr")
    kind = irregular_kind(file)
    if kind is not None:
        raise RasterError(f"{file} is {kind}; give a netCDF file")
    with open(file, "rb") as opened:
        if opened.read(len(_CLASSIC)) == _CLASSIC:
            return "scipy"
    import h5py

    with h5py.File(file, "r", locking="best-effort") as opened:
        away = opened.visititems_links(lambda at, link: at if isinstance(link, h5py.ExternalLink) else None)
        away = away or opened.visititems(
            lambda at, node: at if isinstance(node, h5py.Dataset) and (node.external or node.is_virtual) else None
        )
    if away:
        raise RasterError(f"{file} has {away} in another file, which it names; give a file that holds all of its data")
    return "h5netcdf"
