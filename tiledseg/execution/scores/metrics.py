"""Confusion matrix and the scores read from it.

The matrix counts pixels in int64: rows are the truth, columns the prediction. Matrices of blocks, tiles or ranks
add up exactly, so scores do not depend on how a raster was cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiledseg.errors import LabelError

_CHUNK = 1 << 22
"""Pixels counted at once: bounds the int64 copies that bincount makes."""


def confusion_matrix(
    truth: NDArray[np.integer],
    prediction: NDArray[np.integer],
    classes: int,
    ignore_index: int | None = 255,
    valid: NDArray[np.bool_] | None = None,
) -> NDArray[np.int64]:
    """Count pairs of (truth, prediction) pairs, shape (classes, classes).

    `truth` and `prediction` are integer arrays of one shape. Pixels where either equals `ignore_index`, or where
    `valid` is False, are left out. Raises LabelError for any other value outside 0 ... classes - 1.
    """
    if truth.shape != prediction.shape:
        raise LabelError(f"truth has shape {truth.shape}, prediction {prediction.shape}; give arrays of one shape")
    flat_truth, flat_prediction = truth.reshape(-1), prediction.reshape(-1)
    flat_valid = None if valid is None else valid.reshape(-1)
    matrix = np.zeros((classes, classes), np.int64)
    for start in range(0, flat_truth.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        t, p = flat_truth[part], flat_prediction[part]
        keep = np.ones(t.shape, bool) if flat_valid is None else flat_valid[part].copy()
        if ignore_index is not None:
            keep &= (t != ignore_index) & (p != ignore_index)
        t, p = t[keep], p[keep]
        _check_range("truth", t, classes)
        _check_range("prediction", p, classes)
        pairs = t.astype(np.int64) * classes + p
        matrix += np.bincount(pairs, minlength=classes * classes).reshape(classes, classes)
    return matrix


def _check_range(what: str, values: NDArray[np.integer], classes: int) -> None:
    if values.size == 0:
        return
    for value in (int(values.min()), int(values.max())):
        if not 0 <= value < classes:
            raise LabelError(
                f"{what} holds class {value}, outside 0 to {classes - 1}; give the right number of classes"
            )


@dataclass(frozen=True)
class Scores:
    """Scores of a confusion matrix; one entry a class in every tuple.

    A class absent from both truth and prediction has no score: NaN, null in `to_json`, left out of the means.
    A class that is in one of them only scores 0. All scores of an empty matrix are NaN.
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
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        return {
            name: [_nullable(x) for x in value] if isinstance(value, list) else _nullable(value)
            for name, value in values.items()
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
    """Return part / whole: 0 where the whole is 0 in a present class, NaN in absent ones."""
    ratio = np.where(present, 0.0, math.nan)
    np.divide(part, whole, out=ratio, where=present & (whole > 0))
    return ratio


def _mean(values: NDArray[np.float64], present: NDArray[np.bool_]) -> float:
    return float(values[present].mean()) if present.any() else math.nan


def _nullable(value: float) -> float | None:
    return None if isinstance(value, float) and math.isnan(value) else value
