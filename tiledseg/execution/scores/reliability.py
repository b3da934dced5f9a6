"""The reliability of probabilities: of the pixels mapped with a confidence of about 0.8, are 0.8 right?

A pixel's confidence is the probability of the class that it is mapped as. Confidences are counted in bins, and summed
as whole numbers of 2^-24: counts of tiles and ranks add up exactly, so figures do not depend on how a raster was cut.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

BINS = 20
_UNITS = 1 << 24
_CHUNK = 1 << 22
"""Pixels counted at once: bounds the copies, and keeps the sums of `bincount`, float64, whole numbers below 2^53."""


def empty_counts(classes: int) -> NDArray[np.int64]:
    """Return the counts of no pixels: (3, classes, BINS).

    A class mapped and a bin of confidence have three counts: the pixels, those of them that are right, and the sum of
    their confidences in units of 2^-24.
    """
    return np.zeros((3, classes, BINS), np.int64)


def reliability_counts(
    confidence_P: NDArray[np.floating], mapped_P: NDArray[np.integer], right_P: NDArray[np.bool_], classes: int
) -> NDArray[np.int64]:
    """Return the counts (as `empty_counts`) of valid pixels: their confidence, the class they are mapped as, and
    whether that is right. A confidence of exactly a bin's edge is in the higher bin, 1 in the last one; one that is no
    number, of a network that gives none, counts as 0."""
    counts = empty_counts(classes)
    for part in _chunks(confidence_P.size):
        confidence, right = np.nan_to_num(confidence_P[part].astype(np.float64)), right_P[part]
        bins = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
        places = mapped_P[part].astype(np.int64) * BINS + bins
        for k, weights in enumerate((None, right, np.rint(confidence * _UNITS))):
            found = np.bincount(places, weights, minlength=classes * BINS)
            counts[k] += found.astype(np.int64).reshape(classes, BINS)
    return counts


def _chunks(size: int) -> Iterator[slice]:
    return (slice(start, start + _CHUNK) for start in range(0, size, _CHUNK))


def calibration_error(counts: NDArray[np.int64]) -> float | None:
    """Return the expected calibration error (Guo et al.

    2017): |share that is right - mean confidence| of each bin, of all classes together, weighted by its pixels; None
    without a pixel.
    """
    pixels, right, confidence = counts.sum(axis=1)
    if not pixels.any():
        return None
    return float(np.abs(right - confidence / _UNITS).sum() / pixels.sum())


def reliability_json(counts: NDArray[np.int64]) -> dict[str, object]:
    """Return plain values: for each class that pixels are mapped as, and each bin, the pixels, those right, and the sum
    of their confidences; and the calibration error."""
    pixels, right, confidence = counts
    return {
        "bins": BINS,
        "pixels": pixels.tolist(),
        "right": right.tolist(),
        "confidence": (confidence / _UNITS).tolist(),
        "calibration_error": calibration_error(counts),
    }
