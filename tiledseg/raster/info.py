"""Metadata of a raster: size, bands, and georeferencing, which maps and tile stores of it keep.

A raster is georeferenced by a transform (kept exactly, rotated or not), by control points in their own CRS, by rational
polynomial coefficients, or not at all."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from affine import Affine
from rasterio.control import GroundControlPoint
from rasterio.crs import CRS
from rasterio.enums import ColorInterp
from rasterio.errors import CRSError
from rasterio.rpc import RPC

from tiledseg.config.checks import shown
from tiledseg.errors import RasterError, first_line
from tiledseg.geometry.tiling import Tiling
from tiledseg.raster.remote import is_named

Point = tuple[float, float, float, float, float]


class GroundControl(NamedTuple):
    """Control points (row, col, x, y, z) in the CRS `crs` (WKT). `coefficients`: the RPCs' names and texts in GDAL."""

    points: tuple[Point, ...] = ()
    crs: str | None = None
    coefficients: tuple[tuple[str, str], ...] = ()


def ground_of(path: str, dataset: Any) -> GroundControl | None:
    """Return the ground control of an open raster; None without any. Raises RasterError for points that are not
    finite."""
    points, crs = dataset.gcps
    places = tuple((float(p.row), float(p.col), float(p.x), float(p.y), float(p.z or 0)) for p in points)
    for at, point in enumerate(places):
        if not all(map(math.isfinite, point)):
            raise RasterError(f"{path} has the control point {at + 1} at {point}, not finite; remove or mend it")
    coefficients = tuple(sorted(dataset.rpcs.to_gdal().items())) if dataset.rpcs is not None else ()
    if not places and not coefficients:
        return None
    return GroundControl(places, crs.to_wkt() if crs else None, coefficients)


_TOLERANCE_PIXELS = 0.01
_MOST_POINTS = 10_922
"""Most control points in a TIFF. More go to a sidecar, which rasterio 1.4 writes wrongly on Python 3.12 and newer."""

_OF_VIEWERS = (".aux.xml", ".ovr")

Colour = tuple[int, int, int, int]


@dataclass(frozen=True)
class RasterInfo:
    """Metadata of a raster as its reader returns it: `bands` counts the selected bands without alpha.

    `crs` and `transform` are rasterio's (None and the identity if the file has none). `ground`: control points beside
    or instead of a transform. `nodata`: of the first selected band. `block_shape`: (rows, cols) decoded at once.
    `has_mask`: pixels may be invalid. `band_numbers`: the file's own, from 1. `palette`: (index, (red, green, blue,
    alpha)) of each entry of a one-band raster's colour table. `class_names`: (value, name) of each named value.
    `holds_classes`: values are class numbers already, not raw values. `times`: number of joined rasters whose bands
    follow one another. `tiling`: the cut of a tile store. `notes`: one-line warnings for the user. `references`: a
    warning on the other files that this one names, else empty. `size`: bytes of a local file, else 0.
    """

    path: str
    height: int
    width: int
    bands: int
    dtype: str
    crs: Any = None
    transform: Any = None
    nodata: float | None = None
    block_shape: tuple[int, int] = (1, 1)
    has_mask: bool = False
    band_numbers: tuple[int, ...] = ()
    driver: str = ""
    palette: tuple[tuple[int, Colour], ...] | None = None
    tiling: Tiling | None = None
    files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    references: str = ""
    ground: GroundControl | None = None
    class_names: tuple[tuple[int, str], ...] = ()
    holds_classes: bool = False
    size: int = 0
    times: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """Return (height, width)."""
        return self.height, self.width

    @property
    def beside(self) -> tuple[str, ...]:
        """Return the local companion files that hold pixels or attributes: a mask, a shapefile's table, sources of a
        VRT. Statistics and overviews left by viewers change no pixel."""
        others = (file for file in self.files if file != self.path and not file.endswith(_OF_VIEWERS))
        return tuple(file for file in others if not is_named(file) and os.path.exists(file))


def reference_notes(infos: Iterable[RasterInfo]) -> list[str]:
    """Return the warnings on rasters that name other files, in the order of `infos`."""
    return [info.references for info in infos if info.references]


_CODE = re.compile(
    r"(?:urn:(?:x-)?ogc:def:crs:|https?://www\.opengis\.net/def/crs/)?([A-Za-z]\w*)(?:[:/][\w.]*)?[:/](\w+)", re.I
)
_AUTHORITY = re.compile(r'\b(?:AUTHORITY|ID)\["([^"]*)",\s*"?([^"\]]*)')


def named_crs(path: str, text: str) -> CRS:
    """Return the CRS of an authority's code or of WKT. GDAL's parser of other texts may open a file or a URL."""
    code = _CODE.fullmatch(text.strip())
    if code is None and "[" not in text:
        raise RasterError(f"{path} has the CRS {shown(text)!r}; name it by an authority's code, as EPSG:4326")
    if code is None:
        return checked_crs(path, CRS.from_wkt(text))
    authority, number = code.groups()
    return CRS.from_authority(*(("EPSG", "4326") if number == "CRS84" else (authority.upper(), number)))


def checked_crs(path: str, crs: CRS | None) -> CRS | None:
    """Return a file's CRS. Raises RasterError if an authority in it is a URL, which GDAL would contact."""
    odd = [":".join(pair) for pair in _AUTHORITY.findall(crs.to_wkt() if crs else "") if set("/:") & set("".join(pair))]
    if odd:
        raise RasterError(f"{path} has a CRS of the authority {odd[0]!r}, a URL; give another (gdal_edit.py -a_srs)")
    return crs


def code_notes(infos: Iterable[RasterInfo]) -> list[str]:
    """Return a warning if PROJ lacks its database: a CRS is then written without its EPSG code, or not at all."""
    first = next((info.path for info in infos if info.crs or is_placed(info.transform)), None)
    try:
        CRS.from_epsg(4326)
    except CRSError as error:
        wrong = [f"unset {name} ({os.environ[name]})" for name in ("PROJ_DATA", "PROJ_LIB") if name in os.environ]
        lost = f"outputs made from {first} lose the EPSG code; {' and '.join(wrong) or 'reinstall rasterio'}"
        return [f"PROJ does not find its data ({first_line(error)}): {lost}"] if first else []
    return []


def is_placed(transform: Any) -> bool:
    """Return True for a transform other than the identity, which rasterio reports for rasters without one."""
    return transform is not None and tuple(transform)[:6] != tuple(Affine.identity())[:6]


def check_grids_match(one: RasterInfo, other: RasterInfo) -> None:
    """Raise RasterError with both values unless the two rasters lie on the same grid of pixels.

    Sizes must be equal. CRS and transform are compared if both rasters have one (a PNG has none). Transforms may differ
    by a hundredth of a pixel at the raster's corners, for rounding in the file.
    """

    def differ(what: str, ours: object, theirs: object) -> RasterError:
        return RasterError(
            f"{one.path} and {other.path} differ in {what}: {ours} against {theirs}; bring them to one grid"
        )

    both = one, other
    if one.shape != other.shape:
        raise differ("size", *(f"{info.height} x {info.width} px" for info in both))
    if one.crs is not None and other.crs is not None and one.crs != other.crs:
        raise differ("CRS", one.crs, other.crs)
    if one.ground is not None and other.ground is not None and one.ground != other.ground:
        raise differ("ground control", *(f"{len(ground.points)} points" for ground in (one.ground, other.ground)))
    if not all(is_placed(info.transform) for info in both):
        return
    corners = np.array([(col, row, 1) for col in (0, one.width) for row in (0, one.height)], float).T
    ours, theirs = (np.array(tuple(info.transform), float)[:6].reshape(2, 3) for info in both)
    apart = np.linalg.lstsq(ours[:, :2], (theirs - ours) @ corners, rcond=None)[0]  # in pixels of the first
    if np.abs(apart).max() > _TOLERANCE_PIXELS:
        raise differ("transform", *(f"({', '.join(f'{x:.10g}' for x in tuple(i.transform)[:6])})" for i in both))


def whole_turn(crs: CRS) -> float | None:
    """Return a full turn of longitude in units of the CRS; None for a CRS without longitudes."""
    return math.tau / crs.units_factor[1] if crs.is_geographic else None


def placement(info: RasterInfo) -> dict[str, Any]:
    """Return the arguments of `rasterio.open` that georeference a file as `info`."""
    arguments: dict[str, Any] = {"crs": info.crs}
    ground = info.ground or GroundControl()
    if is_placed(info.transform):
        arguments["transform"] = info.transform
    elif 0 < len(ground.points) <= _MOST_POINTS:
        arguments["gcps"] = [GroundControlPoint(row, col, x, y, z) for row, col, x, y, z in ground.points]
        arguments["crs"] = CRS.from_wkt(ground.crs) if ground.crs else CRS()  # rasterio takes no None here
    if ground.coefficients:
        arguments["rpcs"] = RPC.from_gdal(dict(ground.coefficients))
    return arguments


def place_of(crs: CRS | None, transform: Affine | None, ground: GroundControl | None) -> dict[str, Any]:
    """Return a raster's georeferencing, keyed by the words of a message."""
    control = ground or GroundControl()
    numbers = RPC.from_gdal(dict(control.coefficients)).to_dict() if control.coefficients else {}
    return {
        "CRS": crs or None,
        "transform": tuple(transform or Affine.identity())[:6],
        "ground control points": control.points,
        "CRS of its control points": control.crs and CRS.from_wkt(control.crs),
        "rational polynomial coefficients": {  # a TIFF has a default for the estimated errors
            name: value for name, value in numbers.items() if not name.startswith("err_")
        },
    }


def meaning(dataset: Any) -> dict[str, Any]:
    """Return an open file's metadata that a copy must keep, keyed by the words of a message."""
    return {
        **place_of(dataset.crs, dataset.transform, ground_of(str(dataset.name), dataset)),
        "size": (dataset.count, dataset.height, dataset.width),
        "type": dataset.dtypes,
        "nodata value": str(dataset.nodata),  # NaN does not equal NaN
        "colours": dataset.colormap(1) if dataset.colorinterp[0] == ColorInterp.palette else None,
        "names of the classes": {key: name for key, name in dataset.tags(1).items() if key.startswith("CLASS_")},
        "names of the bands": dataset.descriptions,
        "scales": (dataset.scales, dataset.offsets),
    }
