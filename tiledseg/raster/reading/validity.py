"""Which pixels count: the one rule by which masks, alpha, nodata values and NaN make a pixel invalid."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def valid_pixels(
    pixels_CHW: NDArray, nodata: Sequence[float | None], masks: Sequence[NDArray] = ()
) -> NDArray[np.bool_]:
    """Validity (H, W) of pixels (C, H, W), with each band's nodata value (None: none) and further masks (0: invalid).

    A pixel is invalid
    - where a mask (a per-dataset mask, an alpha band) is 0;
    - where any band is NaN or infinite;
    - signed and floating-point rasters: where any band holds its nodata value, which is then no measurement;
    - unsigned rasters: where every band holds its nodata value (GDAL's rule for a whole dataset), since 0 or 255 in one
      band alone is a legal dark or bright pixel.
    """
    valid_HW = np.ones(pixels_CHW.shape[1:], np.bool_)
    for mask_HW in masks:
        valid_HW &= mask_HW != 0
    if pixels_CHW.dtype.kind == "f":
        for band_HW in pixels_CHW:
            valid_HW &= np.isfinite(band_HW)
    sentinels = [as_stored(value, pixels_CHW.dtype) for value in nodata]
    if pixels_CHW.dtype.kind != "u":
        for band_HW, sentinel in zip(pixels_CHW, sentinels, strict=True):
            if sentinel is not None:
                valid_HW &= band_HW != sentinel
    elif None not in sentinels:
        held_HW = _holds_everywhere(pixels_CHW, sentinels)
        if held_HW.any():
            valid_HW &= ~held_HW
    return valid_HW


def _holds_everywhere(pixels_CHW: NDArray, sentinels: Sequence[np.generic | None]) -> NDArray[np.bool_]:
    """Where every band holds its sentinel. Most windows are done after the first band."""
    held_HW = pixels_CHW[0] == sentinels[0]
    for band_HW, sentinel in zip(pixels_CHW[1:], sentinels[1:], strict=True):
        if not held_HW.any():
            break
        held_HW &= band_HW == sentinel
    return held_HW


def as_stored(value: float | None, dtype: np.dtype) -> np.generic | None:
    """A nodata value as the raster's dtype holds it; None where there is none, or the dtype cannot hold it."""
    if value is None:
        return None
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            return dtype.type(value)
    limits = np.iinfo(dtype)
    if not limits.min <= value <= limits.max or value != int(value):  # NaN and infinite fail the first
        return None
    return dtype.type(int(value))
