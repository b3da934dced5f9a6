"""What a resumed run may have otherwise: each key, between epochs and in the middle of one; images and labels."""

import json
import os
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
from rasterio.windows import Window
from safetensors.torch import load_file

from tests.answers import errors_of
from tests.crash.runs import Material
from tests.small_files import tree, write_raster
from tests.training.test_start import config_of, run
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.config.run import Config
from tiledseg.errors import CheckpointError, LabelError
from tiledseg.raster.reader import identify
from tiledseg.training.preparation import Preparation
from tiledseg.training.resuming import NAMES_RUN, OTHER_RUN, RULES, begin, flat

OTHERS: dict[str, Any] = {
    "data.classes": [{"name": "a", "value": 0}, {"name": "b", "value": 1}, {"name": "c", "values": [2, 7]}],
    "data.bands": [3, 2, 1],
    "data.workers": 3,
    "tiling.grid": 3,
    "tiling.halo": 12,
    "model.norm": "pixel",
    "parallel.halo": "layer",
    "optimizer.name": "sgd",
    "optimizer.lr_factors": {"encoder*": 0.5},
    "optimizer.policy": {"name": "step", "size": 2},
    "train.epochs": 7,
    "train.tiles_per_step": 2,
    "train.images_per_step": 2,
    "train.loss": {"cross_entropy": 1.0, "dice": 0.5},
    "train.class_weights": {"1": 4.0},
    "train.seed": 9,
    "train.resume": "elsewhere",
    "train.skip_empty": True,
}
"""Other values of keys of every rule. What differs between the keys of a rule stands in its table alone."""


@pytest.fixture(scope="module")
def checkpoints(material: Material) -> dict[str, Path]:
    """One in the middle of an epoch, one at its end."""
    folder = material.root / "run"
    assert run(config_of(material, folder)) == 0
    return {"middle": folder / "checkpoints" / "step-000002", "edge": folder / "checkpoints" / "step-000003"}


def changed_by(material: Material, checkpoint: Path, config: Config) -> dict[str, Any]:
    """What going on with this configuration records."""
    serial = replace(config, parallel=Config().parallel)  # one rank cannot have all that these keys ask for
    if config.train.images_per_step > 1:  # and not both of these keys at once
        serial.train = replace(config.train, tiles_per_step=None)
    prepared = Preparation(serial, 1 << 30, 1)
    prepared.user_config = prepared.config = config
    before = len(prepared.warnings)
    begin(find_checkpoint(checkpoint), prepared)
    if not prepared.resumed:
        return {}
    (resumed,) = prepared.resumed
    assert resumed.step == int(checkpoint.name[-6:])
    assert all(key in prepared.warnings[before] for key in resumed.changed)
    return resumed.changed


KEYS = [f"{group.name}.{f.name}" for group in fields(Config) for f in fields(group.default_factory)]  # type: ignore


def rule_of(key: str) -> str:
    """Return the rule of a key as docs/reference/resume.md names it."""
    rule = RULES.get(key, "may change")
    return rule if rule in (OTHER_RUN, NAMES_RUN, "may change") else "between epochs"


def test_the_documentation_has_the_rule_of_every_key_and_why() -> None:
    """A key that no row names may change."""
    text = (Path(__file__).parents[2] / "docs" / "reference" / "resume.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    rules = [(key.strip("`"), rule) for keys, rule, _ in rows for key in keys.split(", ")]
    assert sorted(rules) == sorted((key, rule_of(key)) for key in RULES)
    assert RULES.keys() < set(KEYS)


@pytest.mark.parametrize("place", ["middle", "edge"])
def test_nothing_changed_is_nothing_recorded(material: Material, checkpoints: dict[str, Path], place: str) -> None:
    assert changed_by(material, checkpoints[place], config_of(material, material.root / "run")) == {}


@pytest.mark.parametrize("place", ["middle", "edge"])
@pytest.mark.parametrize("key", OTHERS)
def test_another_value(material: Material, checkpoints: dict[str, Path], key: str, place: str) -> None:
    config = config_of(material, material.root / "run")
    before = flat(config.record())[key]
    group, _, name = key.partition(".")
    setattr(getattr(config, group), name, OTHERS[key])
    assert flat(config.record())[key] != before
    if rule_of(key) == OTHER_RUN or (rule_of(key) == "between epochs" and place == "middle"):
        with pytest.raises(CheckpointError) as caught:
            changed_by(material, checkpoints[place], config)
        assert name in str(caught.value)
        known = "none" if key == "model.norm" else before  # what auto is there
        assert f"{'null' if known is None else known} there" in str(caught.value)
    else:
        wanted = {} if rule_of(key) == NAMES_RUN else {key: {"from": before, "to": OTHERS[key]}}
        assert changed_by(material, checkpoints[place], config) == wanted


def test_the_same_in_other_words(material: Material, checkpoints: dict[str, Path]) -> None:
    """Classes as records that say what the number said, a grid as two numbers; other names of classes change nothing
    that the weights have learned, names in another order do."""
    config = config_of(material, material.root / "run")
    config.data.classes = [{"name": f"class {k}", "value": k} for k in range(3)]
    assert changed_by(material, checkpoints["middle"], config) == {}
    config.tiling.grid = [2, 2]
    assert changed_by(material, checkpoints["middle"], config) == {"tiling.grid": {"from": 2, "to": [2, 2]}}
    config.data.classes = [{"name": name} for name in ("field", "road", "tree")]
    assert changed_by(material, checkpoints["middle"], config).keys() == {"data.classes", "tiling.grid"}
    config.data.classes = [{"name": name, "value": k} for k, name in enumerate(("class 0", "class 2", "class 1"))]
    with pytest.raises(CheckpointError, match=r"data\.classes"):
        changed_by(material, checkpoints["middle"], config)


@pytest.mark.parametrize(("there", "here"), [(0.9, 0.0), (0.0, 0.9)])
def test_momentum_starts_anew(material: Material, tmp_path: Path, there: float, here: float) -> None:
    """Neither an old buffer comes back later, nor is one asked for that is not there."""
    config = config_of(material, tmp_path / "run")
    config.optimizer = replace(config.optimizer, name="sgd", momentum=there)
    assert run(config) == 0
    config.train.epochs = 2
    config.optimizer = replace(config.optimizer, momentum=here)
    assert run(config) == 0
    newest = find_checkpoint(tmp_path / "run")
    held = load_file(newest.path / "optimizer.safetensors")
    assert {name.partition(".")[2] for name in held} == ({"momentum_buffer"} if here else set())
    assert [entry.changed["optimizer.momentum"] for entry in newest.saved.resumed] == [{"from": there, "to": here}]
    assert newest.saved.config.optimizer.momentum == here


@pytest.mark.parametrize(("there", "here"), [("fp64", "fp32"), ("fp32", "fp16"), ("fp16", "fp64")])
def test_another_precision_is_converted(material: Material, tmp_path: Path, there: str, here: str) -> None:
    config = config_of(material, tmp_path / "run", precision=there)
    config.data.val_images, config.data.val_labels = [], []
    assert run(config) == 0
    config.train = replace(config.train, epochs=2, precision=here)
    assert run(config) == 0
    assert find_checkpoint(tmp_path / "run").saved.step == 6


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
def test_a_rewritten_file_is_said_and_recorded(folder: Path, what: str) -> None:
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
    words = "two.tif has been written to since step 6; the normalisation stays that of before"
    assert words in errors_of(lambda: run(first))
    assert resumed(folder)[-1]["rewritten"] == [str(folder / "two.tif")]
    first.train.epochs = 4
    assert run(first) == 0
    assert [bool(each["rewritten"]) for each in resumed(folder)[-2:]] == [True, False], "what was recorded before stays"


def test_the_identity_of_a_file(tmp_path: Path) -> None:
    """By all of its content; a remote one has none but its path."""
    write_raster(tmp_path / "a.tif", np.arange(3 * 200 * 200, dtype=np.uint8).reshape(3, 200, 200))
    whole = identify(str(tmp_path / "a.tif"))
    assert whole.is_at(identify(os.path.relpath(tmp_path / "a.tif")))
    os.truncate(tmp_path / "a.tif", os.path.getsize(tmp_path / "a.tif") - 1)
    assert not identify(str(tmp_path / "a.tif")).holds_what(whole)
    assert not identify("https://example.org/a.tif").holds_what(identify("https://example.org/b.tif"))
