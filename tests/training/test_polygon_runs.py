"""Runs whose labels, or area, are polygons, against runs with rasters of the same pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shapely

from tests.crash.runs import lines
from tests.raster.polygons_drawn import write_vectors
from tests.small_files import PLACE, UTM, write_raster, write_yaml
from tiledseg.train import main

pytestmark = pytest.mark.usefixtures("without_plots")
SIDE = 64
BOXES = ((3, 5, 30, 40, "road"), (20, 10, 60, 33, "tree"), (8, 44, 50, 60, "road"))  # top, left, bottom, right


def on_the_ground(top: int, left: int, bottom: int, right: int) -> Any:
    return shapely.box(PLACE.c + left / 2, PLACE.f - bottom / 2, PLACE.c + right / 2, PLACE.f - top / 2)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("polygons")
    labels_HW = np.zeros((SIDE, SIDE), np.uint8)
    for top, left, bottom, right, kind in BOXES:
        labels_HW[top:bottom, left:right] = 1 + (kind == "tree")
    image_CHW = (np.random.default_rng(4).integers(0, 90, (3, SIDE, SIDE)) + 50 * labels_HW).astype(np.uint8)
    write_raster(root / "image.tif", image_CHW)
    write_raster(root / "labels.tif", labels_HW[None])
    kinds = [kind for *_, kind in BOXES]
    write_vectors(root / "labels.gpkg", [on_the_ground(*box[:4]) for box in BOXES], UTM, kind=kinds, sort=kinds)
    return root


def train(root: Path, name: str, data: dict[str, Any], **groups: dict[str, Any]) -> Path:
    config = {
        "data": {
            **{"images": str(root / "image.tif"), "classes": [{"name": kind} for kind in ("ground", "road", "tree")]},
            **{"workers": 1, "prefetch": 1, **data},
        },
        "tiling": {"grid": 4},
        "model": {"levels": 2, "convs_per_level": 1, "base_channels": 2},
        "train": {"epochs": 2, "precision": "fp64", "checkpoint_every": 9},
        "run": {"output": str(root / name), "verbosity": 0},
    }
    write_yaml(root / f"{name}.yaml", {**config, **groups})
    assert main(["--config", str(root / f"{name}.yaml")]) == 0
    return root / name


POLYGONS = {"label_attribute": "kind", "background": "ground"}


def test_polygons_train_as_the_raster_that_they_draw(root: Path) -> None:
    rasters = {"labels": str(root / "labels.tif"), "val_labels": str(root / "labels.tif")}
    vectors = {"labels": str(root / "labels.gpkg"), "val_labels": str(root / "labels.gpkg"), **POLYGONS}
    validation = {"val_images": str(root / "image.tif")}
    wanted = lines(train(root, "rasters", {**rasters, **validation}))
    assert lines(train(root, "vectors", {**vectors, **validation})) == wanted


@pytest.mark.parametrize("change", [{"background": "road"}, {"label_attribute": "sort"}, {"label_layer": "labels"}])
def test_a_run_goes_on_with_the_same_polygons(
    root: Path, change: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    data = {"labels": str(root / "labels.gpkg"), **POLYGONS}
    train(root, "going", data)
    with pytest.raises(AssertionError):
        train(root, "going", {**data, **change})
    key = next(iter(change))
    assert f"is of another run: data.{key} is" in capfd.readouterr().err


def test_refusals_are_one_line(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_vectors(root / "far.gpkg", [shapely.box(0, 0, 9, 9)], UTM, kind=["road"])
    for labels, words in (("far.gpkg", "has no polygon in the image"), ("labels.tif", "no labels are polygons")):
        with pytest.raises(AssertionError):
            train(root, "refused", {"labels": str(root / labels), **POLYGONS})
        error = capfd.readouterr().err
        assert words in error
        assert error.count("\n") == 1
    assert not (root / "refused").exists()
