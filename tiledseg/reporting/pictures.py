"""Pixels, labels and maps as pictures for people: red, green, blue, uint8 (H, W, 3)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tiledseg.raster.labels.classes import Colour

BLANK = (235, 235, 235)
"""Colour of pixels that do not count, or have no data."""
RIGHT = (250, 250, 250)
"""Colour of pixels that a map has right."""


def as_picture(pixels_CHW: NDArray, valid_HW: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """The first three bands, or grey of the first; each stretched from its 2nd to its 98th percentile unless uint8."""
    bands_CHW = pixels_CHW[:3] if len(pixels_CHW) >= 3 else pixels_CHW[[0, 0, 0]]
    if bands_CHW.dtype != np.uint8 and valid_HW.any():
        values = bands_CHW[:, valid_HW].astype(np.float64)
        low, high = (np.percentile(values, q, axis=1)[:, None, None] for q in (2, 98))
        bands_CHW = np.clip((bands_CHW - low) / np.maximum(high - low, 1e-12), 0, 1) * 255
    picture = np.moveaxis(np.nan_to_num(bands_CHW), 0, -1).astype(np.uint8)
    picture[~valid_HW] = BLANK
    return picture


def class_picture(classes_HW: NDArray[np.uint8], colours: Sequence[Colour]) -> NDArray[np.uint8]:
    """Class k in `colours`[k]; blank where there is no such class."""
    palette = np.full((256, 3), BLANK, np.uint8)
    palette[: len(colours)] = colours
    return palette[classes_HW]


def error_picture(
    classes_HW: NDArray[np.uint8], other_HW: NDArray[np.uint8], colours: Sequence[Colour], ignore_index: int
) -> NDArray[np.uint8]:
    """Pixels whose class is not that of `other_HW`, in its colour; blank where a pixel does not count."""
    picture = np.where(
        (classes_HW == other_HW)[..., None], np.array(RIGHT, np.uint8), class_picture(classes_HW, colours)
    )
    picture[(classes_HW == ignore_index) | (other_HW == ignore_index)] = BLANK
    return picture
