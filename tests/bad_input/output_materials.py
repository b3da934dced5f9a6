"""What an output must not replace, or cannot be."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pyogrio
import shapely


def make_outputs(root: Path) -> None:
    """Everything beside what `make_materials` and `make_inputs` have made. One rank calls it."""
    (root / "link.tif").symlink_to(root / "image.tif")
    (root / "dangling").symlink_to(root / "nowhere" / "file")
    os.mkfifo(root / "pipe.png")
    os.mkfifo(root / "styled.qml")
    (root / "text.gpkg").write_text("no database\n")
    square = shapely.to_wkb(np.array([shapely.box(0, 0, 1, 1)], object))
    pyogrio.raw.write(root / "parcels.gpkg", square, [], [], layer="mine", geometry_type="Polygon", crs="EPSG:32611")
    (root / "folder.png").mkdir()
    for name in (".own.tif.part", "mask.tif.msk", ".own.h5.part"):
        shutil.copy(root / "image.tif", root / name)
    _make_taken_folders(root / "taken")
    shutil.copy(root / "image.png", root / "taken" / "image" / "progress.png")
    shutil.copy(root / "image.tif", root / "taken" / "inside" / "checkpoints" / "image.tif")
    (root / "taken" / "noted" / "config.yaml").write_text("# my own notes\n" + (root / "good.yaml").read_text())


def _make_taken_folders(root: Path) -> None:
    """Folders for a run, in each of which one name is something else than the run's."""
    for name in ("events", "checkpoints", "metrics", "image", "inside/checkpoints", "noted"):
        (root / name).mkdir(parents=True)
    for name in ("events", "checkpoints"):
        (root / name / name).write_text("a file in the way\n")
    os.mkfifo(root / "metrics" / "metrics.jsonl")
