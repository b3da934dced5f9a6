"""The recipes of `jobs/recipes` say what their sources say, and their class files group as the data sets do."""

from pathlib import Path

import numpy as np
import pytest

from tiledseg.architecture.presets import build_network
from tiledseg.commands.options import parse_config
from tiledseg.config.run import Config
from tiledseg.models.network import build_modules
from tiledseg.raster.labels.classes import read_classes
from tiledseg.raster.labels.label_map import LabelMap
from tiledseg.training.optimizer import parameter_groups
from tiledseg.training.preparation import scaled

RECIPES = Path(__file__).resolve().parents[1] / "jobs/recipes"
CAMVID = [  # sky, building, ... bicyclist, as the article's `camvidPixelLabelIDs` groups them
    [(128, 128, 128)],
    [(128, 0, 0), (192, 0, 128), (0, 128, 64), (64, 0, 64), (64, 192, 0)],
    [(192, 192, 128), (0, 0, 64)],
    [(128, 64, 128), (128, 0, 192), (192, 0, 64)],
    [(0, 0, 192), (64, 192, 128), (128, 128, 192)],
    [(128, 128, 0), (192, 192, 0)],
    [(192, 128, 128), (128, 128, 64), (0, 64, 64)],
    [(64, 64, 128)],
    [(64, 0, 128), (64, 128, 192), (192, 128, 192), (192, 64, 128), (128, 64, 64)],
    [(64, 64, 0), (192, 128, 64), (64, 0, 192), (64, 128, 64)],
    [(0, 128, 192), (192, 0, 192)],
]
TRAIN_IDS = [7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33]


def recipe(name: str, *flags: str) -> Config:
    found = parse_config(["--config", str(RECIPES / f"{name}.yaml"), *flags], "train", "")
    found.check()
    return found


def test_every_recipe_is_a_configuration_of_the_page() -> None:
    told = (RECIPES / "README.md").read_text()
    for path in RECIPES.glob("*.yaml"):
        assert path.name in told
        recipe(path.stem)
    assert recipe("camvid-segnet").optimizer.momentum == 0.9


def test_the_windows_of_53_epochs_are_the_crops_of_175() -> None:
    crops, windows = 175, recipe("cityscapes-gated-scnn").train.epochs * 1024 * 2048 / 800**2
    assert windows == pytest.approx(crops, rel=0.01)


def test_the_rate_follows_the_workers_images() -> None:
    found = recipe("transfer-learning", "--train.images_per_step", str(250 * 8))
    assert scaled(found.optimizer, found.train.images_per_step).lr == pytest.approx(0.00125 * 8, rel=1e-12)


def test_what_is_new_has_twenty_times_the_rate() -> None:
    found = recipe("transfer-learning", "--model.base_channels", "4")
    named = list(build_modules(build_network(found.model, 3, 4), seed=0).parameters_by_node())
    groups = parameter_groups(named, found.optimizer)
    factors = {named[index][0]: group["factor"] for group in groups for index in group["indices"]}
    new = {name for name, factor in factors.items() if factor == 20}
    assert new == {name for name in factors if name.startswith(("decoder", "head"))}
    assert {factor for name, factor in factors.items() if name not in new} == {1}
    assert len(factors) > len(new) > 20


def label_map(name: str) -> LabelMap:
    return LabelMap.from_config(read_classes(str(RECIPES / name)), 255)


def test_the_32_colours_of_camvid_are_11_classes() -> None:
    found = label_map("camvid-classes.csv")
    names = "Sky Building Pole Road Pavement Tree SignSymbol Fence Car Pedestrian Bicyclist"
    assert " ".join(record.name for record in found.classes) == names
    grouped = [(colour, number) for number, group in enumerate(CAMVID) for colour in group]
    colours_CHW = np.array([colour for colour, _ in grouped] + [(0, 0, 0)], np.uint8).T[:, None]
    assert len({tuple(colour) for colour in colours_CHW[:, 0].T}) == 32
    assert found.apply(colours_CHW)[0].tolist() == [number for _, number in grouped] + [255]


def test_the_ids_of_cityscapes_are_19_train_ids() -> None:
    found = label_map("cityscapes-classes.csv")
    expected = [TRAIN_IDS.index(raw) if raw in TRAIN_IDS else 255 for raw in range(34)]
    assert found.count == 19
    assert found.apply(np.arange(34, dtype=np.uint8)[None, None])[0].tolist() == expected
