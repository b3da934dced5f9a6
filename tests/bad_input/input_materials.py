"""The files of `input_cases.py`: rasters that are none, and paths that are no regular files."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import numpy as np
from affine import Affine

from tests.bad_input.materials import SIDE
from tests.raster.referring import raw_vrt, tile_map, vrt
from tests.small_files import write_raster

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


def _make_socket(path: Path) -> None:
    """By its name in its folder: a socket's whole path may be 107 characters long."""
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as end:
            end.bind(path.name)
    finally:
        os.chdir(before)
