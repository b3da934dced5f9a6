"""Data sets as people have them, in the layouts of CamVid and Cityscapes: they train as the same pixels in GeoTIFFs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.crash.runs import lines
from tests.small_files import write_raster, write_yaml
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.train import main

COLOURS = {"Sky": (128, 128, 128), "Building": (128, 0, 0), "Wall": (64, 192, 0), "Void": (0, 0, 0)}
GROUPS = {"Sky": 0, "Building": 1, "Wall": 1, "Void": 255}
IDS = {"Sky": 23, "Building": 11, "Wall": 12, "Void": 0}
SHAPES = {"Seq05VD_f0": (40, 52), "Seq05VD_f1": (36, 64), "Seq05VD_f2": (48, 48)}

pytestmark = pytest.mark.usefixtures("without_plots")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same images and labels in four layouts; the last image is to validate on."""
    root = tmp_path_factory.mktemp("layouts")
    generator = np.random.default_rng(3)
    for name, shape in SHAPES.items():
        part = "val" if name.endswith("2") else "train"
        kinds_HW = np.kron(generator.integers(0, 4, (shape[0] // 4, shape[1] // 4)), np.ones((4, 4), int))
        image_CHW = (generator.integers(0, 90, (3, *shape)) + 40 * kinds_HW).astype(np.uint8)
        for path, pixels in {
            f"plain/{part}/{name}.png": image_CHW,
            f"plain/{part}/{name}_L.tif": _painted(kinds_HW, GROUPS)[None],
            f"camvid/{part}/{name}.png": image_CHW,
            f"camvid/{part}_labels/{name}_L.png": _painted(kinds_HW, COLOURS).transpose(2, 0, 1),
            f"cityscapes/leftImg8bit/{part}/ulm/{name}_leftImg8bit.png": image_CHW,
            f"cityscapes/gtFine/{part}/ulm/{name}_gtFine_labelIds.png": _painted(kinds_HW, IDS)[None],
        }.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            driver = "GTiff" if path.endswith(".tif") else "PNG"
            write_raster(root / path, pixels, driver=driver, crs=None, transform=None)
    rows = [f"{name},{','.join(map(str, rgb))}" for name, rgb in COLOURS.items()]
    grouped = ["Sky", "Building", "Building", "ignored"]
    (root / "camvid/classes.csv").write_text(
        "\n".join(["name,r,g,b,class", *(f"{row},{group}" for row, group in zip(rows, grouped, strict=True))])
    )
    named = [f"{name},{IDS[name]},{group}" for name, group in zip(IDS, grouped, strict=True)]
    (root / "cityscapes/classes.csv").write_text("\n".join(["name,id,class", *named]))
    pairs = [(part, name) for name in SHAPES for part in ("val" if name.endswith("2") else "train",)]
    listed = [f"{part}/{name}.png,{part}_labels/{name}_L.png,{part}" for part, name in pairs]
    (root / "camvid/manifest.csv").write_text("\n".join(["image,label,split", *listed]))
    return root


def _painted(kinds_HW: NDArray[np.int64], values: dict[str, Any]) -> NDArray[np.uint8]:
    return np.array(list(values.values()), np.uint8)[kinds_HW]


def layouts(root: Path) -> dict[str, dict[str, Any]]:
    """The group `data` of each."""
    plain, camvid, cities = (root / name for name in ("plain", "camvid", "cityscapes"))
    split = {"images": "images", "val_images": "val_images"}
    keys = {"train": ("images", "labels"), "val": ("val_images", "val_labels")}
    assert split.keys() <= {key for pair in keys.values() for key in pair}
    found: dict[str, dict[str, Any]] = {
        "plain": {"classes": 2},
        "camvid": {"classes": str(camvid / "classes.csv")},
        "cityscapes": {"classes": str(cities / "classes.csv")},
        "manifest": {"classes": str(camvid / "classes.csv"), "images": str(camvid / "manifest.csv")},
    }
    for part, (images, labels) in keys.items():
        found["plain"] |= {images: str(plain / part / "*.png"), labels: str(plain / part / "{1}_L.tif")}
        found["camvid"] |= {images: str(camvid / part), labels: str(camvid / f"{part}_labels" / "{stem}_L.png")}
        found["cityscapes"] |= {
            images: str(cities / "leftImg8bit" / part / "*" / "*_leftImg8bit.png"),
            labels: str(cities / "gtFine" / part / "{1}" / "{2}_gtFine_labelIds.png"),
        }
    return found


def train(root: Path, name: str, data: dict[str, Any]) -> Path:
    config = {
        "data": {**data, "workers": 1, "prefetch": 1},
        "tiling": {"grid": 2},
        "model": {"levels": 2, "convs_per_level": 1, "base_channels": 2},
        "train": {"epochs": 2, "images_per_step": 2, "checkpoint_every": 9},
        "run": {"output": str(root / "runs" / name), "verbosity": 0},
    }
    write_yaml(root / f"{name}.yaml", config)
    assert main(["--config", str(root / f"{name}.yaml")]) == 0
    return root / "runs" / name


def test_every_layout_trains_alike(root: Path) -> None:
    """To the last bit: colours grouped by a class file, ids to train ids, a manifest; images of three sizes."""
    found = {name: train(root, name, data) for name, data in layouts(root).items()}
    wanted = lines(found["plain"])
    assert sum("val" in line for line in wanted) == 2
    for name, folder in found.items():
        assert lines(folder) == wanted, name
    classes = find_checkpoint(found["camvid"]).saved.label_map.classes
    assert [record.name for record in classes] == ["Sky", "Building"]
    assert classes[1].colour == COLOURS["Building"]
