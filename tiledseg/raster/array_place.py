"""The metadata of an xarray.DataArray by the conventions of rioxarray, odc.stac, stackstac, GDAL and CF: dims of rows
and columns, CRS, transform, nodata value, names of classes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from affine import Affine

from tiledseg.errors import RasterError
from tiledseg.raster.info import checked_crs, is_placed, named_crs
from tiledseg.raster.mirrored_reader import as_stored

_ROWS = ("y", "lat", "latitude", "northing", "projection_y_coordinate", "grid_latitude")
_COLS = ("x", "lon", "longitude", "easting", "projection_x_coordinate", "grid_longitude")
_TIMES = "time", "t", "date", "datetime", "valid_time"
_OFF, _UNEVEN = 1e-3, 0.1
"""Tolerances in pixels: of coordinates to a stated transform, and to even steps (float32 rounds coordinates)."""


def dims_of(array: Any) -> tuple[str, str] | None:
    """Return the dims of rows and columns; None if they cannot be told."""
    found = []
    for names, axis in ((_ROWS, "Y"), (_COLS, "X")):
        marks = {dim: array.coords[dim].attrs if dim in array.coords else {} for dim in array.dims}
        fits = [dim for dim in array.dims if str(dim).lower() in names]
        found.append(fits or [dim for dim, mark in marks.items() if mark.get("axis") == axis])
    return (found[0][0], found[1][0]) if all(len(each) == 1 for each in found) else None


def check_dims(path: str, array: Any) -> Any:
    """Return the array as (bands, rows, columns), without other dims of length 1. Raises RasterError for further
    dims."""
    dims = dims_of(array)
    if dims is None:
        have = ", ".join(map(str, array.dims)) or "none"
        raise RasterError(f"{path} has the dims {have}, without rows and columns; give an array with the dims y and x")
    if not array.size > 0:  # dask may not know it
        raise RasterError(f"{path} has no pixel: {dict(array.sizes)}; give an array with some")
    others = [dim for dim in array.dims if dim not in dims]
    long = [dim for dim in others if array.sizes[dim] > 1]
    if len(long) > 1:
        have = ", ".join(f"{dim} {array.sizes[dim]}" for dim in long)
        raise RasterError(f"{path} has the dims {have} beside {' and '.join(dims)}; give an array with one, the bands")
    array = array.squeeze([dim for dim in others if dim not in (long or others[-1:])], drop=True)
    if not others:
        array = array.expand_dims("band")
    return array.transpose(..., *dims)


def time_of(array: Any) -> str | None:
    """Return the dim of several times if another dim is of bands, else None."""
    others = [dim for dim in array.dims if dim not in (dims_of(array) or ())]
    kinds = {dim: array.coords[dim].dtype.kind if dim in array.coords else "" for dim in others}
    times = [dim for dim in others if str(dim).lower() in _TIMES or kinds[dim] == "M"]
    return times[0] if len(times) == 1 and len(others) > 1 and array.sizes[times[0]] > 1 else None


def nodata_of(path: str, array: Any) -> float | None:
    """Return the nodata value; None if the array states none or NaN. Raises RasterError for several. In arrays decoded
    to floats, NaN replaces the file's value, which `encoding` has."""
    for words in (array.attrs, array.encoding)[: {"f": 1, "i": 2, "u": 2}.get(array.dtype.kind, 0)]:
        named = [words[name] for name in ("_FillValue", "missing_value", "nodata", "nodatavals") if name in words]
        numbers = [each for value in named for each in np.ravel(value) if np.asarray(each).dtype.kind in "iuf"]
        values = {as_stored(float(each), array.dtype): float(each) for each in numbers if not np.isnan(each)}
        values.pop(None, None)
        if len(values) > 1:
            every = ", ".join(map(str, values.values()))
            raise RasterError(f"{path} states {every} for pixels without data; keep one, or give data.nodata")
        if numbers:
            return next(iter(values.values()), None)
    return None


def class_names_of(array: Any) -> tuple[tuple[int, str], ...]:
    """Return (value, name) of the classes, from CF's flags."""
    words = array.attrs
    names = words.get("class_names") or str(words.get("flag_meanings", "")).split()
    values = np.atleast_1d(words.get("flag_values", ()))
    return tuple((int(value), str(name)) for value, name in zip(values, names, strict=False))


def flags(names: Sequence[str], values: Sequence[int] | None = None) -> dict[str, Any]:
    """Return the attributes with the names of a map's classes, numbered from 0, or by `values`."""
    meanings = " ".join(re.sub(r"[^\w.@+-]", "_", name) for name in names)
    numbers = list(range(len(names)) if values is None else values)
    return {"flag_values": numbers, "flag_meanings": meanings, "class_names": list(names)} if names else {}


def placed(path: str, array: Any, array_CHW: Any) -> tuple[Any, Affine | None, tuple[str, ...]]:
    """Return CRS, transform and notes. Raises RasterError for coordinates that are not evenly spaced."""
    name = array.encoding.get("grid_mapping") or array.attrs.get("grid_mapping") or "spatial_ref"
    mapping = array.coords[name].attrs if name in array.coords else {}
    crs = _crs(path, array, mapping)
    notes: tuple[str, ...] = ()
    if crs is None and mapping.get("grid_mapping_name"):
        notes = (f"{path} has the grid mapping {name} without crs_wkt: it has no CRS here, nor have its maps",)
    stated = _stated(path, array.attrs, mapping)
    dims = array_CHW.dims[1:]
    centres: list[Any] = [array.coords[dim].values if dim in array.coords else None for dim in dims]
    down, across = (_step(path, str(dim), each) for dim, each in zip(dims, centres, strict=True))
    if stated is not None and stated.is_rectilinear:
        row = _first(centres[0], down, stated.f, stated.e)
        col = _first(centres[1], across, stated.c, stated.a)
        if row is not None and col is not None:
            return crs, stated @ Affine.translation(col, row), notes
    if down is None or across is None:
        return crs, stated, notes
    top, left = (float(each[0]) for each in centres)
    return crs, Affine(across, 0.0, left - across / 2, 0.0, down, top - down / 2), notes


def _first(centres: Any, step: float | None, origin: float, side: float) -> int | None:
    """Return the pixel of a stated transform that is the array's first; None if coordinates are on another grid."""
    if centres is None:
        return 0
    at = (float(centres[0]) - origin) / side
    if step is not None and abs(step / side - 1) * len(centres) >= _OFF:
        return None  # another pixel size
    return next((round(at - shift) for shift in (0.5, 0.0) if abs(at - shift - round(at - shift)) < _OFF), None)


def _step(path: str, dim: str, centres: Any) -> float | None:
    if centres is None or len(centres) < 2:
        return None
    if centres.dtype.kind not in "iuf":
        raise RasterError(f"{path} has {dim} in {centres.dtype}; give it numbers")
    centres = centres.astype(np.float64)
    step = float(centres[-1] - centres[0]) / (len(centres) - 1)
    off = np.abs(centres - (centres[0] + step * np.arange(len(centres)))).max() if step else math.inf
    if not off <= _UNEVEN * abs(step):
        raise RasterError(f"{path} has {dim} in uneven steps; reproject it to a regular grid")
    return step


def _stated(path: str, words: Any, mapping: Any) -> Affine | None:
    """Return the transform stated by attributes: in GDAL's order in a grid mapping, in rasterio's in an array."""
    if "GeoTransform" in mapping:
        numbers = [float(number) for number in str(mapping["GeoTransform"]).split()]
        transform = Affine.from_gdal(*numbers)
    else:
        numbers = [float(number) for number in words.get("spatial:transform", words.get("transform", ()))][:6]
        if len(numbers) < 6:
            return None
        transform = Affine(*numbers)
    if not all(map(math.isfinite, numbers)) or transform.determinant == 0:
        raise RasterError(f"{path} has the transform {numbers}, which is no place on the ground; mend it")
    return transform if is_placed(transform) else None


def _crs(path: str, array: Any, mapping: Any) -> Any:
    own = array.attrs
    gdal: Any = own.get("_CRS") if isinstance(own.get("_CRS"), dict) else {}
    epsg = own.get("proj:epsg", array.coords["epsg"].item() if "epsg" in array.coords else None)
    texts = (
        *(mapping.get(name) for name in ("crs_wkt", "spatial_ref")),
        *(own.get(name) for name in ("proj:wkt2", "proj:code", "crs", "spatial_ref")),
        gdal.get("wkt"),
        epsg and f"EPSG:{epsg}",
    )
    text = next((str(text) for text in texts if text), None)
    return None if text is None else checked_crs(path, named_crs(path, text))
