"""Scores and reliability: against torchmetrics and a hand count; counts of parts add up exactly."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiledseg.errors import LabelError
from tiledseg.execution.scores import (
    BINS,
    calibration_error,
    confusion_matrix,
    empty_counts,
    reliability_counts,
    reliability_json,
    scores,
)


def random_pair(seed: int, classes: int, size: int, ignored: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, classes, size).astype(np.uint8)
    prediction = np.where(rng.random(size) < 0.6, truth, rng.integers(0, classes, size)).astype(np.uint8)
    truth[rng.random(size) < ignored] = 255
    return truth, prediction


@settings(derandomize=True, max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), classes=st.integers(2, 9), size=st.integers(1, 400))
def test_agrees_with_torchmetrics(seed: int, classes: int, size: int) -> None:
    torch = pytest.importorskip("torch")
    oracle = pytest.importorskip("torchmetrics.functional.classification")
    truth, prediction = random_pair(seed, classes, size)
    truth[0] = 0  # one pixel at least counts
    matrix = confusion_matrix(truth, prediction, classes)
    target, guess = torch.from_numpy(truth.astype(np.int64)), torch.from_numpy(prediction.astype(np.int64))
    common = {"num_classes": classes, "ignore_index": 255}
    expected = oracle.multiclass_confusion_matrix(guess, target, **common)
    np.testing.assert_array_equal(matrix, expected.numpy())
    ours = scores(matrix)
    present = (matrix.sum(0) + matrix.sum(1)) > 0
    per_class = {
        "iou": oracle.multiclass_jaccard_index(guess, target, average="none", **common),
        "f1": oracle.multiclass_f1_score(guess, target, average="none", **common),
        "precision": oracle.multiclass_precision(guess, target, average="none", **common),
        "recall": oracle.multiclass_recall(guess, target, average="none", **common),
    }
    for name, theirs in per_class.items():
        mine = np.array(getattr(ours, name))
        np.testing.assert_allclose(mine[present], theirs.numpy()[present], rtol=1e-6, err_msg=name)
        assert np.isnan(mine[~present]).all()
    accuracy = oracle.multiclass_accuracy(guess, target, average="micro", **common)
    assert ours.accuracy == pytest.approx(float(accuracy), rel=1e-6)


def test_parts_and_chunks_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    truth, prediction = random_pair(3, 4, 1000)
    probabilities, labels = drawn()
    whole = confusion_matrix(truth, prediction, 4)
    shares = counted(probabilities, labels)
    assert whole.sum() == (truth != 255).sum()
    cuts = list(itertools.pairwise([0, 1, 300, 300, 1000]))
    parts = [confusion_matrix(truth[a:b], prediction[a:b], 4) for a, b in cuts]
    np.testing.assert_array_equal(sum(parts), whole)
    assert (sum(counted(probabilities[i : i + 700], labels[i : i + 700]) for i in range(0, 5000, 700)) == shares).all()
    monkeypatch.setattr("tiledseg.execution.scores._CHUNK", 37)
    np.testing.assert_array_equal(confusion_matrix(truth, prediction, 4), whole)
    assert (counted(probabilities, labels) == shares).all()


def test_a_class_that_is_absent_has_no_score_and_one_that_is_missed_or_invented_has_zero() -> None:
    two = scores(confusion_matrix(np.array([0, 1, 1, 0]), np.array([0, 1, 0, 0]), 2))
    three = scores(confusion_matrix(np.array([0, 1, 1, 0]), np.array([0, 1, 0, 0]), 3))
    assert math.isnan(three.iou[2])
    assert three.mean_iou == two.mean_iou
    assert three.mean_f1 == two.mean_f1
    wrong = scores(confusion_matrix(np.array([0, 1]), np.array([0, 2]), 3))
    assert wrong.iou == wrong.precision == (1.0, 0.0, 0.0)
    assert wrong.mean_iou == pytest.approx(1 / 3)


def test_nothing_valid_is_null_in_strict_json() -> None:
    nothing = np.full(5, 255, np.uint8)
    result = scores(confusion_matrix(nothing, nothing, 2)).to_json()
    text = json.dumps(result, allow_nan=False)
    assert json.loads(text)["accuracy"] is None
    assert json.loads(text)["iou"] == [None, None]
    assert json.loads(text)["pixels"] == 0


@pytest.mark.parametrize(
    ("truth", "prediction", "match"),
    [
        (np.array([0, 5]), np.array([0, 1]), "truth holds class 5"),
        (np.array([0, 1]), np.array([0, -1]), "prediction holds class -1"),
        (np.array([0, 1]), np.array([0]), "shape"),
    ],
)
def test_values_outside_the_classes_are_named(truth: np.ndarray, prediction: np.ndarray, match: str) -> None:
    with pytest.raises(LabelError, match=match):
        confusion_matrix(truth, prediction, 3)


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


def test_no_pixel_has_no_error_and_a_confidence_that_is_no_number_counts_as_none() -> None:
    assert calibration_error(empty_counts(3)) is None
    confidence_P = np.array([np.nan, 0.9])
    counts = reliability_counts(confidence_P, np.array([0, 1]), np.array([True, True]), 2)
    assert counts[0, 0, 0] == 1
    assert counts[2, 0].sum() == 0
