"""The ablation on real imagery, in a small form: two cities that are drawn, three rows, and the table."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import rasterio
from numpy.typing import NDArray

from benchmarks.launching import NOT_RUNNABLE
from benchmarks.naip_trees import maps
from benchmarks.naip_trees.__main__ import main
from benchmarks.naip_trees.cities import LEARNT, OTHER, image_of, labels_of
from benchmarks.naip_trees.maps import OWN_LIGHT, WAYS, map_file
from benchmarks.naip_trees.network import build
from benchmarks.naip_trees.rows import ROWS, of_run, read_rows
from tests.small_files import write_raster, write_yaml
from tiledseg.api import halo
from tiledseg.commands.options import parse_config

SHAPE = (96, 160)
ROWS_HERE = {
    "base": {
        "data": {
            "images": f"{LEARNT}_image.tif",
            "labels": f"{LEARNT}_trees.tif",
            "classes": [{"name": "ground", "values": [0]}, {"name": "trees", "values": [1]}],
            "bands": [1, 2, 3, 4],
            "split": [3, 5],
            "split_gap": 8,
        },
        "model": {"levels": 2, "base_channels": 4, "norm": "batch"},
        "parallel": {"halo": "layer", "mesh": [1, 1], "exact": False},
        "optimizer": {"lr": 0.02},
        "train": {"sampling": "windows", "window": 32, "window_halo": "none", "windows_per_step": 4},
    },
    "rows": {
        "plain": {},
        "weights": {"after": "plain", "train": {"class_weights": [1, 4]}},
        "whole": {"after": "weights", "data": {"split": None, "split_gap": None}},
    },
}


def draw_city(folder: Path, city: str, seed: int) -> NDArray[np.uint8]:
    """Discs that are brighter in the last band; their mask."""
    generator = np.random.default_rng(seed)
    rows, cols = np.mgrid[: SHAPE[0], : SHAPE[1]]
    labels_HW = np.zeros(SHAPE, np.uint8)
    for row, col in zip(generator.integers(0, SHAPE[0], 25), generator.integers(0, SHAPE[1], 25), strict=True):
        labels_HW[(rows - row) ** 2 + (cols - col) ** 2 < 20] = 1
    image_CHW = generator.integers(0, 100, (4, *SHAPE)) + 100 * np.stack([0 * labels_HW] * 3 + [labels_HW])
    write_raster(image_of(folder, city), image_CHW.astype(np.uint8))
    write_raster(labels_of(folder, city), labels_HW[None])
    return labels_HW


@pytest.fixture(scope="module")
def cities(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cities")
    draw_city(folder, LEARNT, 1)
    draw_city(folder, OTHER, 2)
    return folder


@pytest.fixture(scope="module")
def words(cities: Path) -> list[str]:
    write_yaml(cities / "rows.yaml", ROWS_HERE)
    return ["--data", str(cities), "--out", str(cities / "out"), "--file", str(cities / "rows.yaml")]


def of_trees(found_HW: NDArray[np.uint8], labels_HW: NDArray[np.uint8]) -> float:
    """By a confusion matrix."""
    counts = np.histogram2d(found_HW.ravel(), labels_HW.ravel(), [2, 2], [[0, 1], [0, 1]])[0]
    return counts[1, 1] / (counts.sum() - counts[0, 0])


def test_a_row_is_trained_once_and_reported(
    cities: Path, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second call trains nothing. Scores are those of the maps; of the other city they come with --report alone."""
    monkeypatch.setattr(maps, "WAYS", {OWN_LIGHT: WAYS[OWN_LIGHT]})
    train = [*words, "--rows", "weights", "--seeds", "1", "--steps", "24"]
    assert main(train) == 0
    file = cities / "out/weights/0/result.json"
    before = file.stat().st_mtime_ns
    assert main(train) == 0
    assert before == file.stat().st_mtime_ns
    assert main([*words, "--maps"]) == 0
    assert "other city" not in capsys.readouterr().out
    assert main([*words, "--report"]) == 0
    table = capsys.readouterr().out
    assert "| weights | 1 | 24 | " in table
    assert "other city" in table
    found = json.loads(file.read_text())
    seen_HW = np.zeros(SHAPE, bool)
    seen_HW[:32, 96:128] = seen_HW[32:64, 128:] = seen_HW[64:, 128:] = True  # the held-out blocks
    for city, key, there_HW in ((LEARNT, "held_out_maps", seen_HW), (OTHER, "other_city", np.ones_like(seen_HW))):
        map_HW, labels_HW = read(map_file(file.parent, city, OWN_LIGHT)), read(labels_of(cities, city))
        score = of_trees(map_HW[there_HW], labels_HW[there_HW])
        assert found[key] == {OWN_LIGHT: pytest.approx(score, abs=1e-12)}
        assert score > 0.1
    assert found["held_out"] > 0.1


def test_without_the_imagery_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", str(tmp_path), "--out", str(tmp_path / "out")]) == NOT_RUNNABLE
    assert capsys.readouterr().err == f"not runnable: {tmp_path} has no {LEARNT}_image.tif\n"


def test_every_row_is_a_configuration(cities: Path, tmp_path: Path) -> None:
    """And a row differs from the one that it is after by the keys that it names."""
    rows = read_rows()
    for name, row in rows.items():
        write_yaml(tmp_path / "row.yaml", of_run(row, cities, tmp_path / "run", 100, 0))
        parse_config(["--config", str(tmp_path / "row.yaml")], "train", "").check()
        held_out = {"split", "split_gap"} if name == "whole" else set()  # which trains on all blocks
        assert row["data"] == {key: told for key, told in rows["plain"]["data"].items() if key not in held_out}, name
    assert rows["weights"]["train"] == {**rows["plain"]["train"], "class_weights": [1, 4]}
    assert ROWS.exists()


def test_the_network_at_half_size_has_the_gap_as_halo() -> None:
    for arguments in ({}, read_rows()["dropout"]["model"]["arguments"]):
        found = halo(build(4, 2, **arguments).eval(), 4)
        assert (found.halo, found.alignment) == (read_rows()["plain"]["data"]["split_gap"], 16)


def read(path: Path) -> NDArray[np.uint8]:
    with rasterio.open(path) as file:
        return file.read(1)
