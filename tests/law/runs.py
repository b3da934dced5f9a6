"""Whole runs by the commands' own code on a small scene, and what two runs that are one must have in common."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shapely
import torch
from rasterio.transform import from_origin
from safetensors.torch import load_file

from tests.small_files import write_raster
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.comm.mesh import Mesh
from tiledseg.commands.options import to_yaml
from tiledseg.config.run import Config, DataConfig, ModelConfig, OptimizerConfig, RunConfig, TilingConfig, TrainConfig
from tiledseg.system.outputs import VALIDATION
from tiledseg.training.run_files import read_validations
from tiledseg.training.start import start

HEIGHT, WIDTH = 70, 57
SAME_TO_THE_DIGIT = ("step", "epoch", "pixels", "lr", "loss_scale", "skipped")
IMAGES = 3


def write_scene(folder: Path) -> None:
    """Noise with a pattern that can be learned, some without data, and two images that are turned; polygons and an area
    of the first."""
    draw = np.random.default_rng(8)
    labels_HW = (np.add.outer(np.arange(HEIGHT) // 9, np.arange(WIDTH) // 7) % 3).astype(np.uint8)
    image_CHW = draw.integers(0, 90, (4, HEIGHT, WIDTH)) + 50 * labels_HW
    image_CHW[:, :5, :6] = 0
    place = {"crs": "EPSG:32633", "transform": from_origin(500000, 5000000, 0.5, 0.5)}
    for number in range(IMAGES):
        end = f"-{number}" if number else ""
        turned_CHW = np.roll(image_CHW.astype(np.uint8), 11 * number, axis=1)
        write_raster(folder / f"image{end}.tif", turned_CHW, nodata=0, **place)
        write_raster(folder / f"labels{end}.tif", np.roll(labels_HW, 11 * number, axis=0)[None], **place)
    _write_polygons(folder)


def _write_polygons(folder: Path) -> None:
    """Roofs and ponds as boxes of the image, and the area as a lozenge of it."""
    from tests.raster.polygons_drawn import write_vectors  # with pandas, which other ranks need not load

    def box(top: float, left: float, bottom: float, right: float) -> shapely.Polygon:
        xs, ys = [500000 + WIDTH * x / 2 for x in (left, right)], [5000000 - HEIGHT * y / 2 for y in (top, bottom)]
        return shapely.box(min(xs), min(ys), max(xs), max(ys))

    boxes = [box(0.07 * k, 0.9 - 0.08 * k, 0.07 * k + 0.3, 1.03 - 0.08 * k) for k in range(10)]
    write_vectors(folder / "labels.gpkg", boxes, "EPSG:32633", kind=["roof", "pond"] * 5)
    lozenge = box(0.2, 0.2, 0.8, 0.8).centroid.buffer(0.225 * WIDTH, quad_segs=1)
    write_vectors(folder / "area.gpkg", [lozenge], "EPSG:32633")


def configuration(folder: Path, name: str, keys: Mapping[str, Any] = {}) -> Config:
    """Four steps of a small U-Net over nine tiles, with a validation after two."""
    image, labels = [str(folder / "image.tif")], [str(folder / "labels.tif")]
    base = Config(
        data=DataConfig(image, labels, image, labels, classes=3),
        tiling=TilingConfig(grid=3),
        model=ModelConfig(levels=3, base_channels=4, dropout=0.2),
        optimizer=OptimizerConfig(name="adamw", lr=0.002, policy="cosine", warmup_steps=2, clip_norm=5.0),
        train=TrainConfig(epochs=4, precision="fp64", validate_every=2),
        run=RunConfig(output=str(folder / name), verbosity=0),
    )
    return changed(base, keys)


def changed(config: Config, keys: Mapping[str, Any]) -> Config:
    """With other values of keys (`train.epochs`), or of whole groups (`model`)."""
    for name, value in keys.items():
        group, _, key = name.partition(".")
        config = replace(config, **{group: replace(getattr(config, group), **{key: value}) if key else value})
    return config


def run(config: Config, mesh: Mesh) -> list[dict[str, Any]]:
    """Train on `mesh`; the metrics, on every rank."""
    assert start(config, to_yaml(config), mesh) == 0
    mesh.communicator.barrier()
    lines = (Path(config.run.output) / "metrics.jsonl").read_text().splitlines()
    mesh.communicator.barrier()  # a test may go on with another run into the same folder
    return [json.loads(line) for line in lines]


def losses(lines: list[dict[str, Any]]) -> list[float]:
    """Return the losses of the steps among a run's metrics."""
    return [line["loss"] for line in lines if "loss" in line]


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def copied(folder: Path, name: str, mesh: Mesh) -> Path:
    """A copy of a run's folder beside it. Collective."""
    return mesh.on_root(lambda: Path(shutil.copytree(folder, folder.with_name(name))))


def check_same_run(found: Path, wanted: Path, bound: float) -> None:
    """Metrics, scores, what is counted and kept, weights, the optimizer's state, and the pictures of validations. A
    bound of 0 asks for the same bits."""
    ours, theirs = ([json.loads(x) for x in (f / "metrics.jsonl").read_text().splitlines()] for f in (found, wanted))
    assert losses(ours) == pytest.approx(losses(theirs), rel=bound, abs=1e-12 if bound else 0)
    assert len(losses(ours)) > 1
    assert len(set(losses(theirs))) > 1
    for one, other in zip(ours, theirs, strict=True):
        assert {key: one.get(key) for key in SAME_TO_THE_DIGIT} == {key: other.get(key) for key in SAME_TO_THE_DIGIT}
        check_alike(one.get("val"), other.get("val"), bound)
    one, other = summary(found), summary(wanted)
    for key in ("steps", "epochs", "finished", "stopped_early", "class_weights", "best", "val"):
        check_alike(one.get(key), other.get(key), bound)
    if bound < 1e-6:
        check_same_checkpoint(found, wanted, bound)
        assert figures(found) == figures(wanted)
        for path in sorted((wanted / VALIDATION).glob("*.png")):
            assert (found / VALIDATION / path.name).read_bytes() == path.read_bytes(), path.name


def check_alike(one: Any, other: Any, bound: float) -> None:
    """Numbers to `bound`, all else equal; scores are counts of pixels, of which rounding moves a few."""
    if isinstance(other, dict):
        assert one.keys() == other.keys()
        for key in other.keys() - {"seconds", "panel", "seconds_per_step"}:
            check_alike(one[key], other[key], bound)
    elif isinstance(other, list):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            check_alike(mine, theirs, bound)
    elif isinstance(other, float):
        least = 0.0 if not bound else 1e-12 if bound < 1e-6 else 0.02
        assert one == pytest.approx(other, rel=bound, abs=least, nan_ok=True)
    else:
        assert one == other or bound > 1e-6


def check_same_checkpoint(found: Path, wanted: Path, bound: float) -> None:
    """The same tensors under the same names, as if one rank had written them."""
    one, other = find_checkpoint(found), find_checkpoint(wanted)
    for path in other.path.glob("*.safetensors"):
        mine, theirs = load_file(one.path / path.name), load_file(path)
        assert mine.keys() == theirs.keys()
        for key in theirs:
            torch.testing.assert_close(mine[key], theirs[key], rtol=1000 * bound, atol=10 * bound, msg=key)
    if other.saved.best is not None:
        assert find_checkpoint(found, "best").saved.step == find_checkpoint(wanted, "best").saved.step


def figures(folder: Path) -> list[dict[str, Any]]:
    """Return the figures of every validation, but for the loss, which is a sum of fractions, and the time."""
    return [{k: v for k, v in each.items() if k not in ("loss", "seconds")} for each in read_validations(folder)]
