"""Arrays with x and y as rasters: variables of Zarr stores and netCDF files, and the program's xarray.DataArrays, whose
windows xarray reads lazily."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiledseg.errors import RasterError
from tiledseg.geometry.box import Box
from tiledseg.raster.array_place import check_dims, class_names_of, nodata_of, placed
from tiledseg.raster.gdal_reader import MOST_BANDS, MOST_PIXELS, as_stored, valid_pixels
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.mirrored_reader import RasterReader, memory_bytes, reading


class ArrayReader(RasterReader):
    """One array. See `reader.open_raster` for the arguments and errors. `close_store` closes what it is read from, and
    `forget` what was kept of it."""

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
        self._close_store, self._forget, self._closed = close_store, forget, False
        with reading(f"open {path}"):
            array_CHW = check_dims(path, array)
            _check_sizes(path, array_CHW)
            numbers = _band_numbers(path, len(array_CHW), bands)
            if bands is not None:
                array_CHW = array_CHW.isel({array_CHW.dims[0]: [number - 1 for number in numbers]})
            self._pixels_CHW, dtype = array_CHW.variable, np.dtype(array_CHW.dtype)
            if dtype.kind not in "iuf":
                raise RasterError(f"{path} holds {dtype} pixels; integers or real floating-point numbers are needed")
            value = nodata_of(array) if nodata is None else nodata
            if nodata is not None and dtype.kind in "iu" and as_stored(nodata, dtype) is None:
                raise RasterError(f"data.nodata is {nodata}, which {dtype} pixels of {path} cannot hold; give another")
            crs, transform, notes = placed(path, array, array_CHW)
            self.info = RasterInfo(
                path=path,
                height=array_CHW.shape[1],
                width=array_CHW.shape[2],
                bands=len(numbers),
                dtype=dtype.name,
                crs=crs,
                transform=transform,
                nodata=value,
                has_mask=as_stored(value, dtype) is not None or dtype.kind == "f",
                band_numbers=numbers,
                driver=driver,
                files=files,
                notes=notes,
                class_names=class_names_of(array) if len(numbers) == 1 else (),
            )

    def _read_inside(self, box: Box) -> tuple[NDArray, NDArray[np.bool_]]:
        if self._closed:
            raise RasterError(f"{self.info.path} is read after its reader was closed; open it again")
        rows, cols = box.slices
        # Ranks and prefetch threads are the parallelism, and dask's own threads do not outlive a fork.
        window_CHW = self._pixels_CHW[:, rows, cols].compute(scheduler="synchronous")
        pixels_CHW = np.asarray(window_CHW.values, self.info.dtype)
        if not self.info.has_mask:
            return pixels_CHW, np.ones(box.shape, np.bool_)
        return pixels_CHW, valid_pixels(pixels_CHW, (self.info.nodata,) * self.info.bands)

    def release(self) -> None:
        """Forget the chunks that were read: the next read asks the store anew."""
        self._forget()

    def close(self) -> None:
        """Close the store; reading afterwards raises RasterError."""
        self._closed = True
        self._forget()
        self._close_store()


def _band_numbers(path: str, count: int, bands: Sequence[int] | None) -> tuple[int, ...]:
    numbers = tuple(range(1, count + 1)) if bands is None else tuple(bands)
    if len(numbers) > MOST_BANDS:
        raise RasterError(f"{path} has {count} bands, of at most {MOST_BANDS}; select bands with data.bands")
    if not numbers or min(numbers) < 1 or max(numbers) > count or len(set(numbers)) < len(numbers):
        raise RasterError(f"data.bands is {list(numbers)}, but {path} has bands 1 to {count}; give some of these, once")
    return numbers


def _check_sizes(path: str, array_CHW: Any) -> None:
    """Raise RasterError for a size that no raster has, and for chunks that no memory holds."""
    count, height, width = array_CHW.shape
    if height * width > MOST_PIXELS or not array_CHW.size:
        raise RasterError(f"{path} is {height} x {width} px of {count} bands; give 1 to {MOST_PIXELS} px")
    sides = array_CHW.encoding.get("preferred_chunks") or {}
    needed = np.prod([float(side) for side in sides.values()]) * array_CHW.dtype.itemsize
    if needed > memory_bytes():
        raise RasterError(f"{path} has chunks that take {needed / 2**30:.3g} GiB; write it anew in smaller chunks")
