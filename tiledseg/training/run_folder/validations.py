"""`validation/`: of each validation of a run a file of figures, step-XXXXXX.json, and its panel, step-XXXXXX.png.

Rank 0 alone writes. A run that goes on from a checkpoint takes back the files of later steps, as it does the lines of
metrics.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tiledseg.execution.metrics import scores
from tiledseg.execution.reliability import reliability_json
from tiledseg.raster.classes import ClassRecord, in_hex
from tiledseg.raster.statistics import Normalization
from tiledseg.reporting.panel import Panel, can_draw, draw_panel, write_panel
from tiledseg.reporting.pictures import as_picture, class_picture, error_picture
from tiledseg.writing import replacing, writing

if TYPE_CHECKING:
    from tiledseg.training.panels import SeenView  # torch: whoever only reads these files waits for none
    from tiledseg.training.validation import Findings

VALIDATION = "validation"
TITLES = ("image", "labels", "map", "errors")
_KEYS = {"step", "epoch", "mean_iou", "accuracy", "pixels", "classes", "confusion_matrix", "reliability", "panel"}
_OWN = re.compile(r"\.?step-(\d{6,})\.(json|png)(\.part)?")


@dataclass(frozen=True)
class Scene:
    """What validations are of. `images`: their paths; `dtype`: of their pixels; `normalization`: of their bands."""

    classes: Sequence[ClassRecord]
    ignore_index: int
    images: Sequence[str]
    dtype: str
    normalization: Normalization


def own_files(folder: Path) -> list[tuple[int, Path]]:
    """(step, file) of each file that validations have left in a run's folder, in order of steps."""
    found = [(_OWN.fullmatch(path.name), path) for path in sorted((folder / VALIDATION).glob("*step-*"))]
    return sorted((int(match[1]), path) for match, path in found if match)


def drop_validations(folder: Path, after: int) -> None:
    """Take back the files of validations after step `after`. Raises WriteError."""
    with writing(folder / VALIDATION):
        for step, path in own_files(folder):
            if step > after:
                path.unlink()


def read_validations(folder: Path) -> list[dict[str, Any]]:
    """The figures of every validation, in order of steps; a file that is no such figures is passed over."""
    texts = (_read(path) for _, path in own_files(folder) if path.suffix == ".json")
    return [figures for figures in texts if isinstance(figures, dict) and figures.keys() >= _KEYS]


def _read(path: Path) -> object:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None


def write_validation(folder: Path, step: int, epoch: int, findings: Findings, scene: Scene) -> Panel | None:
    """Write the files of one validation; its panel, where one could be drawn. Raises WriteError."""
    place = folder / VALIDATION
    with writing(place):
        place.mkdir(exist_ok=True)
    panel = None
    if findings.views and can_draw():
        rows = [view_pictures(seen, scene) for seen in findings.views]
        panel = draw_panel(rows, TITLES, scene.classes)
        write_panel(place / f"step-{step:06d}.png", panel)
    figures = {
        "step": step,
        "epoch": epoch,
        **figures_of(findings, scene),
        "panel": _panel_json(panel, findings, scene),
    }
    with replacing(place / f"step-{step:06d}.json") as part:
        part.write_text(json.dumps(figures, allow_nan=False) + "\n")
    return panel


def figures_of(findings: Findings, scene: Scene) -> dict[str, Any]:
    """Everything that was counted, as plain values: scores in all and of each class, confusion matrix, reliability."""
    found = scores(findings.matrix_KK).to_json()
    matrix = findings.matrix_KK
    each = zip(*(found[key] for key in ("iou", "f1", "precision", "recall")), strict=True)
    classes = [
        {
            "name": name,
            "colour": in_hex(colour),
            **dict(zip(("iou", "f1", "precision", "recall"), values, strict=True)),
            "pixels": int(matrix[k].sum()),
            "mapped": int(matrix[:, k].sum()),
        }
        for k, ((name, colour), values) in enumerate(zip(scene.classes, each, strict=True))
    ]
    return {
        "loss": findings.loss,
        **{key: found[key] for key in ("accuracy", "mean_iou", "mean_f1", "pixels")},
        "seconds": findings.seconds,
        "classes": classes,
        "confusion_matrix": matrix.tolist(),
        "reliability": reliability_json(findings.reliability),
    }


def view_pictures(seen: SeenView, scene: Scene) -> list[NDArray[np.uint8]]:
    """Image, labels, map and errors of one view."""
    colours = [colour for _, colour in scene.classes]
    return [
        _image_picture(seen.image_CHW, scene),
        class_picture(seen.labels_HW, colours),
        class_picture(seen.map_HW, colours),
        error_picture(seen.labels_HW, seen.map_HW, scene.ignore_index),
    ]


def _image_picture(image_CHW: NDArray[np.float32], scene: Scene) -> NDArray[np.uint8]:
    """The raster's own pixels, from the normalised ones."""
    shown = len(image_CHW)
    mean, std = (np.array(of[:shown])[:, None, None] for of in (scene.normalization.mean, scene.normalization.std))
    pixels_CHW, valid_HW = image_CHW * std + mean, np.asarray(~np.isnan(image_CHW).any(axis=0))
    if scene.dtype == "uint8":
        pixels_CHW = np.clip(np.rint(np.nan_to_num(pixels_CHW)), 0, 255).astype(np.uint8)
    return as_picture(pixels_CHW, valid_HW)


def _panel_json(panel: Panel | None, findings: Findings, scene: Scene) -> list[dict[str, Any]] | None:
    """Of each row of the panel: of which image and which pixels it is, and where its pictures lie (x, y, width,
    height)."""
    if panel is None:
        return None
    return [
        {
            "image": scene.images[seen.view.image],
            "rows": [seen.view.box.row.start, seen.view.box.row.stop],
            "cols": [seen.view.box.col.start, seen.view.box.col.stop],
            "stride": seen.view.stride,
            "cells": {
                title: [cell.x, cell.y, cell.width, cell.height] for title, cell in zip(TITLES, cells, strict=True)
            },
        }
        for seen, cells in zip(findings.views, panel.cells, strict=True)
    ]
