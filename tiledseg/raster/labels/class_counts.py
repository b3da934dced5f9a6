"""The pixels of each class in the training rasters, and the weights that even them out."""

from __future__ import annotations

from fractions import Fraction
from statistics import median

import numpy as np
from numpy.typing import NDArray


def count_classes(classes_HW: NDArray[np.uint8], valid_HW: NDArray[np.bool_], count: int) -> NDArray[np.int64]:
    """Count the pixels of each of `count` classes where `valid_HW` is true; numbers from `count` on are no class."""
    return np.bincount(classes_HW[valid_HW], minlength=256)[:count].astype(np.int64)


def median_frequency_weights(counts: NDArray[np.int64]) -> tuple[float, ...]:
    """Return the weight of each class: the median of all classes' frequencies over its own. `counts`: pixels by image
    and class, int64.

    A class's frequency is its number of pixels over that of all valid pixels of the images in which it appears
    (Eigen and Fergus, ICCV 2015, section 5; SegNet, section 3.1; MATLAB's PixelCount / ImagePixelCount). A class
    that no image has is left out of the median; its weight is 1. Exact to the last rounding, whatever the order.
    """
    frequencies = [_frequency(counts, k) for k in range(counts.shape[1])]
    present = [frequency for frequency in frequencies if frequency]
    middle = median(present) if present else Fraction(1)
    return tuple(float(middle / frequency) if frequency else 1.0 for frequency in frequencies)


def _frequency(counts: NDArray[np.int64], k: int) -> Fraction:
    having = counts[counts[:, k] > 0]
    return Fraction(int(having[:, k].sum()), int(having.sum())) if len(having) else Fraction(0)
