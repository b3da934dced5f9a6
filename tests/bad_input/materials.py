"""The files that broken inputs are made from: small good rasters, one trained run, damaged copies of them, and paths
that are no regular files.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyogrio
import rasterio
import shapely
from affine import Affine
from rasterio.transform import from_origin

from tests.checkpoint.resealed import seal
from tests.raster.referring import raw_vrt, vrt
from tests.small_files import write_raster, write_yaml

SIDE = 48
OTHER_UTM = "EPSG:32612"


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
    """Everything that needs no training. One rank calls it."""
    _make_good_rasters(root)
    _make_odd_rasters(root)
    _make_broken_files(root)
    write_yaml(root / "good.yaml", good_config(root))
    _make_broken_configs(root)
    (root / "folder").mkdir()
    _make_inputs(root)
    _make_items(root)
    _make_outputs(root)


def _make_good_rasters(root: Path) -> None:
    generator = np.random.default_rng(7)
    image_CHW = generator.integers(1, 255, (3, SIDE, SIDE), np.uint8)
    labels_HW = generator.integers(0, 3, (SIDE, SIDE), np.uint8)
    write_raster(root / "image.tif", image_CHW)
    write_raster(root / "second.tif", image_CHW[:, ::-1])
    write_raster(root / "labels.tif", labels_HW[None])
    write_raster(root / "second-labels.tif", labels_HW[None, ::-1])
    write_raster(root / "image.png", image_CHW, driver="PNG", crs=None, transform=None)


def _make_odd_rasters(root: Path) -> None:
    """Whole files that do not fit their partners or their use."""
    with rasterio.open(root / "image.tif") as image, rasterio.open(root / "labels.tif") as labels:
        image_CHW, labels_CHW = image.read(), labels.read()
    write_raster(root / "complex.tif", image_CHW.astype(np.complex64))
    write_raster(root / "two-bands.tif", image_CHW[:2])
    write_raster(root / "uint16.tif", image_CHW.astype(np.uint16))
    write_raster(root / "blank.tif", np.zeros_like(image_CHW), nodata=0)
    write_raster(root / "tiny.tif", image_CHW[:, :1, :1])
    write_raster(root / "tiny-labels.tif", labels_CHW[:, :1, :1])
    write_raster(root / "float-labels.tif", labels_CHW.astype(np.float32))
    write_raster(root / "small-labels.tif", labels_CHW[:, :-1])
    write_raster(root / "other-crs-labels.tif", labels_CHW, crs=OTHER_UTM)
    write_raster(root / "shifted-labels.tif", labels_CHW, transform=from_origin(500001, 3760000, 0.5, 0.5))
    write_raster(root / "three-band-labels.tif", np.repeat(labels_CHW, 3, 0))
    write_raster(root / "void-labels.tif", np.full_like(labels_CHW, 255))
    labels_CHW[0, 5, 7] = 9
    write_raster(root / "outside-labels.tif", labels_CHW)


def _make_items(root: Path) -> None:
    """STAC items, whose assets are on one grid or not, in place or not, of a date or not."""
    with rasterio.open(root / "image.tif") as image:
        write_raster(root / "half.tif", image.read()[:1, ::2, ::2], transform=image.transform @ Affine.scale(2))
        write_raster(root / "band.tif", image.read()[:1])
    for name, assets in (
        ("good", {"red": "band.tif", "nir": "image.tif"}),
        ("grids", {"red": "band.tif", "nir": "half.tif"}),
        ("gone", {"red": "band.tif", "nir": "nowhere.tif"}),
        ("fewer", {"red": "band.tif"}),
        ("outside", {"red": "band.tif", "nir": "../image.tif"}),
        ("remote", {"red": "band.tif", "nir": "/vsicurl/http://127.0.0.1:9/a.tif"}),
    ):
        hrefs = {band: {"href": href} for band, href in assets.items()}
        item = {"type": "Feature", "id": name, "bbox": [0, 0, 1, 1], "properties": {"datetime": None}, "assets": hrefs}
        (root / f"{name}.json").write_text(json.dumps({"type": "FeatureCollection", "features": [item]}))
    (root / "broken.json").write_text('{"type": "FeatureCollection", "features": [{"id": "a"')


def _make_broken_files(root: Path) -> None:
    whole = (root / "image.tif").read_bytes()
    for name, size in (("head", 6), ("tenth", len(whole) // 10), ("half", len(whole) // 2), ("end", len(whole) - 1)):
        (root / f"cut-{name}.tif").write_bytes(whole[:size])
    png = (root / "image.png").read_bytes()
    (root / "cut.png").write_bytes(png[: len(png) // 2])
    (root / "cut-labels.tif").write_bytes((root / "labels.tif").read_bytes()[:-9])
    with rasterio.open(root / "image.tif") as file:
        write_raster(root / "damaged.tif", file.read(), compress="deflate")
    packed = bytearray((root / "damaged.tif").read_bytes())
    middle = len(packed) // 2
    packed[middle : middle + 400] = bytes(400)
    (root / "damaged.tif").write_bytes(packed)
    (root / "empty.tif").write_bytes(b"")
    (root / "empty.csv").write_bytes(b"")
    (root / "text.tif").write_text("this is no raster\n")
    (root / "file").write_text("a file in the way\n")


def _make_broken_configs(root: Path) -> None:
    good = good_config(root)
    write_yaml(root / "unknown-key.yaml", {**good, "data": {**good["data"], "imagse": "a.tif"}})
    (root / "malformed.yaml").write_text("data:\n  images: [a.tif\n  labels: b.tif\n")


def make_broken_stores(root: Path) -> None:
    """Damaged copies of the tile store `root`/good.h5, and an HDF5 file that is none. One rank calls it."""
    whole = (root / "good.h5").read_bytes()
    (root / "cut.h5").write_bytes(whole[: len(whole) // 3])
    (root / "cut-end.h5").write_bytes(whole[:-1])
    with h5py.File(root / "other.h5", "w") as file:
        file["numbers"] = np.arange(10)
    _make_edited_stores(root)


def make_broken_runs(root: Path) -> None:
    """Damaged copies of the run that `root`/run holds (two steps, a checkpoint after each). One rank calls it."""
    for change in (
        *(_Damage(f"no-{name}", lambda step, file=name: (step / file).unlink()) for name in FILES),
        _Damage("flipped", lambda step: _flip(step / "model.safetensors")),
        _Damage("not-json", lambda step: (step / "manifest.json").write_text("{ this is no JSON")),
        _Damage("edited", lambda step: _edit(step, lambda manifest: manifest["state"].update(step=7))),
        _Damage("format-99", lambda step: _edit(step, lambda manifest: manifest.update(format=99))),
        *(_Damage(name, change) for name, change, _ in RESEALED),
    ):
        folder = root / "broken" / change.name
        shutil.copytree(root / "run", folder)
        for step in sorted((folder / "checkpoints").glob("step-*")):
            change.apply(step)
    (root / "broken" / "no-checkpoint").mkdir()
    for name in ("metrics", "events-file"):
        shutil.copytree(root / "run", root / "broken" / name, ignore=shutil.ignore_patterns("events"))
    (root / "broken" / "events-file" / "events").write_text("a file in the way\n")
    with (root / "broken" / "metrics" / "metrics.jsonl").open("r+b") as file:
        file.seek(len(file.readline()))
        file.write(b"\0")
    shutil.copytree(root / "run", root / "broken" / "latest-folder")
    (root / "broken" / "latest-folder" / "checkpoints" / "latest").unlink()
    (root / "broken" / "latest-folder" / "checkpoints" / "latest").mkdir()
    lost = root / "broken" / "lost-latest"
    shutil.copytree(root / "run", lost)
    (lost / "checkpoints" / "latest").write_text("step-000099\n")


RESEALED = (
    ("network-impossible", lambda step: seal(step, lambda m: m["state"]["network"].update(levels=0)), "levels is 0"),
    ("config-null", lambda step: seal(step, lambda m: m["state"].update(config=None)), "is no checkpoint"),
)
"""Edits after which the checksums are right."""
FILES = ("model.safetensors", "manifest.json")


@dataclass(frozen=True)
class _Damage:
    name: str
    apply: Any


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _edit(step: Path, change: Any) -> None:
    path = step / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def _make_inputs(root: Path) -> None:
    (root / "vrt.tif").write_text(vrt(str(root / "image.tif"), SIDE))
    (root / "raw-vrt.tif").write_text(raw_vrt("/etc/passwd", SIDE))
    shutil.copy(root / "image.tif", root / "masked.tif")
    shutil.copy(root / "vrt.tif", root / "masked.tif.msk")
    os.mkfifo(root / "fifo")
    (root / "link-to-fifo.tif").symlink_to("fifo")
    shutil.copy(root / "image.tif", root / "piped.tif")
    os.mkfifo(root / "piped.tif.aux.xml")
    pixels_CHW = np.ones((3, SIDE, SIDE), np.uint8)
    write_raster(root / "nowhere-on-earth.tif", pixels_CHW, transform=Affine(0.5, 0, np.nan, 0, -0.5, 4e6))


def _make_edited_stores(root: Path) -> None:
    for name, edit in (("regridded", _cut_otherwise), ("linked", _link_pixels)):
        with h5py.File(shutil.copy(root / "good.h5", root / f"{name}.h5"), "r+") as file:
            edit(file["images/00000"])
    with h5py.File(root / "good.h5", "r") as file:
        places = {kind: file[f"{kind}/00000/pixels"].id.get_chunk_info(2).byte_offset for kind in ("images", "labels")}
    for name, kind in (("flipped", "images"), ("flipped-labels", "labels")):
        data = bytearray((root / "good.h5").read_bytes())
        data[places[kind] + 9] ^= 1
        (root / f"{name}.h5").write_bytes(data)
    with h5py.File(root / "old.h5", "w", userblock_size=512) as file:
        file.attrs.update(format="tiledseg tiles", version=2, images=1)
    with open(root / "old.h5", "r+b") as raw:
        raw.write(b"tiledseg tiles 2 000000000100 ")


def _cut_otherwise(group: h5py.Group) -> None:
    text = group.attrs["raster"].replace('"grid": [2, 2]', '"grid": [2, 3]')
    group.attrs.update(raster=text, crc32=zlib.crc32(text.encode()))


def _link_pixels(group: h5py.Group) -> None:
    del group["pixels"]
    group["pixels"] = h5py.ExternalLink("good.h5", "/images/00000/pixels")


def _make_outputs(root: Path) -> None:
    (root / "link.tif").symlink_to(root / "image.tif")
    (root / "link.json").symlink_to(root / "run" / "checkpoints" / "step-000002" / "manifest.json")
    (root / "dangling").symlink_to(root / "nowhere" / "file")
    os.mkfifo(root / "pipe.png")
    os.mkfifo(root / "styled.qml")
    (root / "text.gpkg").write_text("no database\n")
    square = shapely.to_wkb(np.array([shapely.box(0, 0, 1, 1)], object))
    pyogrio.raw.write(root / "parcels.gpkg", square, [], [], layer="mine", geometry_type="Polygon", crs="EPSG:32611")
    (root / "folder.png").mkdir()
    for name in (".own.tif.part", "mask.tif.msk", ".own.h5.part"):
        shutil.copy(root / "image.tif", root / name)
    _make_taken_folders(root / "taken")
    shutil.copy(root / "image.png", root / "taken" / "image" / "progress.png")
    shutil.copy(root / "image.tif", root / "taken" / "inside" / "checkpoints" / "image.tif")
    (root / "taken" / "noted" / "config.yaml").write_text("# my own notes\n" + (root / "good.yaml").read_text())


def _make_taken_folders(root: Path) -> None:
    """Folders for a run, in each of which one name is something else than the run's."""
    for name in ("events", "checkpoints", "metrics", "image", "inside/checkpoints", "noted"):
        (root / name).mkdir(parents=True)
    for name in ("events", "checkpoints"):
        (root / name / name).write_text("a file in the way\n")
    os.mkfifo(root / "metrics" / "metrics.jsonl")
