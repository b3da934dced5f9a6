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
    hits = [band_HW == s for band_HW, s in zip(pixels_CHW, sentinels, strict=True) if s is not None]
    if pixels_CHW.dtype.kind == "u":
        if len(hits) == len(pixels_CHW):
            valid_HW &= ~np.logical_and.reduce(hits)
    else:
        for hit_HW in hits:
            valid_HW &= ~hit_HW
    return valid_HW


def as_stored(value: float | None, dtype: np.dtype) -> np.generic | None:
    """A nodata value as the raster's dtype holds it; None where there is none, or the dtype cannot hold it."""
    if value is None:
        return None
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            return dtype.type(value)
    limits = np.iinfo(dtype)
    if value != value or value != int(value) or not limits.min <= value <= limits.max:
        return None
    return dtype.type(int(value))
