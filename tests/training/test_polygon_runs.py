"""Runs whose labels or areas are polygons, beside runs with rasters of the same pixels; and spatial splits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import shapely
import torch

import tiledseg
from tests.answers import output_of, refuse
from tests.crash.runs import lines
from tests.raster.polygons_drawn import write_vectors
from tests.small_files import PLACE, UTM, write_raster, write_yaml
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.commands.options import parse_config
from tiledseg.evaluate import main as evaluate
from tiledseg.geometry.box import Box
from tiledseg.tile import main as tile
from tiledseg.train import main
from tiledseg.training.preparation import Preparation

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


def test_other_polygons_are_refused_in_one_line(root: Path) -> None:
    write_vectors(root / "far.gpkg", [shapely.box(0, 0, 9, 9)], UTM, kind=["road"])
    for labels, words in (("far.gpkg", "has no polygon in the image"), ("labels.tif", "no labels are polygons")):
        write_run(root, "refused", {"labels": str(root / labels), **POLYGONS})
        refuse(lambda: main(["--config", str(root / "refused.yaml")]), words)
    assert not (root / "refused").exists()


def as_csv(classes: list[dict[str, Any]]) -> str:
    """Return a file of classes: a row a value, the number of the class where a record has none."""
    values = [each.get("values", [each.get("value", number)]) for number, each in enumerate(classes)]
    rows = [f"{each['name']},{value}" for each, several in zip(classes, values, strict=True) for value in several]
    return "\n".join(["name,value", *rows]) + "\n"


def test_whatever_takes_labels_takes_polygons(root: Path) -> None:
    """Scores of a map and the tiles of somebody's loop: those of the raster that they draw; classes from a file."""
    map_HW = np.random.default_rng(5).integers(0, 3, (1, SIDE, SIDE), np.uint8)
    write_raster(root / "map.tif", map_HW, nodata=255)
    (root / "classes.csv").write_text(as_csv(CLASSES))
    flags = ["--prediction", str(root / "map.tif"), "--classes", str(root / "classes.csv"), "--format", "json"]
    found = []
    for labels, more in (("labels.tif", []), ("labels.gpkg", ["--label-attribute", "kind", "--background", "ground"])):
        words = [*flags, "--labels", str(root / labels), *more]
        found.append(json.loads(output_of(lambda words=words: evaluate(words))))
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


def test_a_store_trains_with_polygons_beside_it_and_in_it(root: Path) -> None:
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
    write_run(root, "moved", {**inside, "classes": [classes[k] for k in (0, 2, 1)]})
    words = "drawn.h5#0:labels holds class road as 1, but in data.classes it is 2; give the classes"
    refuse(lambda: main(["--config", str(root / "moved.yaml")]), words)


def test_a_store_of_polygons_refuses_in_one_line(root: Path) -> None:
    write_vectors(root / "sea.gpkg", [shapely.box(0, 0, 9, 9)], UTM, kind=[1])
    numbered = ["--classes", "3", "--background", "0"]
    for labels, flags, words in (
        ("labels.gpkg", ["--label-attribute", "kind", "--background", "ground"], "one of class 0, class 1, or ignored"),
        ("labels.tif", numbered, "--background is given, but no labels are"),
        ("sea.gpkg", [*numbered, "--label-attribute", "kind"], "no polygon in"),
    ):
        flags = ["--labels", str(root / labels), *flags]
        refuse(lambda flags=flags: cut(root, *flags, output="never.h5"), words)
    assert not list(root.glob("never*"))


WIDE = 96
AREA = ((5, 7, 40, 60), (30, 50, 70, 90))
STILL = {"lr": 1e-30}  # no weight moves by a bit


@pytest.fixture(scope="module")
def areas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    areas = tmp_path_factory.mktemp("areas")
    generator = np.random.default_rng(6)
    labels_HW = np.kron(generator.integers(0, 3, (12, 12)), np.ones((8, 8))).astype(np.uint8)
    write_raster(areas / "image.tif", (generator.integers(1, 90, (3, WIDE, WIDE)) + 50 * labels_HW).astype(np.uint8))
    write_raster(areas / "labels.tif", labels_HW[None])
    inside_HW = np.zeros((WIDE, WIDE), bool)
    for top, left, bottom, right in AREA:
        inside_HW[top:bottom, left:right] = True
    np.save(areas / "inside.npy", inside_HW)
    write_raster(areas / "masked.tif", np.where(inside_HW, labels_HW, 255).astype(np.uint8)[None])
    write_vectors(areas / "area.gpkg", [on_the_ground(*box) for box in AREA], UTM)
    return areas


def config(areas: Path, name: str, data: dict[str, Any], **changes: dict[str, Any]) -> None:
    data = {"labels": str(areas / "labels.tif"), "classes": 3, **data}
    write_run(areas, name, data, **{"tiling": {"grid": 6}, **changes})


def train_in(areas: Path, name: str, data: dict[str, Any], **changes: dict[str, Any]) -> Path:
    config(areas, name, data, **changes)
    assert main(["--config", str(areas / f"{name}.yaml")]) == 0
    return areas / name


def told(folder: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "tiles"} for line in lines(folder)]


@pytest.mark.parametrize("halo", ["read", "layer"])
def test_outside_an_area_nothing_counts(areas: Path, halo: str) -> None:
    """As with labels that are left out there; tiles wholly outside are not computed, in mode read."""
    data = {"val_images": str(areas / "image.tif"), "normalize": False}
    mode = {"parallel": {"halo": halo}}
    area = train_in(
        areas,
        f"area-{halo}",
        {**data, "val_labels": str(areas / "labels.tif"), "area": str(areas / "area.gpkg")},
        **mode,
    )
    masked = {**data, "labels": str(areas / "masked.tif"), "val_labels": str(areas / "masked.tif")}
    assert told(area) == told(train_in(areas, f"masked-{halo}", masked, **mode))
    inside_HW = np.load(areas / "inside.npy")
    blocks = sum(bool(inside_HW[r : r + 16, c : c + 16].any()) for r in range(0, WIDE, 16) for c in range(0, WIDE, 16))
    assert {line["tiles"] for line in lines(area) if "tiles" in line} == {blocks if halo == "read" else 36}
    assert blocks < 30


def test_statistics_are_those_of_the_area(areas: Path) -> None:
    folder = train_in(areas, "statistics", {"area": str(areas / "area.gpkg")}, train={"epochs": 1})
    with rasterio.open(areas / "image.tif") as dataset:
        inside = dataset.read()[:, np.load(areas / "inside.npy")].astype(float)
    found = find_checkpoint(folder).saved.normalization
    np.testing.assert_allclose(found.mean, inside.mean(axis=1), rtol=1e-12)
    np.testing.assert_allclose(found.std, inside.std(axis=1), rtol=1e-12)


BLOCKS: dict[str, Any] = {"blocks": [2, 3], "share": 0.34, "seed": 1}
SPLIT = {"split": BLOCKS}


def prepared(areas: Path, data: dict[str, Any], **changes: dict[str, Any]) -> Preparation:
    config(areas, "asked", data, **changes)
    return Preparation(parse_config(["--config", str(areas / "asked.yaml")], "", ""), 1 << 30, 1)


def marked(areas: Path, name: str, where_HW: Any) -> str:
    """The image with other values in some pixels."""
    with rasterio.open(areas / "image.tif") as dataset:
        pixels_CHW = dataset.read()
    other = np.random.default_rng(9).integers(1, 255, pixels_CHW.shape).astype(np.uint8)
    write_raster(areas / f"{name}.tif", np.where(where_HW, other, pixels_CHW))
    return str(areas / f"{name}.tif")


@pytest.mark.parametrize("halo", ["read", "layer"])
def test_validation_never_sees_what_is_trained_on(areas: Path, halo: str) -> None:
    """Every pixel that is trained on changes: no score does, to the last bit, where the weights stay. Without a gap
    some do. Every pixel that is validated on changes: no step does."""
    found = prepared(areas, SPLIT)
    assert found.validation is not None
    whole = Box.of_shape((WIDE, WIDE))
    trained_HW, held_out_HW = (part.parts[0].inside(whole) for part in (found.training, found.validation))
    gap = found.training.parts[0].gap
    assert gap == max(found.plan.footprint.before, found.plan.footprint.after) > 0
    assert trained_HW.any()
    assert held_out_HW.sum() == WIDE * WIDE // 3

    def lines_with(kind: str, where_HW: Any, data: dict[str, Any], **changes: Any) -> list[dict[str, Any]]:
        """Return the lines of steps (`loss`) or of validations (`val`) of a run whose image has other pixels there."""
        name = f"{kind}-{halo}-{len(list(areas.iterdir()))}"
        folder = train_in(areas, name, {**data, "images": marked(areas, f"{name}-image", where_HW)}, **changes)
        return [line for line in lines(folder) if kind in line]

    none_HW, mode = np.zeros((WIDE, WIDE), bool), {"parallel": {"halo": halo}}
    still = {"optimizer": STILL, **mode}
    data = {**SPLIT, "normalize": False}
    scores = lines_with("val", none_HW, data, **still)
    assert scores == lines_with("val", trained_HW, data, **still)
    assert scores[0]["val"]["loss"] is not None
    assert lines_with("loss", none_HW, SPLIT, **mode) == lines_with("loss", held_out_HW, SPLIT, **mode)
    if halo == "read":
        close = {**data, "split": {**BLOCKS, "gap": 0}}
        near_HW = prepared(areas, close).training.parts[0].inside(whole)
        seen = lines_with("val", none_HW, close, **still)
        assert seen != lines_with("val", near_HW, close, **still), "without a gap the test would see it"


def test_refusals_and_notes(areas: Path) -> None:
    write_vectors(areas / "far.gpkg", [on_the_ground(5000, 5000, 5090, 5090)], UTM)
    tries: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"area": str(areas / "far.gpkg")}, {}, "leaves no pixel of"),
        ({"area": str(areas / "labels.tif")}, {}, "labels.tif"),
        ({"area": str(areas / "none.gpkg")}, {}, "none.gpkg"),
        (
            SPLIT,
            {"model": {"norm": "instance"}, "parallel": {"halo": "layer"}},
            "but model.norm is instance: its statistics",
        ),
        ({"split": {**BLOCKS, "gap": 90}}, {}, "leaves no pixel of"),
        ({"split": {**BLOCKS, "gap": "wide"}}, {}, "data.split: gap is 'wide'"),
        ({"split": "9 m"}, {}, "data.split: blocks is 9 m; give [R, C], blocks"),
        ({**SPLIT, "val_images": "a.tif", "val_labels": "b.tif"}, {}, "both given"),
    ]
    for data, changes, words in tries:
        config(areas, "refused", data, **changes)
        refuse(lambda: main(["--config", str(areas / "refused.yaml")]), words)
    assert not (areas / "refused").exists()
    assert any("below" in note for note in prepared(areas, {"split": {**BLOCKS, "gap": 1}}).warnings)
    seen = prepared(areas, SPLIT, model={"norm": "instance"}, parallel={"halo": "layer", "exact": False}).warnings
    assert any("data.split: model.norm is instance, and sees all blocks" in note for note in seen)


def test_a_run_goes_on_with_the_same_pixels(root: Path, areas: Path) -> None:
    polygons = {"labels": str(root / "labels.gpkg"), "classes": CLASSES, **POLYGONS}
    other_area, other_seed = {"area": str(areas / "area.gpkg")}, {"split": {**BLOCKS, "seed": 5}}
    for folder, data, changes in ((root, polygons, [{"background": "road"}]), (areas, SPLIT, [other_area, other_seed])):
        train_in(folder, "going", data, train={"epochs": 1})
        for change in changes:
            config(folder, "going", {**data, **change})
            words = f"is of another run: data.{next(iter(change))} is"
            refuse(lambda folder=folder: main(["--config", str(folder / "going.yaml")]), words)
