"""One scene in each form in which people have arrays: GeoTIFF, Zarr 2 and 3, netCDF 3 and 4, and xarray.DataArray."""

import json
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
import xarray
from affine import Affine
from numpy.typing import NDArray

from tests.small_files import write_raster

TRANSFORM = Affine(10.0, 0.0, 600_000.0, 0.0, -10.0, 5_100_000.0)
CRS = "EPSG:32633"
CHUNK = 48
FORMS = ("tif", "zarr2", "zarr3", "nc4", "nc3", "memory", "dask")
STORES = FORMS[1:5]


def scene(shape: tuple[int, ...], dtype: str = "uint16", seed: int = 0) -> NDArray:
    return np.random.default_rng(seed).integers(0, 200, shape).astype(dtype)


def as_array(pixels: NDArray, name: str = "reflectance", nodata: float | None = None) -> Any:
    """Return pixels (C, H, W), (H, W) or (T, C, H, W), as rioxarray and odc.stac give them."""
    height, width = pixels.shape[-2:]
    x = TRANSFORM.c + TRANSFORM.a * (np.arange(width) + 0.5)
    y = TRANSFORM.f + TRANSFORM.e * (np.arange(height) + 0.5)
    mapping = xarray.Variable((), 0, {"crs_wkt": rasterio.crs.CRS.from_string(CRS).to_wkt()})
    attributes = {"grid_mapping": "spatial_ref"} | ({} if nodata is None else {"_FillValue": pixels.dtype.type(nodata)})
    dims = ("time", "band", "y", "x")[-pixels.ndim :]
    return xarray.DataArray(pixels, {"y": y, "x": x, "spatial_ref": mapping}, dims, name, attributes)


PARTS: dict[str, dict[str, Any]] = {
    "items": {"assets": ["red", "green", "nir"]},
    "pieces": {"mosaic": True},
    "items of pieces": {"assets": ["red", "green", "nir"], "mosaic": True},
}
"""Forms in several files, with the keys of `data` that each needs."""


def write_parts(folder: Path, form: str, pixels_CHW: NDArray, labels_HW: NDArray, nodata: float) -> tuple[str, str]:
    """Write a scene in a form of `PARTS`, and return image and labels: cut in four, or not, and a file a band."""
    folder = folder / form
    folder.mkdir()
    rows, cols = ((0, size * 4 // 9, size) if PARTS[form].get("mosaic") else (0, size) for size in labels_HW.shape)
    features = []
    for row, bottom in pairwise(rows):
        for col, right in pairwise(cols):
            at, place = np.s_[..., row:bottom, col:right], TRANSFORM @ Affine.translation(col, row)

            def raster(name: str, bands: NDArray, nodata: float | None, place: Affine = place) -> str:
                write_raster(folder / f"{name}.tif", bands, crs=CRS, transform=place, nodata=nodata)
                return f"{name}.tif"

            name = f"tile-{row}-{col}"
            raster(f"labels-{name}", labels_HW[at][None], None)
            names = PARTS[form].get("assets", ["image"])
            bands = np.split(pixels_CHW[at], len(names))
            hrefs = {
                band: {"href": raster(f"{band}-{name}", one, nodata)} for band, one in zip(names, bands, strict=True)
            }
            features.append({"type": "Feature", "stac_version": "1.0.0", "id": name, "assets": hrefs, "properties": {}})
    (folder / "items.json").write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    images = folder / ("items.json" if "assets" in PARTS[form] else "image-*.tif")
    return str(images), str(folder / ("labels-{stem}.tif" if "assets" in PARTS[form] else "labels-*.tif"))


def write(folder: Path, form: str, pixels: NDArray, name: str = "reflectance", nodata: float | None = None) -> Any:
    """Write pixels in a form, and return what `data.images` is given for them."""
    array = as_array(pixels, name, nodata)
    if form == "memory":
        return array
    if form == "dask":
        return array.chunk({"y": CHUNK, "x": CHUNK})
    path = folder / f"{name}-{form}.{'tif' if form == 'tif' else 'nc' if form.startswith('nc') else 'zarr'}"
    if form == "tif":
        bands = pixels.reshape(-1, *pixels.shape[-2:])
        return write_raster(path, bands, crs=CRS, transform=TRANSFORM, nodata=nodata)
    data = array.to_dataset()
    chunks = tuple(min(CHUNK, size) if size > 8 else 1 for size in pixels.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if form == "nc3":
            data.to_netcdf(path, engine="scipy")
        elif form == "nc4":
            data.to_netcdf(path, engine="h5netcdf", encoding={name: {"chunksizes": chunks, "zlib": True}})
        else:
            data.to_zarr(
                path, zarr_format=int(form[-1]), encoding={name: {"chunks": chunks}}, consolidated=form == "zarr2"
            )
    return f"{path}:/{name}"


def chunks(folder: Path) -> list[Path]:
    """The files of the chunks of the variable `reflectance`."""
    files = sorted(folder.glob("*.zarr/reflectance/**/*"))
    return [file for file in files if file.is_file() and file.name[0].isdigit()]
