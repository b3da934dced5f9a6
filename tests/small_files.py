"""Small rasters and configurations on the disk, and what a folder holds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import pytest
import rasterio
import yaml
from numpy.typing import NDArray
from rasterio.transform import from_origin

UTM = "EPSG:32611"
PLACE = from_origin(500000, 3760000, 0.5, 0.5)
alike_in_bytes = pytest.mark.skipif(h5py.version.hdf5_version_tuple < (1, 12), reason="HDF5 1.10 writes a group's time")


def write_raster(path: Path, pixels_CHW: NDArray, **options: Any) -> str:
    """The path of a GeoTIFF (or what `driver` says) of these pixels, in tiles of 16."""
    profile: dict[str, Any] = {"driver": "GTiff", "crs": UTM, "transform": PLACE, **options}
    if profile["driver"] == "GTiff":
        tiles = {"tiled": True, "blockxsize": 16, "blockysize": 16}
        profile = {"photometric": "minisblack", **profile, **tiles}  # else GDAL takes a fourth band for alpha
    bands, height, width = pixels_CHW.shape
    with rasterio.open(path, "w", count=bands, height=height, width=width, dtype=pixels_CHW.dtype, **profile) as file:
        file.write(pixels_CHW)
    return str(path)


def read_raster(path: Path) -> NDArray:
    """Return the bands of a raster, (C, H, W)."""
    with rasterio.open(path) as file:
        return file.read()


def touch(*names: str) -> None:
    """Empty files of these names, in their folders."""
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()


def write_yaml(path: Path, values: Mapping[str, Any]) -> None:
    """`values` as YAML."""
    path.write_text(yaml.safe_dump(dict(values), sort_keys=False))


def tree(root: Path) -> dict[str, tuple[int, int, int]]:
    """Every path below `root` with its size, time of change and inode: what a refused command must leave as it was."""
    found = {}
    for path in sorted(root.rglob("*")):
        about = path.lstat()
        found[str(path.relative_to(root))] = (about.st_size, about.st_mtime_ns, about.st_ino)
    return found
