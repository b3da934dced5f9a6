"""`validation/`: of each validation of a run a file of figures, step-XXXXXX.json, and its panel, step-XXXXXX.png.

Rank 0 alone writes. A run that goes on from a checkpoint takes back the files of later steps, as it does the lines of
metrics.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiledseg.raster.labels.classes import ClassRecord
from tiledseg.raster.statistics import Normalization
from tiledseg.records import dataclass
from tiledseg.system.run_names import VALIDATION
from tiledseg.system.writing import writing

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
