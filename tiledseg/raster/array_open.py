"""Arrays with x and y as rasters: variables of Zarr stores and netCDF files, and the program's xarray.DataArrays, whose
windows xarray reads lazily. The one place where a store or a netCDF file is opened: by xarray, with zarr-python and
h5netcdf."""

from __future__ import annotations

import math
import os
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import lru_cache
from typing import Any

import numpy as np
from affine import Affine
from numpy.typing import NDArray

from tiledseg.errors import RasterError, installed, require
from tiledseg.geometry.box import Box
from tiledseg.raster.array_names import NETCDF, TILES, ArrayName
from tiledseg.raster.array_place import check_dims, class_names_of, dims_of, nodata_of, placed, time_of
from tiledseg.raster.composed import VALID, Composed, open_composed, stacked_reader
from tiledseg.raster.gdal_open import CACHE_BYTES
from tiledseg.raster.gdal_reader import check_size, choose_bands
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.mirrored_reader import RasterReader, as_stored, reading
from tiledseg.raster.remote import is_remote
from tiledseg.system.files import irregular_kind

_CLASSIC = b"CDF"


class ArrayReader(RasterReader):
    """One array, whose pixels are valid by the rules of GDAL's rasters. See `reader.open_raster` for the arguments and
    errors. `close_store` closes its store, and `forget` drops what was kept of it."""

    def __init__(
        self,
        path: str,
        array: Any,
        bands: Sequence[int] | None = None,
        nodata: float | None = None,
        driver: str = "DataArray",
        files: tuple[str, ...] = (),
        close_store: Callable[[], object] = lambda: None,
        forget: Callable[[], object] = lambda: None,
    ) -> None:
        self._close_store, self._forget = close_store, forget
        with reading(f"open {path}"):
            array_CHW = check_dims(path, array)
            crs, transform, notes = placed(path, array, array_CHW)
            count, height, width = array_CHW.shape
            dtype, fill = array_CHW.dtype, nodata_of(path, array) if nodata is None else nodata
            if dtype.kind == "i" and str(array.attrs.get("_Unsigned")).lower() == "true":  # as netCDF 3 holds them
                fill = fill if fill is None or nodata is not None else fill % 256**dtype.itemsize
                dtype = np.dtype(f"u{dtype.itemsize}")
            sides = array_CHW.encoding.get("preferred_chunks") or {}
            rows, cols = (int(sides.get(dim, 1)) for dim in array_CHW.dims[1:])
            check_size(path, (height, width), (rows, cols), dtype.str, transform or Affine.identity())
            numbers, dtype, self.nodata = choose_bands(path, (dtype.str,) * count, (fill,) * count, bands, nodata)
            if bands is not None:
                array_CHW = array_CHW.isel({array_CHW.dims[0]: [number - 1 for number in numbers]})
            self._pixels_CHW = array_CHW.variable
            self.info = RasterInfo(
                path=path,
                height=height,
                width=width,
                bands=len(numbers),
                dtype=dtype,
                crs=crs,
                transform=transform,
                nodata=self.nodata[0],
                block_shape=(rows, cols),
                has_mask=dtype.startswith("float") or as_stored(self.nodata[0], np.dtype(dtype)) is not None,
                band_numbers=numbers,
                driver=driver,
                files=files,
                notes=notes,
                class_names=class_names_of(array) if len(numbers) == 1 else (),
                **_cut(array.attrs.get(TILES), bands is None),
            )

    def _read_inside(self, box: Box) -> tuple[NDArray, NDArray[np.bool_]]:
        rows, cols = box.slices
        pixels_CHW = np.asarray(
            self._pixels_CHW[:, rows, cols].compute(scheduler="synchronous").values, self.info.dtype
        )
        return pixels_CHW, np.ones(box.shape, np.bool_)

    def release(self) -> None:
        """Forget the chunks that were read: the next read asks the store anew."""
        self._forget()

    def close(self) -> None:
        """Close the store, which can then no longer be read."""
        self._forget()
        self._close_store()


def _cut(words: Any, whole: bool) -> dict[str, Any]:
    """Return the fields of an info that the attribute of a cut raster holds; those of its times, if it is `whole`."""
    if not isinstance(words, dict):
        return {}
    palette = tuple((int(index), tuple(map(int, colour))) for index, colour in words.get("palette") or ())
    times = int(words.get("times", 1)) if whole else 1
    return {"times": times, "palette": palette or None, "holds_classes": bool(words.get("holds_classes"))}


def open_array(path: str, array: Any, bands: Sequence[int] | None, nodata: float | None, *about: Any) -> RasterReader:
    """Return the reader of an array; one with times and bands is read as rasters of several times are."""
    if array.chunks is not None and array.size > 0 and hasattr(array.data, "dask"):
        chunks, forget = _computed_once(path, array.data)
        array, about = array.copy(data=chunks), (*about, forget, forget)
    dim = time_of(array)
    if dim is None:
        return ArrayReader(path, array, bands, nodata, *about)
    parts = [ArrayReader(path, array.isel({dim: at}), bands, nodata, *about) for at in range(array.sizes[dim])]
    numbers = [number for part in parts for number in part.info.band_numbers]
    return stacked_reader(path, parts, numbers, range(len(numbers)), len(parts))


def _computed_once(path: str, array: Any) -> tuple[Any, Callable[[], object]]:
    """Return an array of dask that computes each chunk once, and what forgets them. It keeps the chunks used last, up
    to CACHE_BYTES and at least one."""
    from dask.array import map_blocks

    largest = math.prod(max(sizes) for sizes in array.chunks) * array.dtype.itemsize
    locks: defaultdict[tuple[int, ...], threading.Lock] = defaultdict(threading.Lock)

    @lru_cache(max(1, CACHE_BYTES // largest))
    def compute(block: tuple[int, ...]) -> NDArray:
        sides = [(sum(sizes[:at]), sizes[at]) for sizes, at in zip(array.chunks, block, strict=True)]
        chunk = array[tuple(slice(start, start + side) for start, side in sides)]  # `.blocks` looks at all
        # Ranks and prefetch threads are the parallelism, and dask's own threads do not outlive a fork.
        pixels = np.asarray(chunk.compute(scheduler="synchronous")).view()
        if pixels.shape != chunk.shape:
            raise RasterError(f"{path} has chunks of other sizes than it says; mend what makes them")
        pixels.flags.writeable = False  # windows are parts of it
        return pixels

    def take(block_id: tuple[int, ...]) -> NDArray:
        with locks[block_id]:
            return compute(block_id)

    like = {"chunks": array.chunks, "dtype": array.dtype, "meta": array._meta}
    return map_blocks(take, name=f"computed-once-{uuid.uuid4().hex}", **like), compute.cache_clear


def open_named(path: str, name: ArrayName, bands: Sequence[int] | None, nodata: float | None) -> RasterReader:
    """Return the reader of a variable of a store; where `tiledseg tile` has cut it, with its mask."""
    remote = is_remote(name.store)
    if not remote and not os.path.exists(name.store):
        raise RasterError(f"{name.store} does not exist; give the path or URL of a Zarr store or netCDF file")
    require(path, "zarr", "xarray", "zarr", "h5netcdf")
    import h5py
    import xarray

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
        how |= (
            {"driver_kwds": {"rdcc_nbytes": CACHE_BYTES // 4, "rdcc_nslots": 100_003}} if engine == "h5netcdf" else {}
        )
        dataset = xarray.open_dataset(place, engine=engine, chunks=None, **how)
        held, above = ExitStack(), group
        held.callback(dataset.close)
        while above:  # a group has the coordinates of those that it is in
            above = above.rpartition("/")[0]
            with xarray.open_dataset(place, engine=engine, chunks=None, **how | {"group": above or None}) as outer:
                for at, one in outer.variables.items():
                    sizes = {dim: dataset.sizes.get(dim) for dim in {at} & {*one.dims}}
                    if at not in dataset.variables and one.sizes == sizes:
                        dataset = dataset.assign_coords({at: one.load() if one.ndim else ((), 0, one.attrs)})
    try:
        array = _variable(path, name, dataset, group, variable)
        if engine == "h5netcdf":  # it opens a variable for each read; HDF5 keeps chunks of one that is open
            held.callback(held.enter_context(h5py.File(place, "r"))[f"{group}/{array.name}"].id.close)
        if store is not None:
            fill = array.encoding.get("fill_value", array.attrs.get("_FillValue"))
            nothing = nodata_of(path, array) if nodata is None else nodata
            number = fill is not None and np.dtype(type(fill)).kind in "iuf"
            store.lacks = number and (bool(fill != fill) or nothing == float(fill))  # NaN is not NaN
        about = ("Zarr" if store else "netCDF", () if remote else (name.store,), held.close)
        reader = open_array(path, array, bands, nodata, *about, *([store.forget] if store else []))
        masked = TILES in array.attrs and f"{array.name}_valid" in dataset.variables
    except BaseException:
        held.close()
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
    if place.lower().endswith(NETCDF) or not installed("zarr"):
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
