"""The network's input of a raster's values: normalised, and 0 where a pixel is not valid."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tiledseg.errors import RasterError
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.statistics import Normalization


class Normalizer:
    """(pixels - mean) / std of each band, 0 at invalid pixels, as one and the same operation for every tile.

    Computed in `dtype`; in float64, then rounded to `dtype`, where the raster's own dtype has more than float32's
    24 bits.
    """

    def __init__(self, normalization: Normalization, source: DTypeLike, dtype: DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        wide = np.dtype(source).itemsize > 2 and np.dtype(source) != np.float32
        self._working = np.dtype(np.float64) if wide else self._dtype
        self._mean_C11 = np.array(normalization.mean, self._working)[:, None, None]
        self._std_C11 = np.array(normalization.std, self._working)[:, None, None]

    def __call__(
        self,
        pixels_CHW: NDArray,
        valid_HW: NDArray[np.bool_],
        origin: tuple[int, int] = (0, 0),
        info: RasterInfo | None = None,
    ) -> NDArray:
        """Raise RasterError, naming band and place, where a valid pixel becomes infinite. `origin` (row, col) and
        `info` are for its words only."""
        overflows: list[str] = []
        x_CHW = pixels_CHW.astype(self._working)
        with np.errstate(over="call", invalid="ignore", call=lambda kind, flag: overflows.append(kind)):
            x_CHW -= self._mean_C11
            x_CHW /= self._std_C11
            if not valid_HW.all():
                x_CHW[:, ~valid_HW] = 0  # nodata values such as -3e38 too
            x_CHW = x_CHW.astype(self._dtype, copy=False)
        if overflows and not np.isfinite(x_CHW).all():
            band, row, col = (int(at) for at in np.argwhere(~np.isfinite(x_CHW))[0])
            name = (
                f"band {info.band_numbers[band]} of {info.path}" if info and info.band_numbers else f"band {band + 1}"
            )
            raise RasterError(
                f"{name} at (row {origin[0] + row}, col {origin[1] + col}) is {pixels_CHW[band, row, col]}, which "
                f"{self._dtype} cannot hold once normalised; mark it as data.nodata, or scale the band"
            )
        return x_CHW
