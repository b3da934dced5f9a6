"""What places a raster on the ground beside a transform: control points and rational polynomials, as read of files."""

from __future__ import annotations

import math
from typing import Any

from tiledseg.errors import RasterError
from tiledseg.records import dataclass

Point = tuple[float, float, float, float, float]


@dataclass(frozen=True)
class GroundControl:
    """`points` are (row, col, x, y, z) in the CRS `crs` (WKT); `coefficients` are the RPCs' names and texts in GDAL."""

    points: tuple[Point, ...] = ()
    crs: str | None = None
    coefficients: tuple[tuple[str, str], ...] = ()


def ground_of(path: str, dataset: Any) -> GroundControl | None:
    """The ground control of an open raster; None where it has none. Raises RasterError for points at no place."""
    points, crs = dataset.gcps
    rpcs = dataset.rpcs
    if not points and rpcs is None:
        return None
    found = tuple((float(p.row), float(p.col), float(p.x), float(p.y), float(p.z or 0)) for p in points)
    for at, point in enumerate(found):
        if not all(map(math.isfinite, point)):
            raise RasterError(f"{path} has the control point {at + 1} at {point}, which is no place; remove or mend it")
    coefficients = tuple(sorted(rpcs.to_gdal().items())) if rpcs is not None else ()
    return GroundControl(found, crs.to_wkt() if crs else None, coefficients)


def as_json(ground: GroundControl | None) -> Any:
    return None if ground is None else [ground.points, ground.crs, ground.coefficients]


def from_json(value: Any) -> GroundControl | None:
    if value is None:
        return None
    points, crs, coefficients = value
    return GroundControl(tuple(map(tuple, points)), crs, tuple(map(tuple, coefficients)))
