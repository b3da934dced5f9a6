"""Areas and spatial splits in runs: what does not count changes nothing, and no run sees what it is judged by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio

from tests.crash.runs import lines
from tests.raster.polygons_drawn import write_vectors
from tests.small_files import UTM, write_raster
from tests.training.test_polygon_runs import on_the_ground, write_run
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.commands.options import parse_config
from tiledseg.geometry.box import Box
from tiledseg.train import main
from tiledseg.training.preparation import Preparation, prepare

SIDE = 96
AREA = ((5, 7, 40, 60), (30, 50, 70, 90))
STILL = {"lr": 1e-30}  # no weight moves by a bit


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("areas")
    generator = np.random.default_rng(6)
    labels_HW = np.kron(generator.integers(0, 3, (12, 12)), np.ones((8, 8))).astype(np.uint8)
    write_raster(root / "image.tif", (generator.integers(1, 90, (3, SIDE, SIDE)) + 50 * labels_HW).astype(np.uint8))
    write_raster(root / "labels.tif", labels_HW[None])
    inside_HW = np.zeros((SIDE, SIDE), bool)
    for top, left, bottom, right in AREA:
        inside_HW[top:bottom, left:right] = True
    np.save(root / "inside.npy", inside_HW)
    write_raster(root / "masked.tif", np.where(inside_HW, labels_HW, 255).astype(np.uint8)[None])
    write_vectors(root / "area.gpkg", [on_the_ground(*box) for box in AREA], UTM)
    return root


def config(root: Path, name: str, data: dict[str, Any], **changes: dict[str, Any]) -> None:
    data = {"labels": str(root / "labels.tif"), "classes": 3, **data}
    write_run(root, name, data, **{"tiling": {"grid": 6}, **changes})


def train(root: Path, name: str, data: dict[str, Any], **changes: dict[str, Any]) -> Path:
    config(root, name, data, **changes)
    assert main(["--config", str(root / f"{name}.yaml")]) == 0
    return root / name


def told(folder: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "tiles"} for line in lines(folder)]


@pytest.mark.parametrize("halo", ["read", "layer"])
def test_outside_an_area_nothing_counts(root: Path, halo: str) -> None:
    """As with labels that are left out there; tiles wholly outside are not computed, in mode read."""
    data = {"val_images": str(root / "image.tif"), "normalize": False}
    mode = {"parallel": {"halo": halo}}
    area = train(
        root, f"area-{halo}", {**data, "val_labels": str(root / "labels.tif"), "area": str(root / "area.gpkg")}, **mode
    )
    masked = {**data, "labels": str(root / "masked.tif"), "val_labels": str(root / "masked.tif")}
    assert told(area) == told(train(root, f"masked-{halo}", masked, **mode))
    inside_HW = np.load(root / "inside.npy")
    blocks = sum(bool(inside_HW[r : r + 16, c : c + 16].any()) for r in range(0, SIDE, 16) for c in range(0, SIDE, 16))
    assert {line["tiles"] for line in lines(area) if "tiles" in line} == {blocks if halo == "read" else 36}
    assert blocks < 30


def test_statistics_are_those_of_the_area(root: Path) -> None:
    folder = train(root, "statistics", {"area": str(root / "area.gpkg")}, train={"epochs": 1})
    with rasterio.open(root / "image.tif") as dataset:
        inside = dataset.read()[:, np.load(root / "inside.npy")].astype(float)
    found = find_checkpoint(folder).saved.normalization
    np.testing.assert_allclose(found.mean, inside.mean(axis=1), rtol=1e-12)
    np.testing.assert_allclose(found.std, inside.std(axis=1), rtol=1e-12)


BLOCKS: dict[str, Any] = {"blocks": [2, 3], "share": 0.34, "seed": 1}
SPLIT = {"split": BLOCKS}


def prepared(root: Path, data: dict[str, Any], **changes: dict[str, Any]) -> Preparation:
    config(root, "asked", data, **changes)
    return prepare(parse_config(["--config", str(root / "asked.yaml")], "", ""), 1 << 30, 1)


def marked(root: Path, name: str, where_HW: Any) -> str:
    """The image with other values in some pixels."""
    with rasterio.open(root / "image.tif") as dataset:
        pixels_CHW = dataset.read()
    other = np.random.default_rng(9).integers(1, 255, pixels_CHW.shape).astype(np.uint8)
    write_raster(root / f"{name}.tif", np.where(where_HW, other, pixels_CHW))
    return str(root / f"{name}.tif")


@pytest.mark.parametrize("halo", ["read", "layer"])
def test_validation_never_sees_what_is_trained_on(root: Path, halo: str) -> None:
    """Every pixel that is trained on changes: no score does, to the last bit, where the weights stay. Without a gap
    some do. Every pixel that is validated on changes: no step does."""
    found = prepared(root, SPLIT)
    assert found.validation is not None
    whole = Box.of_shape((SIDE, SIDE))
    trained_HW, held_out_HW = (part.parts[0].inside(whole) for part in (found.training, found.validation))
    gap = found.training.parts[0].gap
    assert gap == max(found.plan.footprint.before, found.plan.footprint.after) > 0
    assert trained_HW.any()
    assert held_out_HW.sum() == SIDE * SIDE // 3

    def lines_with(kind: str, where_HW: Any, data: dict[str, Any], **changes: Any) -> list[dict[str, Any]]:
        """Return the lines of steps (`loss`) or of validations (`val`) of a run whose image has other pixels there."""
        name = f"{kind}-{halo}-{len(list(root.iterdir()))}"
        folder = train(root, name, {**data, "images": marked(root, f"{name}-image", where_HW)}, **changes)
        return [line for line in lines(folder) if kind in line]

    none_HW, mode = np.zeros((SIDE, SIDE), bool), {"parallel": {"halo": halo}}
    still = {"optimizer": STILL, **mode}
    data = {**SPLIT, "normalize": False}
    scores = lines_with("val", none_HW, data, **still)
    assert scores == lines_with("val", trained_HW, data, **still)
    assert scores[0]["val"]["loss"] is not None
    assert lines_with("loss", none_HW, SPLIT, **mode) == lines_with("loss", held_out_HW, SPLIT, **mode)
    if halo == "read":
        close = {**data, "split": {**BLOCKS, "gap": 0}}
        near_HW = prepared(root, close).training.parts[0].inside(whole)
        seen = lines_with("val", none_HW, close, **still)
        assert seen != lines_with("val", near_HW, close, **still), "without a gap the test would see it"


def test_refusals_and_notes(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_vectors(root / "far.gpkg", [on_the_ground(5000, 5000, 5090, 5090)], UTM)
    tries: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"area": str(root / "far.gpkg")}, {}, "leaves no pixel of"),
        ({"area": str(root / "labels.tif")}, {}, "labels.tif"),
        ({"area": str(root / "none.gpkg")}, {}, "none.gpkg"),
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
        config(root, "refused", data, **changes)
        assert main(["--config", str(root / "refused.yaml")]) == 2, words
        error = capfd.readouterr().err
        assert words in error
        assert error.count("\n") == 1
    assert not (root / "refused").exists()
    assert any("below" in note for note in prepared(root, {"split": {**BLOCKS, "gap": 1}}).warnings)
    seen = prepared(root, SPLIT, model={"norm": "instance"}, parallel={"halo": "layer", "exact": False}).warnings
    assert any("data.split: model.norm is instance, and sees all blocks" in note for note in seen)


def test_a_run_goes_on_with_the_same_pixels(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(root, "going", SPLIT, train={"epochs": 1})
    changes = [{"area": str(root / "area.gpkg")}, {"split": [2, 2]}, {"split": {**BLOCKS, "seed": 5}}]
    for change in changes:
        config(root, "going", {**SPLIT, **change})
        assert main(["--config", str(root / "going.yaml")]) == 2
        assert f"is of another run: data.{next(iter(change))} is" in capfd.readouterr().err
    assert json.loads((root / "going" / "summary.json").read_text())["finished"]
