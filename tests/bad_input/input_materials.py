"""The files of `input_cases.py`: rasters that are none, and paths that are no regular files."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import h5py
import numpy as np
from affine import Affine

from tests.bad_input.materials import SIDE
from tests.raster.referring import raw_vrt, tile_map, vrt
from tests.small_files import write_raster
from tiledseg.raster.tile_store import checksum

_NO_SERVER = "127.0.0.1:9"


def make_inputs(root: Path) -> None:
    """Everything beside what `make_materials` has made. One rank calls it."""
    (root / "vrt.tif").write_text(vrt(str(root / "image.tif"), SIDE))
    (root / "raw-vrt.tif").write_text(raw_vrt("/etc/passwd", SIDE))
    (root / "web-map.tif").write_text(tile_map(_NO_SERVER))
    shutil.copy(root / "image.tif", root / "masked.tif")
    shutil.copy(root / "vrt.tif", root / "masked.tif.msk")
    os.mkfifo(root / "fifo")
    (root / "link-to-fifo.tif").symlink_to("fifo")
    shutil.copy(root / "image.tif", root / "piped.tif")
    os.mkfifo(root / "piped.tif.aux.xml")
    _make_socket(root / "socket")
    pixels_CHW = np.ones((3, SIDE, SIDE), np.uint8)
    write_raster(root / "nowhere-on-earth.tif", pixels_CHW, transform=Affine(0.5, 0, np.nan, 0, -0.5, 4e6))


def make_edited_stores(root: Path) -> None:
    """Copies of the tile store `root`/good.h5 that were edited. One rank calls it."""
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
    group.attrs.update(raster=text, crc32=checksum(text))


def _link_pixels(group: h5py.Group) -> None:
    del group["pixels"]
    group["pixels"] = h5py.ExternalLink("good.h5", "/images/00000/pixels")


def _make_socket(path: Path) -> None:
    """By its name in its folder: a socket's whole path may be 107 characters long."""
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as end:
            end.bind(path.name)
    finally:
        os.chdir(before)
