"""A panel: pictures of some places in rows, image / labels / map / errors in columns, with a legend of the classes.

Pillow draws and writes it; it comes with the extras `plot` and `report`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tiledseg.raster.labels.classes import Colour
from tiledseg.records import dataclass
from tiledseg.system.writing import replacing

_GAP, _TEXT, _KEY = 8, 13, 190  # pixels: between pictures, of letters, of an entry of the legend
_INK, _PAPER = (40, 40, 40), (255, 255, 255)


@dataclass(frozen=True)
class Cell:
    """Where one picture lies in a panel."""

    x: int
    y: int
    width: int
    height: int


@dataclass(frozen=True)
class Panel:
    """The picture (H, W, 3), uint8, and its cells, row by row."""

    picture: NDArray[np.uint8]
    cells: tuple[tuple[Cell, ...], ...]


def can_draw() -> bool:
    """Whether Pillow is installed."""
    return importlib.util.find_spec("PIL") is not None


def draw_panel(
    rows: Sequence[Sequence[NDArray[np.uint8]]], titles: Sequence[str], legend: Sequence[tuple[str, Colour]]
) -> Panel:
    """`rows` of pictures, each row's of one size, under the `titles` of the columns; below them, the classes by name
    and colour."""
    from PIL import Image, ImageDraw, ImageFont  # here: an extra

    widths = [max(row[column].shape[1] for row in rows) for column in range(len(titles))]
    lefts = [_GAP + sum(widths[:column]) + column * _GAP for column in range(len(titles))]
    tops, y = [], 2 * _GAP + _TEXT
    for row in rows:
        tops.append(y)
        y += max(picture.shape[0] for picture in row) + _GAP
    width = max(lefts[-1] + widths[-1] + _GAP, _KEY + 2 * _GAP)
    columns = max(1, (width - _GAP) // _KEY)
    height = y + -(-len(legend) // columns) * (_TEXT + _GAP) + _GAP
    image = Image.new("RGB", (width, height), _PAPER)
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(_TEXT)
    for title, left in zip(titles, lefts, strict=True):
        draw.text((left, _GAP), title, _INK, font)
    cells = []
    for row, top in zip(rows, tops, strict=True):
        cells.append(tuple(Cell(x, top, p.shape[1], p.shape[0]) for x, p in zip(lefts, row, strict=True)))
        for cell, picture in zip(cells[-1], row, strict=True):
            image.paste(Image.fromarray(np.ascontiguousarray(picture)), (cell.x, cell.y))
    for k, (name, colour) in enumerate(legend):
        x, top = _GAP + k % columns * _KEY, y + k // columns * (_TEXT + _GAP)
        draw.rectangle((x, top + 2, x + _TEXT, top + 2 + _TEXT), colour, _INK)
        draw.text((x + _TEXT + 6, top + 1), _fitting(name, _KEY - _TEXT - 12, font), _INK, font)
    return Panel(np.asarray(image), tuple(cells))


def _fitting(name: str, width: int, font: object) -> str:
    """The name, cut where it is wider than `width` pixels."""
    measure = font.getlength  # type: ignore[attr-defined]
    if measure(name) <= width:
        return name
    while name and measure(name + "...") > width:
        name = name[:-1]
    return name + "..."


def write_panel(path: Path, panel: Panel) -> None:
    """As a PNG, whole or not at all. Raises WriteError."""
    from PIL import Image

    with replacing(path) as part:
        Image.fromarray(panel.picture).save(part, format="png")
