"""What an output must not replace, or cannot be."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def make_outputs(root: Path) -> None:
    """Everything beside what `make_materials` and `make_inputs` have made. One rank calls it."""
    (root / "link.tif").symlink_to(root / "image.tif")
    (root / "dangling").symlink_to(root / "nowhere" / "file")
    os.mkfifo(root / "pipe.png")
    (root / "folder.png").mkdir()
    for name in (".own.tif.part", "mask.tif.msk", "own.h5.partial"):
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
