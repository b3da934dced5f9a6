"""The files that broken inputs are made from: small good rasters, one trained run, damaged copies of them, and paths
that are no regular files. One rank makes them.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyogrio
import shapely

from tests.raster.referring import raw_vrt, vrt
from tests.small_files import write_raster, write_yaml

SIDE = 48


def good_config(root: Path) -> dict[str, Any]:
    """A configuration that trains in a second; every broken one differs from it in one place."""
    return {
        "data": {"images": str(root / "image.tif"), "labels": str(root / "labels.tif"), "classes": 3, "workers": 1},
        "tiling": {"grid": 2},
        "model": {"levels": 2, "convs_per_level": 1, "base_channels": 2},
        "train": {"epochs": 1, "tiles_per_step": 2, "checkpoint_every": 1, "keep_checkpoints": 9},
        "run": {"output": str(root / "run"), "verbosity": 0},
    }


def make_materials(root: Path) -> None:
    """Everything that needs no training."""
    write_yaml(root / "good.yaml", good_config(root))
    (root / "folder").mkdir()
    _make_rasters(root)
    _make_broken_files(root)
    _make_outputs(root)


def _make_rasters(root: Path) -> None:
    """Whole files; most do not fit their partners or their use."""
    draw = np.random.default_rng(7)
    image_CHW = draw.integers(1, 255, (3, SIDE, SIDE), np.uint8)
    labels_CHW = draw.integers(0, 3, (1, SIDE, SIDE), np.uint8)
    outside_CHW = labels_CHW.copy()
    outside_CHW[0, 5, 7] = 9
    for name, pixels_CHW, options in (
        ("image", image_CHW, {}),
        ("second", image_CHW[:, ::-1], {}),
        ("two-bands", image_CHW[:2], {}),
        ("blank", np.zeros_like(image_CHW), {"nodata": 0}),
        ("labels", labels_CHW, {}),
        ("second-labels", labels_CHW[:, ::-1], {}),
        ("small-labels", labels_CHW[:, :-1], {}),
        ("other-crs-labels", labels_CHW, {"crs": "EPSG:32612"}),
        ("uint16", image_CHW.astype(np.uint16), {}),
        ("float-labels", labels_CHW.astype(np.float32), {}),
        ("void-labels", np.full_like(labels_CHW, 255), {}),
        ("nothing", np.zeros_like(labels_CHW), {}),
        ("bare", labels_CHW, {"crs": None, "transform": None}),
        ("outside-labels", outside_CHW, {}),
        ("damaged", image_CHW, {"compress": "deflate"}),
    ):
        write_raster(root / f"{name}.tif", pixels_CHW, **options)
    write_raster(root / "image.png", image_CHW, driver="PNG", crs=None, transform=None)


def _make_broken_files(root: Path) -> None:
    whole = (root / "image.tif").read_bytes()
    (root / "cut-half.tif").write_bytes(whole[: len(whole) // 2])
    packed = (root / "damaged.tif").read_bytes()
    middle = len(packed) // 2
    (root / "damaged.tif").write_bytes(packed[:middle] + bytes(400) + packed[middle + 400 :])
    (root / "bad.zarr").mkdir()
    (root / "bad.zarr/zarr.json").write_text("[1]")
    (root / "text.tif").write_text("this is no raster\n")
    (root / "file").write_text("a file in the way\n")
    (root / "vrt.tif").write_text(vrt(str(root / "image.tif"), SIDE))
    (root / "raw-vrt.tif").write_text(raw_vrt("/etc/passwd", SIDE))
    shutil.copy(root / "image.tif", root / "masked.tif")
    shutil.copy(root / "vrt.tif", root / "masked.tif.msk")
    shutil.copy(root / "image.tif", root / "piped.tif")


def _make_outputs(root: Path) -> None:
    """Names that no output may take."""
    (root / "link.tif").symlink_to(root / "image.tif")
    (root / "link.json").symlink_to(root / "run" / "checkpoints" / "step-000002" / "manifest.json")
    shutil.copy(root / "image.tif", root / "mask.tif.msk")
    square = shapely.to_wkb(np.array([shapely.box(0, 0, 1, 1)], object))
    pyogrio.raw.write(root / "parcels.gpkg", square, [], [], layer="mine", geometry_type="Polygon", crs="EPSG:32611")
    for name in ("events", "metrics", "image", "inside/checkpoints", "noted"):
        (root / "taken" / name).mkdir(parents=True)
    for name in ("fifo", "pipe.png", "styled.qml", "piped.tif.aux.xml", "taken/metrics/metrics.jsonl"):
        os.mkfifo(root / name)
    (root / "taken/events/events").write_text("a file in the way\n")
    shutil.copy(root / "image.png", root / "taken/image/progress.png")
    shutil.copy(root / "image.tif", root / "taken/inside/checkpoints/image.tif")
    (root / "taken/noted/config.yaml").write_text("# my own notes\n" + (root / "good.yaml").read_text())


def make_broken_stores(root: Path) -> None:
    """Damaged copies of the tile store `root`/good.h5."""
    with h5py.File(root / "good.h5", "r") as file:
        place = file["images/00000/pixels"].id.get_chunk_info(2).byte_offset
    data = bytearray((root / "good.h5").read_bytes())
    data[place + 9] ^= 1
    (root / "flipped.h5").write_bytes(data)
    with h5py.File(root / "old.h5", "w", userblock_size=512) as file:
        file.attrs.update(format="tiledseg tiles", version=2, images=1)
    with open(root / "old.h5", "r+b") as raw:
        raw.write(b"tiledseg tiles 2 000000000100 ")


def make_broken_runs(root: Path) -> None:
    """Damaged copies of the run that `root`/run holds: two steps, a checkpoint after each."""
    broken = root / "broken"
    for name in ("flipped", "format-99", "latest-folder", "events-file"):
        shutil.copytree(root / "run", broken / name, ignore=shutil.ignore_patterns("events"))
    for step in ("step-000001", "step-000002"):
        weights = broken / "flipped/checkpoints" / step / "model.safetensors"
        data = weights.read_bytes()
        weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        manifest = broken / "format-99/checkpoints" / step / "manifest.json"
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))
    (broken / "latest-folder/checkpoints/latest").unlink()
    (broken / "latest-folder/checkpoints/latest").mkdir()
    (broken / "events-file/events").write_text("a file in the way\n")
