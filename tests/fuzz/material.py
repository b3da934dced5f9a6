"""What every case starts from: good rasters, a trained run, a tile store, and the results that they give."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from tests.small_files import write_raster, write_yaml

SIDE = 32
PREDICT = ["--checkpoint", "run", "--image", "image.tif", "--output", "map.tif", "--verbosity", "0", "--workers", "1"]
STORE = ["--images", "image.tif", "--labels", "labels.tif", "--grid", "2", "--levels", "2", "--convs-per-level", "1"]


def good_config() -> dict[str, Any]:
    """Two epochs of two steps, a checkpoint after each; paths are those of the case's folder."""
    return {
        "data": {"images": "image.tif", "labels": "labels.tif", "classes": 3, "workers": 1, "prefetch": 1},
        "tiling": {"grid": 2},
        "model": {"levels": 2, "convs_per_level": 1, "base_channels": 2},
        "optimizer": {"lr": 0.01},
        "train": {"epochs": 2, "tiles_per_step": 2, "checkpoint_every": 1, "keep_checkpoints": 9},
        "run": {"output": "run", "verbosity": 0},
    }


STEPS = 4


def make_rasters(root: Path) -> None:
    """An image, its labels and the configuration."""
    generator = np.random.default_rng(5)
    labels_HW = np.kron(generator.integers(0, 3, (8, 8)), np.ones((4, 4))).astype(np.uint8)
    image_CHW = (generator.integers(0, 60, (3, SIDE, SIDE)) + 60 * labels_HW + 1).astype(np.uint8)
    write_raster(root / "image.tif", image_CHW)
    write_raster(root / "labels.tif", labels_HW[None])
    write_yaml(root / "run.yaml", good_config())


def make_material() -> None:
    """Everything, in the current folder, by the commands themselves."""
    from tiledseg.predict import main as predict
    from tiledseg.tile import main as tile
    from tiledseg.train import main as train

    make_rasters(Path())
    assert train(["--config", "run.yaml"]) == 0
    assert tile([*STORE, "--output", "store.h5"]) == 0
    os.makedirs("reference")
    for step in sorted(Path("run/checkpoints").glob("step-*")):
        output = f"reference/{step.name}.tif"
        assert predict([*PREDICT, "--tiling.grid", "2", "--checkpoint", str(step), "--output", output]) == 0
    shutil.copy(newest_weights(Path("run")), "reference/weights")
    shutil.copy("store.h5", "reference/store.h5")
    assert (Path("reference") / f"step-{STEPS:06d}.tif").exists()


def newest_weights(run: Path) -> Path:
    """The weights of the checkpoint of the last step."""
    return run / "checkpoints" / f"step-{STEPS:06d}" / "model.safetensors"


def restore(pristine: Path, case: Path) -> None:
    """The case's folder as it was made, whatever the case before has done to it."""
    shutil.rmtree(case, ignore_errors=True)
    shutil.copytree(pristine, case)


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file below a folder, and a word for what is no file."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and not path.is_symlink():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif not path.is_dir():
            found[name] = "no file"
    return found
