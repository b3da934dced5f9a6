"""Weights of classes by their frequency, against a count by hand and one by loops."""

from __future__ import annotations

import numpy as np
import pytest

from tiledseg.raster.labels.label_map import count_classes, median_frequency_weights


def test_a_count_by_hand() -> None:
    """Three images of 10, 20 and 10 valid pixels. Class 0 is in all: 20 of 40; class 1 in two: 15 of 30; class 2 in
    one: 5 of 10... so the frequencies are 1/2, 1/2 and 1/4, and their median is 1/2."""
    counts = np.array([[5, 5, 0], [10, 10, 0], [5, 0, 5]])
    assert median_frequency_weights(counts) == (1.0, 1.0, 1.0)
    counts = np.array([[8, 2, 0], [0, 15, 5]])  # 8 of 10, 17 of 30, 5 of 20: the median is 17/30
    assert median_frequency_weights(counts) == pytest.approx((17 / 30 / 0.8, 1.0, 17 / 30 / 0.25))


def test_an_even_number_of_classes_and_one_that_no_image_has() -> None:
    counts = np.array([[90, 0, 10]])  # frequencies 0.9 and 0.1: their median is 0.5
    assert median_frequency_weights(counts) == pytest.approx((0.5 / 0.9, 1.0, 5.0))
    assert median_frequency_weights(np.zeros((2, 3), np.int64)) == (1.0, 1.0, 1.0)


def test_pixels_that_are_not_valid_and_numbers_of_no_class_do_not_count() -> None:
    classes_HW = np.array([[0, 1, 1], [2, 255, 7]], np.uint8)
    valid_HW = np.array([[True, True, False], [True, True, True]])
    assert count_classes(classes_HW, valid_HW, 3).tolist() == [1, 1, 1]
