"""Reliability: against a hand count and torchmetrics; counts of parts add up exactly."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torchmetrics.functional.classification import multiclass_calibration_error

from tiledseg.execution.scores import (
    BINS,
    calibration_error,
    empty_counts,
    reliability_counts,
    reliability_json,
)


def drawn(pixels: int = 5000, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities (pixels, classes) and labels that follow them a little."""
    generator = torch.Generator().manual_seed(4)
    probabilities = torch.randn(pixels, classes, generator=generator, dtype=torch.float64).mul(2).softmax(-1)
    labels = torch.where(
        torch.rand(pixels, generator=generator) < 0.7,
        probabilities.argmax(-1),
        torch.randint(classes, (pixels,), generator=generator),
    )
    return probabilities, labels


def counted(probabilities: torch.Tensor, labels: torch.Tensor) -> np.ndarray:
    confidence, mapped = probabilities.max(-1)
    right = (mapped == labels).numpy()
    return reliability_counts(confidence.numpy(), mapped.numpy(), right, probabilities.shape[1])


def test_the_calibration_error_is_that_of_torchmetrics() -> None:
    probabilities, labels = drawn()
    expected = multiclass_calibration_error(probabilities, labels, num_classes=3, n_bins=BINS)
    assert calibration_error(counted(probabilities, labels)) == pytest.approx(float(expected), abs=1e-6)


def test_each_pixel_is_in_the_bin_of_its_confidence() -> None:
    confidence = np.array([0.5, 0.549, 0.55, 0.999, 1.0], np.float32)
    counts = reliability_counts(
        confidence, np.array([0, 0, 0, 1, 1], np.uint8), np.array([1, 0, 1, 0, 1], bool), classes=2
    )
    pixels, right, _ = counts
    assert {(k, b): int(pixels[k, b]) for k, b in np.argwhere(pixels)} == {(0, 10): 2, (0, 11): 1, (1, 19): 2}
    assert {(k, b): int(right[k, b]) for k, b in np.argwhere(right)} == {(0, 10): 1, (0, 11): 1, (1, 19): 1}
    plain = json.loads(json.dumps(reliability_json(counts)))
    assert plain["confidence"][1][19] == pytest.approx(1.999, abs=1e-6)
    assert plain["bins"] == BINS


def test_parts_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    probabilities, labels = drawn()
    whole = counted(probabilities, labels)
    parts = sum(counted(probabilities[i : i + 700], labels[i : i + 700]) for i in range(0, 5000, 700))
    assert (parts == whole).all()
    monkeypatch.setattr("tiledseg.execution.scores._CHUNK", 333)
    assert (counted(probabilities, labels) == whole).all()


def test_no_pixel_has_no_error() -> None:
    assert calibration_error(empty_counts(3)) is None


def test_confidences_that_are_no_numbers_count_as_none() -> None:
    confidence_P = np.array([np.nan, 0.9])
    counts = reliability_counts(confidence_P, np.array([0, 1]), np.array([True, True]), 2)
    assert counts[0, 0, 0] == 1
    assert counts[2, 0].sum() == 0
