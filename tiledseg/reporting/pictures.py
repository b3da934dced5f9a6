"""Pictures for people: pixels, labels and maps as red, green, blue, uint8 (H, W, 3), and panels of them.

Pillow draws and writes panels; it comes with the extras `plot` and `report`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tiledseg.raster.labels.classes import Colour
from tiledseg.system.files import replacing

BLANK = (235, 235, 235)
"""Colour of pixels that do not count, or have no data."""
RIGHT = (250, 250, 250)
"""Colour of pixels that a map has right."""
_GAP, _TEXT, _KEY, _LETTERS = 8, 13, 190, 24  # pixels: between pictures, of letters, of a legend's entry; its letters
_INK, _PAPER = (40, 40, 40), (255, 255, 255)


def as_picture(pixels_CHW: NDArray, valid_HW: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Show the first three bands, or grey of the first; each is stretched from its 2nd to its 98th percentile unless
    uint8."""
    bands_CHW = pixels_CHW[:3] if len(pixels_CHW) >= 3 else pixels_CHW[[0, 0, 0]]
    if bands_CHW.dtype != np.uint8 and valid_HW.any():
        values = bands_CHW[:, valid_HW].astype(np.float64)
        low, high = (np.percentile(values, q, axis=1)[:, None, None] for q in (2, 98))
        bands_CHW = np.clip((bands_CHW - low) / np.maximum(high - low, 1e-12), 0, 1) * 255
    picture = np.moveaxis(np.nan_to_num(bands_CHW), 0, -1).astype(np.uint8)
    picture[~valid_HW] = BLANK
    return picture


def class_picture(classes_HW: NDArray[np.uint8], colours: Sequence[Colour]) -> NDArray[np.uint8]:
    """Show class k in `colours`[k]; blank where there is no such class."""
    palette = np.full((256, 3), BLANK, np.uint8)
    palette[: len(colours)] = colours
    return palette[classes_HW]


def error_picture(
    classes_HW: NDArray[np.uint8], other_HW: NDArray[np.uint8], colours: Sequence[Colour], ignore_index: int
) -> NDArray[np.uint8]:
    """Show pixels whose class is not that of `other_HW`, in its colour; blank where a pixel does not count."""
    picture = class_picture(classes_HW, colours)
    picture[classes_HW == other_HW] = RIGHT
    picture[(classes_HW == ignore_index) | (other_HW == ignore_index)] = BLANK
    return picture


def can_draw() -> bool:
    """Return True if Pillow is installed."""
    return importlib.util.find_spec("PIL") is not None


def draw_panel(
    rows: Sequence[Sequence[NDArray[np.uint8]]], titles: Sequence[str], legend: Sequence[tuple[str, Colour]]
) -> NDArray[np.uint8]:
    """Draw `rows` of pictures, each row's of one size, under the `titles` of the columns; below them the classes by
    name and colour."""
    from PIL import Image, ImageDraw, ImageFont  # here: an extra

    widths = [max(row[column].shape[1] for row in rows) for column in range(len(titles))]
    text = max(_TEXT, sum(widths) // 120)  # a wide picture is looked at as wide as a screen
    key = _KEY * text // _TEXT
    lefts = [_GAP + sum(widths[:column]) + column * _GAP for column in range(len(titles))]
    tops, y = [], 2 * _GAP + text
    for row in rows:
        tops.append(y)
        y += max(picture.shape[0] for picture in row) + _GAP
    width = max(lefts[-1] + widths[-1] + _GAP, key + 2 * _GAP)
    columns = max(1, (width - _GAP) // key)
    height = y + -(-len(legend) // columns) * (text + _GAP) + _GAP
    image = Image.new("RGB", (width, height), _PAPER)
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(text)
    for title, left in zip(titles, lefts, strict=True):
        draw.text((left, _GAP), title, _INK, font)
    for row, top in zip(rows, tops, strict=True):
        for left, picture in zip(lefts, row, strict=True):
            image.paste(Image.fromarray(np.ascontiguousarray(picture)), (left, top))
    for k, (name, colour) in enumerate(legend):
        x, top = _GAP + k % columns * key, y + k // columns * (text + _GAP)
        draw.rectangle((x, top + 2, x + text, top + 2 + text), colour, _INK)
        words = name if len(name) <= _LETTERS else f"{name[: _LETTERS - 3]}..."
        draw.text((x + text + 6, top + 1), words, _INK, font)
    return np.asarray(image)


def write_panel(path: Path, panel_HWC: NDArray[np.uint8]) -> None:
    """Write a PNG, whole or not at all. Raises WriteError."""
    from PIL import Image

    with replacing(path) as part:
        Image.fromarray(panel_HWC).save(part, format="png")
