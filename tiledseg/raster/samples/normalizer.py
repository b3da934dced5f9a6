"""The network's input of a raster's values: normalised, 0 where a pixel is not valid, and changed by a draw.

On the host, by NumPy; `execution.input.stored_input` does the same on a device, to the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tiledseg.errors import RasterError
from tiledseg.geometry.box import Box
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.samples.photometry import Photometry
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
        self._narrow = None
        if np.dtype(source).kind in "iu" and np.dtype(source).itemsize <= 2:
            limits = np.iinfo(source)
            with np.errstate(over="ignore"):
                ends = (np.array([limits.min, limits.max], self._working) - self._mean_C11) / self._std_C11
            self._narrow = np.dtype(source) if np.isfinite(ends).all() else None

    @property
    def scale(self) -> tuple[NDArray, NDArray]:
        """Return mean and deviation of each band, (C, 1, 1), in the dtype of what it makes of narrow integers."""
        return self._mean_C11, self._std_C11

    def leaves_stored(self, pixels_CHW: NDArray) -> bool:
        """Return True if pixels go to the device as the raster stores them: integers of one or two bytes, which take
        fewer bytes than the input, and none of which becomes infinite. All others are normalised on the host."""
        return self._narrow is not None and pixels_CHW.dtype == self._narrow

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


class Rule(NamedTuple):
    """A function that makes the network's input of the stored pixels of `box` of a raster.

    `valid_HW`: the valid pixels; None: all are. `photometry`: how a draw changes values, where it does.
    """

    normalize: Normalizer
    valid_HW: NDArray[np.bool_] | None
    box: Box
    info: RasterInfo
    photometry: Photometry | None = None

    def __call__(self, pixels_CHW: NDArray) -> NDArray:
        """Return the input x_CHW. Raises RasterError as `Normalizer` does."""
        valid_HW = np.ones(pixels_CHW.shape[1:], np.bool_) if self.valid_HW is None else self.valid_HW
        x_CHW = self.normalize(pixels_CHW, valid_HW, (self.box.row.start, self.box.col.start), self.info)
        if self.photometry is not None:
            self.photometry.apply(x_CHW, valid_HW, self.box, self.info.shape)
        return x_CHW
