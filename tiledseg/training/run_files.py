"""`validation/`: a file of figures, step-XXXXXX.json, and a panel, step-XXXXXX.png, of each validation of a run; and
the reading of these and of `metrics.jsonl`.

Rank 0 alone writes. A run that goes on from a checkpoint takes back the files of later steps, as it does metrics.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tiledseg.errors import OutputError
from tiledseg.raster.labels.classes import ClassRecord, in_hex
from tiledseg.raster.labels.label_map import LabelMap
from tiledseg.raster.statistics import Normalization
from tiledseg.reporting.pictures import (
    as_picture,
    can_draw,
    class_picture,
    draw_panel,
    error_picture,
    write_panel,
)
from tiledseg.system.outputs import VALIDATION
from tiledseg.system.writing import write_whole, writing

if TYPE_CHECKING:
    from tiledseg.training.validation import Findings, SeenView

TITLES = ("image", "labels", "map", "missed", "false")
_KEYS = {"step", "epoch", "mean_iou", "accuracy", "pixels", "classes", "confusion_matrix", "reliability", "panel"}
_OWN = re.compile(r"\.?step-(\d{6,})\.(json|png)(\.part)?")


def write_validation(
    folder: Path,
    step: int,
    epoch: int,
    findings: Findings,
    labels: LabelMap,
    images: Sequence[str],
    dtype: str,
    normalization: Normalization,
) -> NDArray[np.uint8] | None:
    """Write the files of one validation of `images`, of pixels of `dtype`; return its panel if one was drawn. Raises
    WriteError."""
    place, panel = folder / VALIDATION, None
    with writing(place):
        place.mkdir(exist_ok=True)
    if findings.views and can_draw():
        pictures = [view_pictures(seen, labels, dtype, normalization) for seen in findings.views]
        panel = draw_panel(pictures, TITLES, labels.classes)
        write_panel(place / f"step-{step:06d}.png", panel)
    rows = [
        {
            "image": images[view.image],
            "rows": [view.box.row.start, view.box.row.stop],
            "cols": [view.box.col.start, view.box.col.stop],
            "stride": view.stride,
        }
        for view in (seen.view for seen in findings.views)
    ]
    figures = {"step": step, "epoch": epoch, **figures_of(findings, labels.classes)}
    figures["panel"] = None if panel is None else rows
    write_whole(place / f"step-{step:06d}.json", json.dumps(figures, allow_nan=False) + "\n")
    return panel


def figures_of(findings: Findings, classes: Sequence[ClassRecord]) -> dict[str, Any]:
    """Return all counts as plain values: scores in all and of each class, confusion matrix, reliability."""
    from tiledseg.execution.scores import reliability_json, scores  # here: no start of a run waits for it

    matrix = findings.matrix_KK
    score: dict[str, Any] = scores(matrix).to_json()
    return {
        "loss": findings.loss,
        **{key: score[key] for key in ("accuracy", "mean_iou", "mean_f1", "pixels")},
        "seconds": findings.seconds,
        "classes": [
            {
                "name": name,
                "colour": in_hex(colour),
                **{key: score[key][k] for key in ("iou", "f1", "precision", "recall")},
                "pixels": int(matrix[k].sum()),
                "mapped": int(matrix[:, k].sum()),
            }
            for k, (name, colour) in enumerate(classes)
        ],
        "confusion_matrix": matrix.tolist(),
        "reliability": reliability_json(findings.reliability),
    }


def view_pictures(
    seen: SeenView, labels: LabelMap, dtype: str, normalization: Normalization
) -> list[NDArray[np.uint8]]:
    """Draw image, labels and map of one view; of wrong pixels the class that is missed, and the one falsely there."""
    colours, shown = [colour for _, colour in labels.classes], len(seen.image_CHW)
    mean, std = (np.array(of[:shown])[:, None, None] for of in (normalization.mean, normalization.std))
    pixels_CHW = seen.image_CHW * std + mean
    if dtype == "uint8":
        pixels_CHW = np.clip(np.rint(np.nan_to_num(pixels_CHW)), 0, 255).astype(np.uint8)
    pairs = (seen.labels_HW, seen.map_HW), (seen.map_HW, seen.labels_HW)
    return [
        as_picture(pixels_CHW, np.asarray(~np.isnan(seen.image_CHW).any(axis=0))),
        *(class_picture(classes_HW, colours) for classes_HW, _ in pairs),
        *(error_picture(*pair, colours, labels.ignore_index) for pair in pairs),
    ]


def own_files(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, file) of each file that validations have left in a run's folder, in order of steps."""
    matches = [(_OWN.fullmatch(path.name), path) for path in sorted((folder / VALIDATION).glob("*step-*"))]
    return sorted((int(match[1]), path) for match, path in matches if match)


def drop_validations(folder: Path, after: int) -> None:
    """Delete the files of validations after step `after`. Raises WriteError."""
    with writing(folder / VALIDATION):
        for step, path in own_files(folder):
            if step > after:
                path.unlink()


def read_validations(folder: Path) -> list[dict[str, Any]]:
    """Return the figures of every validation, in order of steps; other files are passed over."""
    texts = (read_json(path) for _, path in own_files(folder) if path.suffix == ".json")
    return [figures for figures in texts if figures.keys() >= _KEYS]


def read_json(path: Path) -> dict[str, Any]:
    """Return the map in a JSON file; empty where there is none."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read all lines of a metrics file but a last one that a crash has torn. Raises OutputError for other damage, and
    where a step does not follow the one before it."""
    texts, lines, before = path.read_bytes().split(b"\n") if path.exists() else [b""], [], None
    for number, text in enumerate(texts, 1):
        line = _parsed(text)
        if line is None:
            if number == len(texts):
                break
            raise OutputError(
                f"{path}, line {number} is no line of this run ({text[:40]!r}); mend it, or move the file away to keep "
                "it"
            )
        if "val" not in line:
            if before is not None and line["step"] != before + 1:
                raise OutputError(
                    f"{path}, line {number} is of step {line['step']}, after one of step {before}; mend it, or move "
                    "the file away to keep it"
                )
            before = line["step"]
        lines.append(line)
    return lines


def _parsed(text: bytes) -> dict[str, Any] | None:
    """Return an object with a step, and a loss or scores that can be drawn; None for other text."""
    try:
        line = json.loads(text)
        scores = line.get("val", {"loss": line.get("loss"), "mean_iou": None})
        numbers = scores["loss"], scores["mean_iou"]
    except (ValueError, RecursionError, AttributeError, LookupError, TypeError):
        return None
    drawable = all(isinstance(number, (int, float, type(None))) for number in numbers)
    return line if drawable and type(line.get("step")) is int else None
