"""The images and labels of a run that goes on: moved, added, left out, swapped, rewritten."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import rasterio
from rasterio.windows import Window

from tests.crash.runs import Material
from tests.small_files import tree, write_raster
from tests.training.test_start import config_of, run
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.config.run import Config
from tiledseg.errors import CheckpointError, LabelError
from tiledseg.raster.reader import identify


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rasters and a run of one epoch, three steps; a checkpoint after the second too."""
    material = Material.make(tmp_path_factory.mktemp("sources"))
    config = config_of(material, material.root / "run")
    config.data.val_images, config.data.val_labels = [], []
    assert run(config) == 0
    return material.root


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """All of it in another place: images are found by their content."""
    return Path(shutil.copytree(finished, tmp_path / "moved"))


def onward(folder: Path, *names: str, middle: bool = False, labels: tuple[str, ...] | None = None) -> Config:
    """The run with these images, from the middle of its epoch or its end, into a new folder."""
    config = config_of(Material(folder), folder / "onward")
    config.data.images = [str(folder / f"{name}.tif") for name in names]
    config.data.labels = [str(folder / f"{name}-labels.tif") for name in labels or names]
    config.data.val_images, config.data.val_labels = [], []
    config.train.epochs = 2
    config.train.resume = str(folder / "run" / "checkpoints" / ("step-000002" if middle else "step-000003"))
    return config


def resumed(folder: Path) -> list[dict]:
    return json.loads((folder / "onward" / "summary.json").read_text())["resumed"]


@pytest.mark.parametrize("middle", [True, False])
def test_a_folder_may_move(folder: Path, middle: bool) -> None:
    """In the middle of an epoch too; the new paths are recorded, no file is said to have changed."""
    assert run(onward(folder, "one", "two", middle=middle)) == 0
    entry = resumed(folder)[0]
    assert entry["changed"].keys() == {"data.images", "data.labels", "train.epochs"}
    assert entry["changed"]["data.images"]["to"] == [str(folder / "one.tif"), str(folder / "two.tif")]
    assert entry["step"] == (2 if middle else 3)
    assert entry["rewritten"] == []


@pytest.mark.parametrize("middle", [True, False])
def test_another_order_and_other_labels_are_refused(folder: Path, middle: bool) -> None:
    before = tree(folder)
    with pytest.raises(CheckpointError, match=r"data\.images in another order: .*one\.tif before .*two\.tif there"):
        run(onward(folder, "two", "one", middle=middle))
    with pytest.raises(CheckpointError, match=r"data\.labels: those of .*one\.tif are .*one-labels.tif there and .*tw"):
        run(onward(folder, "one", "two", middle=middle, labels=("two", "one")))
    assert tree(folder) == before


@pytest.mark.parametrize("names", [("one", "two", "held-out"), ("held-out", "one", "two"), ("two",), ("held-out",)])
def test_images_come_and_go_between_epochs_only(folder: Path, names: tuple[str, ...]) -> None:
    before = tree(folder)
    with pytest.raises(CheckpointError, match=r"in the middle of an epoch of other steps: data\.images is "):
        run(onward(folder, *names, middle=True))
    assert tree(folder) == before
    assert run(onward(folder, *names)) == 0
    assert resumed(folder)[0]["changed"]["data.images"]["to"] == [str(folder / f"{name}.tif") for name in names]
    assert find_checkpoint(folder / "onward").saved.position.epoch == 2


def test_labels_of_added_images_are_looked_at_first(folder: Path) -> None:
    with rasterio.open(folder / "held-out-labels.tif", "r+") as file:
        labels_HW = file.read(1)
        labels_HW[63, 63] = 77
        file.write(labels_HW, 1)
    before = tree(folder)
    with pytest.raises(LabelError, match=r"held-out-labels\.tif holds value 77 at \(row 63, col 63\)"):
        run(onward(folder, "one", "two", "held-out"))
    assert tree(folder) == before


@pytest.mark.parametrize("what", ["pixels", "mask"])
def test_a_rewritten_file_is_said_and_recorded(folder: Path, capfd: pytest.CaptureFixture[str], what: str) -> None:
    """The configuration says nothing of it. With a mask beside it, the image's own file is as it was: pixels that the
    mask calls valid are others."""

    def write(value: int) -> None:
        with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=False), rasterio.open(folder / "two.tif", "r+") as file:
            if what == "mask":
                file.write_mask(np.full((64, 64), value, np.uint8))
            else:
                file.write(np.full((1, 1), value, np.uint8), 1, window=Window(0, 0, 1, 1))

    write(255)
    first = onward(folder, "one", "two")
    assert run(first) == 0
    status = os.stat(folder / "two.tif")
    write(254)
    (folder / "two.tif.aux.xml").write_text("<PAMDataset/>")  # a viewer's statistics
    if what == "mask":
        assert (folder / "two.tif.msk").exists()
        os.utime(folder / "two.tif", ns=(status.st_atime_ns, status.st_mtime_ns))
    first.train.resume, first.train.epochs, first.run.verbosity = "auto", 3, 1
    assert run(first) == 0
    assert "two.tif has been written to since step 6; the normalisation stays that of before" in capfd.readouterr().err
    assert resumed(folder)[-1]["rewritten"] == [str(folder / "two.tif")]
    first.train.epochs = 4
    assert run(first) == 0
    assert [bool(each["rewritten"]) for each in resumed(folder)[-2:]] == [True, False], "what was recorded before stays"


def test_the_identity_of_a_file(tmp_path: Path) -> None:
    """By content wherever it lies; a remote one has none but its path."""
    pixels_CHW = np.arange(3 * 200 * 200, dtype=np.uint8).reshape(3, 200, 200)
    write_raster(tmp_path / "a.tif", pixels_CHW)
    shutil.copy(tmp_path / "a.tif", tmp_path / "b.tif")
    a, b = (identify(str(tmp_path / name)) for name in ("a.tif", "b.tif"))
    assert a.holds_what(b)
    assert not a.is_at(b)
    assert a.is_at(identify(os.path.relpath(tmp_path / "a.tif")))
    os.truncate(tmp_path / "b.tif", os.path.getsize(tmp_path / "b.tif") - 1)
    shorter = identify(str(tmp_path / "b.tif"))
    assert not shorter.holds_what(a)
    assert shorter.changed_since(b)
    remote = identify("https://example.org/a.tif")
    assert remote.sample is None
    assert not remote.holds_what(identify("https://example.org/b.tif"))
