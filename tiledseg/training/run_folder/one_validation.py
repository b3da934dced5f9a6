"""What one validation leaves in `validation/`: its figures, and the panel of its views. Rank 0 alone writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tiledseg.execution.scores.metrics import scores
from tiledseg.execution.scores.reliability import reliability_json
from tiledseg.raster.labels.classes import in_hex
from tiledseg.reporting.panel import Panel, can_draw, draw_panel, write_panel
from tiledseg.reporting.pictures import as_picture, class_picture, error_picture
from tiledseg.system.run_names import VALIDATION
from tiledseg.system.writing import replacing, writing
from tiledseg.training.run_folder.validations import Scene

if TYPE_CHECKING:
    from tiledseg.training.panels import SeenView
    from tiledseg.training.validation import Findings

TITLES = ("image", "labels", "map", "missed", "false")


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
    """Image, labels and map of one view; of wrong pixels the class that is missed, and the one falsely there."""
    colours = [colour for _, colour in scene.classes]
    return [
        _image_picture(seen.image_CHW, scene),
        class_picture(seen.labels_HW, colours),
        class_picture(seen.map_HW, colours),
        error_picture(seen.labels_HW, seen.map_HW, colours, scene.ignore_index),
        error_picture(seen.map_HW, seen.labels_HW, colours, scene.ignore_index),
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
