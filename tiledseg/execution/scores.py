"""The confusion matrix with its scores, and the reliability of probabilities.

The matrix counts pixels in int64: rows are the truth, columns the prediction. Matrices of blocks, tiles or ranks add up
exactly, so scores do not depend on how a raster was cut. So do the counts of confidences in bins, in units of 2^-24. A
pixel's confidence is the probability of its mapped class: of pixels with a confidence of about 0.8, 0.8 should be
right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiledseg.errors import LabelError

BINS = 20
_UNITS = 1 << 24
_CHUNK = 1 << 22
"""Pixels counted at once: bounds the copies, and keeps the float64 sums of `bincount` exact, below 2^53."""


def confusion_matrix(
    truth: NDArray[np.integer],
    prediction: NDArray[np.integer],
    classes: int,
    ignore_index: int = 255,
) -> NDArray[np.int64]:
    """Count the pixels of each pair (truth, prediction): a matrix of shape (classes, classes).

    `truth` and `prediction` are integer arrays of one shape. Pixels where either equals `ignore_index` are left
    out. Raises LabelError for any other value outside 0 ... classes - 1.
    """
    if truth.shape != prediction.shape:
        raise LabelError(f"truth has shape {truth.shape}, prediction {prediction.shape}; give arrays of one shape")
    flat_truth, flat_prediction = truth.reshape(-1), prediction.reshape(-1)
    matrix = np.zeros((classes, classes), np.int64)
    for part in _chunks(flat_truth.size):
        t, p = flat_truth[part], flat_prediction[part]
        keep = (t != ignore_index) & (p != ignore_index)
        t, p = t[keep], p[keep]
        for what, values in (("truth", t), ("prediction", p)):
            for value in (int(values.min()), int(values.max())) if values.size else ():
                if not 0 <= value < classes:
                    raise LabelError(
                        f"{what} holds class {value}, outside 0 to {classes - 1}; give the right number of classes"
                    )
        pairs = t.astype(np.int64) * classes + p
        matrix += np.bincount(pairs, minlength=classes * classes).reshape(classes, classes)
    return matrix


@dataclass(frozen=True)
class Scores:
    """Scores of a confusion matrix; tuples have an entry for each class.

    A class absent from both truth and prediction has no score: NaN, null in `to_json`, left out of the means. A class
    in only one of them scores 0. All scores of an empty matrix are NaN.
    """

    accuracy: float
    mean_iou: float
    mean_f1: float
    iou: tuple[float, ...]
    f1: tuple[float, ...]
    precision: tuple[float, ...]
    recall: tuple[float, ...]
    pixels: int

    def to_json(self) -> dict[str, Any]:
        """Return plain values for strict JSON: NaN becomes None."""
        return {
            name: [_nullable(x) for x in value] if isinstance(value, tuple) else _nullable(value)
            for name, value in vars(self).items()
        }


def scores(matrix: NDArray[np.int64]) -> Scores:
    """Return the scores of a confusion matrix (rows truth, columns prediction).

    With tp, fp and fn the true positive, false positive and false negative pixels of a class:
    IoU = tp / (tp + fp + fn), F1 = 2 tp / (2 tp + fp + fn), precision = tp / (tp + fp), recall = tp / (tp + fn).
    """
    hit = np.diag(matrix).astype(np.float64)
    of_truth, of_prediction = matrix.sum(axis=1), matrix.sum(axis=0)
    union = of_truth + of_prediction - hit
    present = union > 0
    iou = _ratio(hit, union, present)
    f1 = _ratio(2 * hit, of_truth + of_prediction, present)
    pixels = int(matrix.sum())
    return Scores(
        accuracy=float(hit.sum() / pixels) if pixels else math.nan,
        mean_iou=_mean(iou, present),
        mean_f1=_mean(f1, present),
        iou=tuple(iou.tolist()),
        f1=tuple(f1.tolist()),
        precision=tuple(_ratio(hit, of_prediction, present).tolist()),
        recall=tuple(_ratio(hit, of_truth, present).tolist()),
        pixels=pixels,
    )


def _ratio(part: NDArray, whole: NDArray, present: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return part / whole for each class: 0 if the whole is 0, NaN for absent classes."""
    ratio = np.where(present, 0.0, math.nan)
    np.divide(part, whole, out=ratio, where=present & (whole > 0))
    return ratio


def _mean(values: NDArray[np.float64], present: NDArray[np.bool_]) -> float:
    return float(values[present].mean()) if present.any() else math.nan


def _nullable(value: float) -> float | None:
    return None if isinstance(value, float) and math.isnan(value) else value


def empty_counts(classes: int) -> NDArray[np.int64]:
    """Return zero counts, of shape (3, classes, BINS): for each mapped class and bin of confidence the pixels, the
    right ones among them, and the sum of their confidences in units of 2^-24."""
    return np.zeros((3, classes, BINS), np.int64)


def reliability_counts(
    confidence_P: NDArray[np.floating], mapped_P: NDArray[np.integer], right_P: NDArray[np.bool_], classes: int
) -> NDArray[np.int64]:
    """Return the counts (as `empty_counts`) of valid pixels with their confidence, mapped class, and True if it is
    right. A confidence on a bin's edge is in the higher bin, 1 in the last one; NaN counts as 0."""
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
    """Return the expected calibration error (Guo et al., 2017): |share of right pixels - mean confidence| of each bin,
    all classes together, weighted by the bin's pixels. None without pixels."""
    pixels, right, confidence = counts.sum(axis=1)
    if not pixels.any():
        return None
    return float(np.abs(right - confidence / _UNITS).sum() / pixels.sum())


def reliability_json(counts: NDArray[np.int64]) -> dict[str, object]:
    """Return plain values: for each mapped class and bin the pixels, the right ones, and the sum of their confidences;
    and the calibration error."""
    pixels, right, confidence = counts
    return {
        "bins": BINS,
        "pixels": pixels.tolist(),
        "right": right.tolist(),
        "confidence": (confidence / _UNITS).tolist(),
        "calibration_error": calibration_error(counts),
    }
