"""The recipes of `jobs/recipes`, as they stand, on small data in the layouts that they name: CamVid's, Cityscapes', and
a list of images. On any number of ranks losses, class weights and scores are those of one, at the sources' rates."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checkpoint.published import resnet, vgg
from tests.comm.launching import ROOT
from tests.conftest import NIGHTLY, SIZE
from tests.law.cases import one_rank
from tests.law.runs import check_same_run, run, summary
from tests.small_files import write_raster
from tiledseg.comm.mesh import Mesh
from tiledseg.commands.options import parse_config
from tiledseg.config.run import Config
from tiledseg.raster.labels.classes import read_classes

SIZES = (2, 4) if NIGHTLY else (2,)
pytestmark = [
    pytest.mark.usefixtures("small_views", "without_plots"),
    pytest.mark.skipif(SIZE not in SIZES, reason="each run is compared with that of one rank; 2 ranks, 4 at night"),
]
RECIPES, BLOCK = ROOT / "jobs/recipes", 8
FLAGS: dict[str, tuple[str, ...]] = {
    "camvid-segnet": ("--model.base_channels", "4"),
    "cityscapes-gated-scnn": ("--model.base_channels", "8", "--train.windows", "{size: 32, per_step: 16, halo: none}"),
    # the rate of the paper's one worker, 0.00125, for 9 images in place of 250
    "transfer-learning": ("--model.base_channels", "4", "--train.images_per_step", "9", "--optimizer.lr", "0.00013889"),
}
"""Flags after the file, which make a recipe fit a small machine. All else is the recipe's."""
NAMES = tuple(FLAGS) if NIGHTLY else ("camvid-segnet",)  # of the others `test_recipes.py` holds rates and keys by day
RATES = {
    "camvid-segnet": [1e-3, 1e-3],
    "cityscapes-gated-scnn": [0.01, 0.01 * 0.5**0.9],
    "transfer-learning": [0.00125, 0.00125],
}


def values_of(recipe: str, *keys: str) -> list[list[int]]:
    """Return what labels have for each row of a recipe's class file."""
    with open(RECIPES / f"{recipe}-classes.csv", newline="") as file:
        return [[int(row[key]) for key in keys] for row in csv.DictReader(file)]


def write_images(folder: Path, image: str, label: str, names: list[str], values: list[list[int]], seed: int) -> None:
    """Write images and labels of blocks of one class each, the first ones more often. A class has a look of its own,
    which is not its label's colour, under noise: it can be learnt, but not read off."""
    draw = np.random.default_rng(seed)
    look_of, value_of = draw.integers(30, 226, (len(values), 3)), np.array(values, np.uint8)
    share_K = 1 / np.arange(2, len(values) + 2)
    for name in names:
        kinds_hw = draw.choice(len(values), (8, 16), p=share_K / share_K.sum())
        kinds_HW = np.kron(kinds_hw, np.ones((BLOCK, BLOCK), int))
        pixels_HWC = (look_of[kinds_HW] + draw.integers(-25, 26, (*kinds_HW.shape, 3))).astype(np.uint8)
        for path, bands_HWC in ((image.format(name), pixels_HWC), (label.format(name), value_of[kinds_HW])):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            write_raster(folder / path, bands_HWC.transpose(2, 0, 1), driver="PNG", crs=None, transform=None)


def write_workplace(root: Path) -> None:
    """Write all that the recipes name under `root`, with stand-ins for published weights, sixteen times thinner."""
    data = root / "data"
    drives = [f"{drive}{30 * k:04d}" for drive in ("0001TP_00", "0006R0_f0", "0016E5_0", "Seq05VD_f0") for k in (0, 1)]
    files = "701_StillsRaw_full/{}.png", "LabeledApproved_full/{}_L.png"
    write_images(data / "CamVid", *files, drives, values_of("camvid", *"rgb"), 1)
    cities = ("train", "aachen"), ("train", "bremen"), ("val", "munster")
    frames = [f"{part}/{city}/{city}_{k:06d}_000019" for part, city in cities for k in (0, 1)]
    files = "leftImg8bit/{}_leftImg8bit.png", "gtFine/{}_gtFine_labelIds.png"
    write_images(data / "cityscapes", *files, frames, values_of("cityscapes", "id"), 2)
    numbers = [f"{number:03d}" for number in range(20)]
    write_images(data / "transfer", "images/{}.png", "labels/{}.png", numbers, [[0], [1], [2], [3]], 3)
    lines = [f"images/{n}.png,labels/{n}.png,{'val' if n.endswith('9') else 'train'}" for n in numbers]
    (data / "transfer/images.csv").write_text("\n".join(["image,label,split", *lines]) + "\n")
    (data / "transfer/classes.csv").write_text("name,value\nfield,0\nroad,1\nbuilding,2\nwater,3\n")
    (root / "jobs").symlink_to(RECIPES.parent)
    (root / "weights").mkdir()
    torch.save(vgg(normed=True, thinner=16), root / "weights" / "vgg16_bn.pth")
    torch.save(resnet((3, 4, 6, 3), bottleneck=False, width=4), root / "weights" / "resnet34.pth")


@pytest.fixture(scope="module")
def workplace(meshes: dict[str, Mesh], common: Path) -> Iterator[Path]:
    """The folder from which all ranks run: what the recipes name lies in it."""
    meshes["gloo"].on_root(lambda: write_workplace(common))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(common)
        yield common


def small(name: str, output: str) -> Config:
    """The recipe with a thin network and one epoch of two steps, in float64."""
    flags = [*FLAGS[name], "--train.epochs", "1", "--train.validate_every", "1", "--train.precision", "fp64"]
    found = parse_config(["--config", f"jobs/recipes/{name}.yaml", *flags], "train", "")
    data = replace(found.data, classes=read_classes(found.data.classes))
    return replace(found, data=data, run=replace(found.run, output=output, verbosity=0))


@pytest.mark.mpi
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_has_the_losses_and_scores_of_one_rank(name: str, workplace: Path, meshes: dict[str, Mesh]) -> None:
    mesh = meshes["gloo"]
    found = run(small(name, f"runs/{name}"), mesh)
    mesh.on_root(lambda: run(small(name, f"runs/{name}-alone"), one_rank()))
    folder = workplace / "runs"
    check_same_run(folder / name, folder / f"{name}-alone", 1e-9)
    mine, theirs = (summary(folder / run_name) for run_name in (name, f"{name}-alone"))
    assert (mine["ranks"], theirs["ranks"]) == (mesh.size, 1)
    assert mine["parallel"]["mesh"]["replicas"] == mesh.size, "every rank has images of its own"
    assert [line["lr"] for line in found if "loss" in line] == pytest.approx(RATES[name], rel=1e-4)
