"""How long a raster's pixels are on the ground, where its CRS measures lengths."""

from __future__ import annotations

import math

from tiledseg.errors import ConfigError
from tiledseg.raster.georeferencing import is_placed
from tiledseg.raster.info import RasterInfo
from tiledseg.units.quantities import Length


def along(length: Length, info: RasterInfo, key: str) -> tuple[float, float]:
    """`length` in pixels of the raster, across its rows and across its columns: of a rotated or sheared one, at right
    angles to them. Raises ConfigError, naming `key`, for metres of a raster that has none."""
    if not length.metres:
        return length.number, length.number
    if not is_placed(info.transform) or not info.crs or not info.crs.is_projected:
        raise ConfigError(
            f"{key} is {length}, but {info.path} has no metres (it is in degrees, or not placed); give it in pixels, "
            "as 512 px, or reproject the images"
        )
    metres = length.number / info.crs.linear_units_factor[1]
    a, b, _, d, e, _ = tuple(info.transform)[:6]
    area = abs(a * e - b * d)
    return metres * math.hypot(a, d) / area, metres * math.hypot(b, e) / area
