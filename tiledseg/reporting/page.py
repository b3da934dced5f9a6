"""The drawing of `report.html` and of pictures.

The page is one HTML file that needs no network, made by jinja2, with curves by matplotlib (both extras). Values are
escaped, because names of classes and files may hold any text. Pictures of pixels, labels and maps are uint8 (H, W, 3).
"""

from __future__ import annotations

import base64
import io
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiledseg.errors import VERSION

if TYPE_CHECKING:
    from matplotlib.figure import Figure

import numpy as np
from numpy.typing import NDArray

from tiledseg.raster.labels.classes import Colour
from tiledseg.system.files import replacing

Lines = Sequence[Mapping[str, Any]]
_TEMPLATE = Path(__file__).parent / "template"
_MOST_CELLS = 40  # classes a side of the confusion matrix
_MOST_NAMES = 24  # in a legend


def draw_curves(lines: Lines, validations: Lines, loss: str, title: str) -> Figure:
    """Draw losses, IoU, learning rate and throughput over the steps.

    `lines`: of `metrics.jsonl`; `validations`: figures of `validation/step-XXXXXX.json`; `loss`: the training loss in
    words.
    """
    from matplotlib.figure import Figure

    steps = [line for line in lines if "val" not in line]
    checks = [{"step": line["step"], **line["val"]} for line in lines if "val" in line]
    figure = Figure(figsize=(10, 7), layout="constrained")
    figure.suptitle(_plain(title))
    (losses, ious), (rates, pace) = figure.subplots(2, 2, sharex=True)
    losses.plot(*_points(steps, "loss"), linewidth=1, label=_plain(f"training: {loss or 'of a step'}"))
    checked = losses if loss in ("", "cross-entropy") else losses.twinx()  # other losses need another axis
    checked.plot(*_points(checks, "loss"), "o-", color="C1", markersize=3, label="validation: cross-entropy a pixel")
    losses.set(title="Loss" if checked is losses else "Loss (left: training, right: validation)")
    losses.legend(handles=[*losses.lines, *(checked.lines if checked is not losses else ())], fontsize="small")
    ious.plot(*_points(checks, "mean_iou"), "o-", color="black", markersize=3, label="mean")
    for k, one in enumerate(validations[-1]["classes"] if validations else ()):
        points = [{"step": each["step"], "iou": each["classes"][k]["iou"]} for each in validations]
        ious.plot(*_points(points, "iou"), color=one["colour"], label=_plain(one["name"]) if k < _MOST_NAMES else None)
    ious.set(title="IoU of the validation, each class", ylim=(0, 1))
    ious.legend(fontsize="small", ncols=2)
    rates.plot(*_points(steps, "lr"), color="C3", linewidth=1)
    rates.set(title="Learning rate", xlabel="optimizer step")
    pace.plot(*_points(steps, "pixels_per_second", 1e-6), color="C2", linewidth=1)
    pace.set(title="Throughput [million pixels a second, all ranks]", xlabel="optimizer step")
    for axes in (losses, ious, rates, pace):
        axes.grid(alpha=0.3)
    return figure


def _points(lines: Iterable[Mapping[str, Any]], key: str, factor: float = 1.0) -> tuple[list[int], list[float]]:
    """Return the steps and the values, times `factor`, of the lines with a value of `key`."""
    known = [line for line in lines if line.get(key) is not None]
    return [line["step"] for line in known], [line[key] * factor for line in known]


def _plain(text: str) -> str:
    """Escape a label for matplotlib: a dollar would start a formula, a first underscore hide it from the legend."""
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def draw_reliability(counts: Mapping[str, Any]) -> Figure:
    """Draw the share of right pixels, and the share of pixels, against confidence; `counts`: of `reliability_json`."""
    from matplotlib.figure import Figure

    pixels, right = ([sum(of_bin) for of_bin in zip(*counts[key], strict=True)] for key in ("pixels", "right"))
    bins, total = counts["bins"], max(1, sum(pixels))
    middles = [(k + 0.5) / bins for k in range(bins)]
    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.subplots()
    axes.bar(middles, [n / max(1, of) for n, of in zip(right, pixels, strict=True)], 0.9 / bins, color="C0")
    axes.plot(middles, [n / total for n in pixels], color="0.4", drawstyle="steps-mid")
    axes.plot((0, 1), (0, 1), "--", color="black", linewidth=1)
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence")
    return figure


def png_of(figure: Figure) -> bytes:
    """Return a figure as PNG; characters that the font lacks become boxes."""
    data = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        figure.savefig(data, format="png", dpi=110)
    return data.getvalue()


def render(page: Mapping[str, Any]) -> str:
    """Return the page as HTML; `page` holds the values that the template names."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # here: an extra

    loader = FileSystemLoader(_TEMPLATE)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"percent": percent, "count": count}
    matrix = None
    if page["figures"]:  # the confusion matrix of the most frequent classes: (pixels, share of the row)
        classes, counts = page["figures"]["classes"], page["figures"]["confusion_matrix"]
        kept = sorted(sorted(range(len(classes)), key=lambda k: -classes[k]["pixels"])[:_MOST_CELLS])
        cells = [[(counts[k][j], counts[k][j] / max(1, sum(counts[k]))) for j in kept] for k in kept]
        matrix = {"classes": [classes[k] for k in kept], "rows": cells, "left_out": len(classes) - len(kept)}
    return environment.get_template("report.html.j2").render(page, version=VERSION, matrix=matrix)


def png_url(data: bytes) -> str:
    """Return a PNG as a data URL. Raises ValueError for other data."""
    if not data.startswith(b"\x89PNG"):
        raise ValueError("a picture is no PNG")
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def percent(value: float | None) -> str:
    """Return a share in percent; a dash for None and NaN."""
    return "-" if value is None or math.isnan(value) else f"{100 * value:.1f} %"


def count(value: int) -> str:
    """Return a whole number in groups of three digits."""
    return f"{value:,}".replace(",", " ")


BLANK = (235, 235, 235)
"""Colour of pixels that do not count or have no data."""
RIGHT = (250, 250, 250)
"""Colour of correctly mapped pixels."""
_GAP, _TEXT, _KEY, _LETTERS = 8, 13, 190, 24  # pixels: between pictures, of letters, of a legend's entry; its letters
_INK, _PAPER = (40, 40, 40), (255, 255, 255)


def as_picture(pixels_CHW: NDArray, valid_HW: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Draw three bands, or the first in grey, stretched from their 2nd to 98th percentile unless uint8."""
    bands_CHW = pixels_CHW[:3] if len(pixels_CHW) >= 3 else pixels_CHW[[0, 0, 0]]
    if bands_CHW.dtype != np.uint8 and valid_HW.any():
        values = bands_CHW[:, valid_HW].astype(np.float64)
        low, high = (np.percentile(values, q, axis=1)[:, None, None] for q in (2, 98))
        bands_CHW = np.clip((bands_CHW - low) / np.maximum(high - low, 1e-12), 0, 1) * 255
    picture = np.moveaxis(np.nan_to_num(bands_CHW), 0, -1).astype(np.uint8)
    picture[~valid_HW] = BLANK
    return picture


def class_picture(classes_HW: NDArray[np.uint8], colours: Sequence[Colour]) -> NDArray[np.uint8]:
    """Draw class k in `colours[k]`; other numbers are blank."""
    palette = np.full((256, 3), BLANK, np.uint8)
    palette[: len(colours)] = colours
    return palette[classes_HW]


def error_picture(
    classes_HW: NDArray[np.uint8], other_HW: NDArray[np.uint8], colours: Sequence[Colour], ignore_index: int
) -> NDArray[np.uint8]:
    """Draw pixels whose class differs from `other_HW`, in the colour of `classes_HW`; pixels that do not count are
    blank."""
    picture = class_picture(classes_HW, colours)
    picture[classes_HW == other_HW] = RIGHT
    picture[(classes_HW == ignore_index) | (other_HW == ignore_index)] = BLANK
    return picture


def draw_panel(
    rows: Sequence[Sequence[NDArray[np.uint8]]], titles: Sequence[str], legend: Sequence[tuple[str, Colour]]
) -> NDArray[np.uint8]:
    """Draw `rows` of pictures (one size a row) under `titles`, and below them a legend of the classes."""
    from PIL import Image, ImageDraw, ImageFont  # here: an extra

    widths = [max(row[column].shape[1] for row in rows) for column in range(len(titles))]
    text = max(_TEXT, sum(widths) // 120)  # larger letters for a wide panel, which is scaled down to a screen
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
