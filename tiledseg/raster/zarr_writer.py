"""Maps and tile stores as Zarr 3 with GeoZarr's and CF's attributes: CRS, transform, names of dims, coordinates,
classes.

The blocks of a map's plain GeoTIFF are the store's chunks. After the ranks have filled it, each chunk is written whole
by one rank. The store has a temporary name until it is complete.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
from rasterio.windows import Window

from tiledseg.config.words import BLOCK
from tiledseg.errors import OutputError, require
from tiledseg.geometry.box import Box
from tiledseg.raster.array_names import OWN, TILES
from tiledseg.raster.array_place import flags
from tiledseg.raster.info import is_placed
from tiledseg.raster.mirrored_reader import prefetch
from tiledseg.raster.tile_store import Opener, StorePlan
from tiledseg.system.outputs import check_ending

CLASSES, SHARES = "classes", "probabilities"
"""Names of the variables."""
_SIDE = 2048
"""Largest side of a tile's chunk in pixels: codecs take at most 2 GiB."""
_CONVENTIONS = {"Conventions": "CF-1.11"}
_WHOLE = {"array.write_empty_chunks": True}  # so that a missing chunk is damage


def check_zarr(key: str, path: str | Path) -> None:
    """Raise ConfigError if zarr is not installed, OutputError if the path exists or has another ending than .zarr."""
    require("--format zarr", "zarr", "zarr")
    if str(path) and Path(path).exists():
        raise OutputError(f"{key} {path} is there; remove it, or choose another output")
    check_ending(key, str(path), ".zarr")


def begin_store(plain: Path, store: Path, compress: str, legend: Sequence[str]) -> None:
    """Create a store with the grid and the metadata of the file `plain`, without chunks. On one rank."""
    import zarr
    from zarr.codecs import GzipCodec, ZstdCodec

    codecs = {"auto": [ZstdCodec()], "zstd": [ZstdCodec()], "deflate": [GzipCodec()], "none": None}
    with zarr.config.set(_WHOLE), rasterio.open(plain, driver="GTiff") as dataset:
        root = zarr.create_group(store, zarr_format=3, attributes=_CONVENTIONS, overwrite=True)
        attributes = _place(root, dataset.shape, dataset.transform, dataset.crs)
        if dataset.dtypes[0] == "uint8":  # float maps have NaN, which needs no attribute
            attributes["_FillValue"] = int(dataset.nodata)
        if dataset.scales[0] != 1:
            attributes["scale_factor"] = dataset.scales[0]
        shares = not legend
        root.create_array(
            SHARES if shares else CLASSES,
            shape=(dataset.count, *dataset.shape) if shares else dataset.shape,
            chunks=(1, BLOCK, BLOCK) if shares else (BLOCK, BLOCK),
            dtype=dataset.dtypes[0],
            dimension_names=("class", "y", "x") if shares else ("y", "x"),
            compressors=codecs[compress],
            fill_value=dataset.nodata,
            attributes=attributes | ({"class_names": list(dataset.descriptions)} if shares else flags(legend)),
        )
        _consolidate(store)


def _place(group: Any, shape: Sequence[int], transform: Any, crs: Any) -> dict[str, Any]:
    """Write the coordinates and the CRS of a grid into a group; return the attributes of arrays on it."""
    place: dict[str, Any] = {}
    wkt = crs.to_wkt() if crs else None
    mapping = {"crs_wkt": wkt, "spatial_ref": wkt} if wkt else {}
    if is_placed(transform):
        place = {"spatial:transform": list(transform)[:6]} | ({"proj:wkt2": wkt} if wkt else {})
        mapping["GeoTransform"] = " ".join(map(repr, transform.to_gdal()))
    for name, count, at in (("y", shape[0], (5, 4)), ("x", shape[1], (2, 0))):
        if place and transform.is_rectilinear:
            degrees = {"y": "latitude", "x": "longitude"} if crs and crs.is_geographic else {}
            words = {"axis": name.upper(), "standard_name": degrees.get(name, f"projection_{name}_coordinate")}
            data = transform[at[0]] + transform[at[1]] * (np.arange(count) + 0.5)
            group.create_array(name, data=data, dimension_names=(name,), attributes=words)
    group.create_array("spatial_ref", data=np.array(0), attributes=mapping)
    return {"grid_mapping": "spatial_ref", "spatial:dimensions": ["y", "x"], **place}


def _consolidate(store: Path) -> None:
    import zarr

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not in Zarr 3's specification yet, but web servers cannot list a folder
        zarr.consolidate_metadata(store, zarr_format=3)


def write_chunks(plain: Path, store: Path, rank: int, size: int, beat: Callable[[], None]) -> None:
    """Write this rank's chunks, every `size`-th one, into the store of `begin_store`."""
    import zarr

    with zarr.config.set(_WHOLE), rasterio.open(plain, driver="GTiff") as dataset:
        group = zarr.open_group(store, mode="r+", zarr_format=3, use_consolidated=False)
        array: Any = group[CLASSES if CLASSES in group else SHARES]
        for box in list(Box.of_shape(dataset.shape).blocks(BLOCK, BLOCK))[rank::size]:
            pixels_CHW = dataset.read(window=Window.from_slices(*box.slices))
            array[(..., *box.slices)] = pixels_CHW[0] if array.ndim == 2 else pixels_CHW
            beat()


def begin_tiles(store: Path, plan: StorePlan) -> None:
    """Create a store of rasters and their labels without chunks, on one rank. Group `0` has image 0 and its
    labels, with masks if pixels may be invalid. Chunks are cores of tiles."""
    import zarr

    with zarr.config.set(_WHOLE):
        words = {TILES: {"images": [image.has_mask for image in plan.images]}}
        words[TILES]["labels"] = [label.has_mask for label in plan.labels or ()]
        root = zarr.create_group(store, zarr_format=3, attributes=_CONVENTIONS | words, overwrite=True)
        for name, info, tiling in plan.rasters():
            group, sides = root.require_group(str(name.number)), tuple(min(side, _SIDE) for side in tiling.core_max)
            if not name.labels:
                place = _place(group, info.shape, info.transform, info.crs)
            bands = () if name.labels and info.bands == 1 else (info.bands,)
            own = {key: getattr(info, key) for key in OWN}
            named = dict(info.class_names) if name.labels else {}
            group.create_array(
                name.kind,
                shape=(*bands, *info.shape),
                chunks=(*bands, *sides),
                dtype=info.dtype,
                dimension_names=("band", "y", "x")[-len(bands) - 2 :],
                attributes=place | flags(list(named.values()), list(named)) | {TILES: own},
            )
            if info.has_mask:
                how = {"shape": info.shape, "chunks": sides, "dimension_names": ("y", "x"), "attributes": place}
                group.create_array(f"{name.kind}_valid", dtype="uint8", **how)
        _consolidate(store)


def write_tiles(
    store: Path, plan: StorePlan, image: Opener, label: Opener, rank: int, size: int, beat: Callable[[], None]
) -> bool:
    """Write this rank's chunks, every `size`-th one, into the store of `begin_tiles`. Return True if an image has a
    valid pixel in them."""
    import zarr

    turn, any_valid = 0, False
    with zarr.config.set(_WHOLE):
        root = zarr.open_group(store, mode="r+", zarr_format=3, use_consolidated=False)
        for name, info, tiling in plan.rasters():
            group: Any = root[str(name.number)]
            boxes = list(Box.of_shape(info.shape).blocks(*(min(side, _SIDE) for side in tiling.core_max)))
            own = boxes[(rank - turn) % size :: size]
            turn += len(boxes)
            with (label if name.labels else image)(name.number) as reader:
                read = prefetch(own, reader.read, threads=2, depth=2)
                for box, (pixels_CHW, valid_HW) in zip(own, read, strict=True):
                    group[name.kind][(..., *box.slices)] = pixels_CHW[0] if group[name.kind].ndim == 2 else pixels_CHW
                    if info.has_mask:
                        group[f"{name.kind}_valid"][box.slices] = valid_HW
                    any_valid = any_valid or (not name.labels and bool(valid_HW.any()))
                    beat()
    return any_valid
