"""Small data in the layouts that the recipes in `jobs/recipes` name: the folders, names, colours and ids of CamVid and
Cityscapes, and a list of images for transfer learning.

A scene is blocks of 8 pixels, each of one of the classes that the class file lists, the first ones more often. A class
has a look of its own, which is not its label's colour, under noise: it can be learnt, but not read off.
"""

from __future__ import annotations

import csv
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import rasterio
import torch
from numpy.typing import NDArray
from rasterio.errors import NotGeoreferencedWarning

from tests.checkpoint.published import resnet, vgg

RECIPES = Path(__file__).resolve().parents[2] / "jobs" / "recipes"
BLOCK = 8
DRIVES = ("0001TP_00", "0006R0_f0", "0016E5_0", "Seq05VD_f0")
"""How the files of each drive of CamVid begin."""
CITIES = {"train": ("aachen", "bremen"), "val": ("munster",)}
TRANSFER = (("field", 90, 160, 60), ("road", 70, 70, 74), ("building", 196, 64, 50), ("water", 44, 108, 196))


def scenes(kinds: int, shape: tuple[int, int], seed: int) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int64]]]:
    """Yield scenes: the image (3, H, W), and the row of the class file of each pixel."""
    draw = np.random.default_rng(seed)
    looks = draw.integers(30, 226, (kinds, 3))
    share_K = 1 / np.arange(2, kinds + 2)
    while True:
        kinds_hw = draw.choice(kinds, [-(-side // BLOCK) for side in shape], p=share_K / share_K.sum())
        kinds_HW = np.kron(kinds_hw, np.ones((BLOCK, BLOCK), int))[: shape[0], : shape[1]]
        noise_HWC = draw.integers(-25, 26, (*shape, 3))
        yield (looks[kinds_HW] + noise_HWC).astype(np.uint8).transpose(2, 0, 1), kinds_HW


def write_workplace(root: Path, frames: int = 4, thinner: int = 8) -> None:
    """Everything that the recipes name, under `root`, from which they then run as they stand: so many frames of each
    drive and city, classes, and seeded stand-ins for published weights, so many times thinner."""
    write_camvid(root, frames=frames)
    write_cityscapes(root, frames=frames)
    write_transfer(root)
    (root / "jobs").symlink_to(RECIPES.parent)
    (root / "weights").mkdir()
    torch.save(vgg(normed=True, thinner=thinner), root / "weights" / "vgg16_bn.pth")
    torch.save(resnet((3, 4, 6, 3), bottleneck=False, width=64 // thinner), root / "weights" / "resnet34.pth")


def write_camvid(root: Path, frames: int) -> None:
    """`data/CamVid` under `root`: so many frames of each drive, and their labels in 32 colours."""
    rows = _rows("camvid-classes.csv")
    colours = np.array([[row[band] for band in "rgb"] for row in rows], np.uint8)
    drawn = scenes(len(rows), (96, 128), seed=1)
    for name in (f"{drive}{30 * k:04d}" for drive in DRIVES for k in range(frames)):
        image_CHW, kinds_HW = next(drawn)
        folder = root / "data" / "CamVid"
        _write(folder / "701_StillsRaw_full" / f"{name}.png", image_CHW)
        _write(folder / "LabeledApproved_full" / f"{name}_L.png", colours[kinds_HW].transpose(2, 0, 1))


def write_cityscapes(root: Path, frames: int) -> None:
    """`data/cityscapes` under `root`: so many frames of each city, and their labels as ids."""
    rows = _rows("cityscapes-classes.csv")
    ids = np.array([row["id"] for row in rows], np.uint8)
    drawn = scenes(len(rows), (64, 128), seed=2)
    for part, cities in CITIES.items():
        for city in cities:
            for number in range(frames):
                image_CHW, kinds_HW = next(drawn)
                place, name = Path(part) / city, f"{city}_{number:06d}_000019"
                folder = root / "data" / "cityscapes"
                _write(folder / "leftImg8bit" / place / f"{name}_leftImg8bit.png", image_CHW)
                _write(folder / "gtFine" / place / f"{name}_gtFine_labelIds.png", ids[kinds_HW][None])


def write_transfer(root: Path) -> None:
    """`data/transfer` under `root`: images, their labels, classes, and the list of them; one of ten to validate on."""
    folder = root / "data" / "transfer"
    drawn = scenes(len(TRANSFER), (96, 96), seed=3)
    lines = ["image,label,split"]
    for number in range(20):
        image_CHW, kinds_HW = next(drawn)
        names = f"images/{number:03d}.png", f"labels/{number:03d}.png"
        for name, pixels_CHW in zip(names, (image_CHW, kinds_HW[None].astype(np.uint8)), strict=True):
            _write(folder / name, pixels_CHW)
        lines.append(",".join([*names, "val" if number % 10 == 9 else "train"]))
    (folder / "images.csv").write_text("\n".join(lines) + "\n")
    classes = [f"{name},{r},{g},{b},{value}" for value, (name, r, g, b) in enumerate(TRANSFER)]
    (folder / "classes.csv").write_text("\n".join(["name,r,g,b,value", *classes]) + "\n")


def _rows(name: str) -> list[dict[str, str]]:
    with open(RECIPES / name, newline="") as file:
        return list(csv.DictReader(file))


def _write(path: Path, pixels_CHW: NDArray[np.uint8]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    bands, height, width = pixels_CHW.shape
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotGeoreferencedWarning)
        with rasterio.open(path, "w", driver="PNG", count=bands, height=height, width=width, dtype="uint8") as file:
            file.write(pixels_CHW)
