"""The folder of a run that nobody has trained: metrics, validations with panels, a summary."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tiledseg.execution.scores import reliability_counts
from tiledseg.geometry.box import Box, Interval
from tiledseg.raster.labels.classes import ClassRecord
from tiledseg.raster.labels.label_map import LabelMap
from tiledseg.raster.statistics import Normalization
from tiledseg.system.outputs import CONFIG, METRICS, SUMMARY
from tiledseg.training.run_files import write_validation
from tiledseg.training.validation import Findings, PanelView, SeenView

CLASSES = (
    ClassRecord("field", (158, 188, 94)),
    ClassRecord('<b>road & "rail"</b>', (70, 70, 74)),
    ClassRecord("a class whose name is rather too long for a table", (24, 104, 44)),
)
LABELS = LabelMap((), False, 3, 255, CLASSES)
WINDOW = Box(Interval(8, 40), Interval(4, 60))
VIEWS = (PanelView(0, Box.of_shape((64, 64)), 2), PanelView(0, WINDOW))
WARNING = "<script>alert(1)</script> is stored in blocks"
LOSS = "class-weighted (cross-entropy + 0.5 Dice)"
STEPS, EVERY = 40, 10


def make_run(folder: Path) -> None:
    """Every second step a little better than the one before."""
    folder.mkdir(exist_ok=True)
    draw = np.random.default_rng(3)
    lines = []
    for step in range(1, STEPS + 1):
        pace = {"lr": 0.01 * (1 - step / STEPS), "seconds": 0.5, "pixels": 10000, "pixels_per_second": 2e4}
        lines.append({"step": step, "epoch": (step - 1) // EVERY, "loss": 1 / (1 + step), **pace})
        if step % EVERY == 0:
            findings = found(draw, step / STEPS)
            lines.append({"step": step, "epoch": step // EVERY - 1, "val": findings.line()})
            of_images = LABELS, ("held/<i>out.tif",), "uint8", Normalization.identity(3)
            write_validation(folder, step, step // EVERY - 1, findings, *of_images)
    (folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / CONFIG).write_text("data:\n  images: <b>.tif\n")
    summary = {"title": "made: unet", "finished": True, "seconds": 20.0, "ranks": 2, "command": "tiledseg train"}
    summary |= {"warnings": [WARNING], "loss": LOSS, "versions": {"torch": "2.13"}}
    (folder / SUMMARY).write_text(json.dumps(summary))


def found(draw: np.random.Generator, good: float) -> Findings:
    """What a validation finds where a share `good` of the pixels is right, and the others are drawn."""
    labels_HW = np.add.outer(np.arange(64) // 20, np.arange(64) // 24).astype(np.uint8) % 3
    map_HW = np.where(draw.random((64, 64)) < good, labels_HW, draw.integers(0, 3, (64, 64))).astype(np.uint8)
    labels_HW[:6, :9] = 255
    image_CHW = draw.integers(0, 255, (3, 64, 64)).astype(np.float32)
    counted = labels_HW != 255
    matrix_KK = np.zeros((3, 3), np.int64)
    np.add.at(matrix_KK, (labels_HW[counted], map_HW[counted]), 1)
    mapped, right = map_HW[counted], (map_HW == labels_HW)[counted]
    reliability = reliability_counts(draw.uniform(0.34, 1, mapped.size), mapped, right, 3)
    seen = []
    for view in VIEWS:
        rows, cols = (slice(side.start, side.stop, view.stride) for side in (view.box.row, view.box.col))
        seen.append(SeenView(view, image_CHW[:, rows, cols], labels_HW[rows, cols], map_HW[rows, cols]))
    return Findings(1 - good, matrix_KK, reliability, 0.1, seen)
