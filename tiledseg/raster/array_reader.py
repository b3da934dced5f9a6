"""Arrays with x and y as rasters: variables of Zarr stores and netCDF files, and the program's xarray.DataArrays, whose
windows xarray reads lazily."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from affine import Affine
from numpy.typing import NDArray

from tiledseg.errors import RasterError
from tiledseg.geometry.box import Box
from tiledseg.raster.array_names import TILES
from tiledseg.raster.array_place import check_dims, class_names_of, nodata_of, placed
from tiledseg.raster.gdal_reader import GdalReader, as_stored, select
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.mirrored_reader import reading


class ArrayReader(GdalReader):
    """One array, whose pixels are valid by the rules of GDAL's rasters. See `reader.open_raster` for the arguments and
    errors. `close_store` closes what it is read from, and `forget` what was kept of it."""

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
            crs, transform, notes = placed(path, array, array_CHW)
            count, height, width = array_CHW.shape
            sides = array_CHW.encoding.get("preferred_chunks") or {}
            about = SimpleNamespace(  # in rasterio's words
                count=count,
                height=height,
                width=width,
                dtypes=(array_CHW.dtype.str,) * count,
                nodatavals=(nodata_of(array),) * count,
                colorinterp=(None,) * count,
                block_shapes=[tuple(int(sides.get(dim, 1)) for dim in array_CHW.dims[1:])] * count,
                transform=transform or Affine.identity(),
            )
            numbers, dtype, self.nodata = select(path, about, bands, nodata)
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
                block_shape=about.block_shapes[0],
                has_mask=dtype.startswith("float") or as_stored(self.nodata[0], np.dtype(dtype)) is not None,
                band_numbers=numbers,
                driver=driver,
                files=files,
                notes=notes,
                class_names=class_names_of(array) if len(numbers) == 1 else (),
                **_cut(array.attrs.get(TILES), bands is None),
            )

    def read_masks(self, box: Box) -> tuple[NDArray, list[NDArray]]:
        """Return pixels (C, H, W), and no masks."""
        if self._closed:
            raise RasterError(f"{self.info.path} is read after its reader was closed; open it again")
        rows, cols = box.slices
        # Ranks and prefetch threads are the parallelism, and dask's own threads do not outlive a fork.
        window_CHW = self._pixels_CHW[:, rows, cols].compute(scheduler="synchronous")
        return np.asarray(window_CHW.values, self.info.dtype), []

    def release(self) -> None:
        """Forget the chunks that were read: the next read asks the store anew."""
        self._forget()

    def close(self) -> None:
        """Close the store; reading afterwards raises RasterError."""
        self._closed = True
        self._forget()
        self._close_store()


def _cut(words: Any, whole: bool) -> dict[str, Any]:
    """Return the fields of an info that the attribute of a cut raster holds; those of its times, if it is `whole`."""
    if not isinstance(words, dict):
        return {}
    palette = tuple((int(index), tuple(map(int, colour))) for index, colour in words.get("palette") or ())
    times = int(words.get("times", 1)) if whole else 1
    return {"times": times, "palette": palette or None, "holds_classes": bool(words.get("holds_classes"))}
