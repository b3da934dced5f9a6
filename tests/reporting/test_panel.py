"""Panels: every pixel of a picture lies in its cell, and the legend names the classes."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from tiledseg.reporting.page import (
    BLANK,
    RIGHT,
    as_picture,
    class_picture,
    draw_panel,
    error_picture,
    write_panel,
)

LEGEND = [("water", (1, 2, 200)), ("a class of a name much too long for its place in the legend", (7, 150, 9))]


def test_pictures_stand_in_rows_and_columns(tmp_path) -> None:
    draw = np.random.default_rng(0)
    rows = [
        [draw.integers(0, 256, (*shape, 3)).astype(np.uint8) for _ in range(2)]
        for shape in [(40, 90), (70, 30), (1, 1)]
    ]
    write_panel(tmp_path / "panel.png", draw_panel(rows, ("image", "map"), LEGEND))
    found = np.asarray(Image.open(tmp_path / "panel.png"))
    tops = 29, 77, 155
    for row, top in zip(rows, tops, strict=True):
        for picture, left in zip(row, (8, 106), strict=True):
            height, width = picture.shape[:2]
            assert (found[top : top + height, left : left + width] == picture).all()
    for _, colour in LEGEND:
        assert (found[156:] == colour).all(-1).sum() > 80, "its square in the legend"


def test_errors_and_ignored_pixels() -> None:
    labels_HW, map_HW = np.array([[0, 1, 255, 1]], np.uint8), np.array([[0, 0, 1, 255]], np.uint8)
    one, two = colours = [(1, 1, 1), (2, 2, 2)]
    missed, false = (
        error_picture(*pair, colours, 255)[0].tolist() for pair in ((labels_HW, map_HW), (map_HW, labels_HW))
    )
    assert missed == [list(c) for c in (RIGHT, two, BLANK, BLANK)], "of the labels"
    assert false == [list(c) for c in (RIGHT, one, BLANK, BLANK)], "of the map"
    assert class_picture(labels_HW, [(1, 1, 1), (2, 2, 2)])[0].tolist() == [[1] * 3, [2] * 3, list(BLANK), [2] * 3]


@pytest.mark.parametrize("bands", [1, 2, 3, 5])
def test_images_of_any_bands_become_colours(bands: int) -> None:
    draw = np.random.default_rng(1)
    pixels_CHW, valid_HW = draw.normal(1000, 50, (bands, 20, 20)), np.ones((20, 20), bool)
    pixels_CHW[:, 3, 4], valid_HW[3, 4] = np.nan, False
    picture = as_picture(pixels_CHW, valid_HW)
    assert picture.shape == (20, 20, 3)
    assert picture[3, 4].tolist() == list(BLANK)
    assert picture[valid_HW].min() == 0
    assert picture[valid_HW].max() == 255
    small = draw.integers(90, 99, (3, 20, 20)).astype(np.uint8)
    assert (as_picture(small, np.ones((20, 20), bool)) == np.moveaxis(small, 0, -1)).all(), "bytes stay as they are"
