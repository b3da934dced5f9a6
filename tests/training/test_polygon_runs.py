"""Runs whose labels, or area, are polygons, against runs with rasters of the same pixels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shapely
import torch

import tiledseg
from tests.crash.runs import lines
from tests.raster.polygons_drawn import write_vectors
from tests.small_files import PLACE, UTM, write_raster, write_yaml
from tiledseg.evaluate import main as evaluate
from tiledseg.tile import main as tile
from tiledseg.train import main

SIDE = 64
CLASSES = [{"name": kind} for kind in ("ground", "road", "tree")]
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
    write_vectors(root / "labels.gpkg", [on_the_ground(*box[:4]) for box in BOXES], UTM, kind=kinds)
    return root


def write_run(root: Path, name: str, data: dict[str, Any], **changes: dict[str, Any]) -> None:
    """Write NAME.yaml, a run into NAME; `changes`: of keys, group by group."""
    config: dict[str, dict[str, Any]] = {
        "data": {"images": str(root / "image.tif"), "classes": CLASSES, "workers": 1, **data},
        "tiling": {"grid": 4},
        "model": {"levels": 2, "convs_per_level": 1, "base_channels": 2},
        "train": {"epochs": 2, "precision": "fp64", "checkpoint_every": 9},
        "run": {"output": str(root / name), "verbosity": 0},
    }
    write_yaml(root / f"{name}.yaml", config | {k: {**config.get(k, {}), **keys} for k, keys in changes.items()})


def train(root: Path, name: str, data: dict[str, Any]) -> Path:
    write_run(root, name, data)
    assert main(["--config", str(root / f"{name}.yaml")]) == 0
    return root / name


POLYGONS = {"label_attribute": "kind", "background": "ground"}


def test_polygons_train_as_the_raster_that_they_draw(root: Path) -> None:
    rasters = {"labels": str(root / "labels.tif"), "val_labels": str(root / "labels.tif")}
    vectors = {"labels": str(root / "labels.gpkg"), "val_labels": str(root / "labels.gpkg"), **POLYGONS}
    validation = {"val_images": str(root / "image.tif")}
    wanted = lines(train(root, "rasters", {**rasters, **validation}))
    assert lines(train(root, "vectors", {**vectors, **validation})) == wanted


def test_other_polygons_are_refused_in_one_line(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = {"labels": str(root / "labels.gpkg"), **POLYGONS}
    train(root, "going", data)
    write_vectors(root / "far.gpkg", [shapely.box(0, 0, 9, 9)], UTM, kind=["road"])
    for name, change, words in (
        ("going", {"background": "road"}, "is of another run: data.background is"),
        ("refused", {"labels": str(root / "far.gpkg")}, "has no polygon in the image"),
        ("refused", {"labels": str(root / "labels.tif")}, "no labels are polygons"),
    ):
        with pytest.raises(AssertionError):
            train(root, name, {**data, **change})
        error = capfd.readouterr().err
        assert words in error
        assert error.count("\n") == 1
    assert not (root / "refused").exists()


def as_csv(classes: list[dict[str, Any]]) -> str:
    """Return a file of classes: a row a value, the number of the class where a record has none."""
    values = [each.get("values", [each.get("value", number)]) for number, each in enumerate(classes)]
    rows = [f"{each['name']},{value}" for each, several in zip(classes, values, strict=True) for value in several]
    return "\n".join(["name,value", *rows]) + "\n"


def test_whatever_takes_labels_takes_polygons(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Scores of a map and the tiles of somebody's loop: those of the raster that they draw; classes from a file."""
    map_HW = np.random.default_rng(5).integers(0, 3, (1, SIDE, SIDE), np.uint8)
    write_raster(root / "map.tif", map_HW, nodata=255)
    (root / "classes.csv").write_text(as_csv(CLASSES))
    flags = ["--prediction", str(root / "map.tif"), "--classes", str(root / "classes.csv"), "--format", "json"]
    found = []
    for labels, more in (("labels.tif", []), ("labels.gpkg", ["--label-attribute", "kind", "--background", "ground"])):
        assert evaluate([*flags, "--labels", str(root / labels), *more]) == 0
        found.append(json.loads(capfd.readouterr().out))
    assert found[0]["confusion_matrix"] == found[1]["confusion_matrix"]
    assert found[1]["class_names"] == ["ground", "road", "tree"]
    scores = tiledseg.evaluate_map(root / "map.tif", root / "labels.gpkg", classes=CLASSES, **POLYGONS)
    assert scores.to_json()["iou"] == found[0]["iou"]
    options = {"halo": 2, "grid": 3, "classes": str(root / "classes.csv")}
    raster, polygons = (
        tiledseg.TileDataset(root / "image.tif", root / labels, **options, **more)
        for labels, more in (("labels.tif", {}), ("labels.gpkg", POLYGONS))
    )
    for ours, theirs in zip(polygons, raster, strict=True):
        assert torch.equal(ours["mask"], theirs["mask"])
    assert {int(k) for item in polygons for k in item["mask"].unique()} == {0, 1, 2, 255}


def cut(root: Path, *more: str, output: str = "tiles.h5") -> int:
    network = ["--levels", "2", "--convs-per-level", "1", "--grid", "4"]
    return tile(["--images", str(root / "image.tif"), "--output", str(root / output), *network, *more])


def test_a_store_trains_with_polygons_beside_it_and_in_it(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What it trains is what the raster's image does; in it lie the classes' numbers, whatever their raw values."""
    classes = [{"name": "ground", "value": 7}, {"name": "road", "value": 5}, {"name": "tree", "values": [3]}]
    (root / "drawn.csv").write_text(as_csv(classes))
    asked = ["--labels", str(root / "labels.gpkg"), "--classes", str(root / "drawn.csv")]
    drawn = [*asked, "--label-attribute", "kind", "--background", "ground"]
    labels = {"labels": str(root / "labels.gpkg"), **POLYGONS, "classes": classes}
    wanted = lines(train(root, "beside-image", labels))
    assert cut(root) == 0
    assert lines(train(root, "beside-store", {"images": str(root / "tiles.h5"), **labels})) == wanted
    assert cut(root, *drawn, output="drawn.h5") == 0
    inside = {"images": str(root / "drawn.h5"), "labels": [], "classes": classes}
    assert lines(train(root, "inside-store", inside)) == wanted
    capfd.readouterr()
    with pytest.raises(AssertionError):
        train(root, "moved", {**inside, "classes": [classes[k] for k in (0, 2, 1)]})
    error = capfd.readouterr().err
    assert "drawn.h5#0:labels holds class road as 1, but in data.classes it is 2; give the classes" in error
    assert error.count("\n") == 1


def test_a_store_of_polygons_refuses_in_one_line(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_vectors(root / "sea.gpkg", [shapely.box(0, 0, 9, 9)], UTM, kind=[1])
    numbered = ["--classes", "3", "--background", "0"]
    for labels, flags, words in (
        ("labels.gpkg", ["--label-attribute", "kind", "--background", "ground"], "one of class 0, class 1, or ignored"),
        ("labels.tif", numbered, "--background is given, but no labels are"),
        ("sea.gpkg", [*numbered, "--label-attribute", "kind"], "no polygon in"),
    ):
        assert cut(root, "--labels", str(root / labels), *flags, output="never.h5") == 2
        error = capfd.readouterr().err
        assert words in error
        assert error.count("\n") == 1
    assert not list(root.glob("never*"))
