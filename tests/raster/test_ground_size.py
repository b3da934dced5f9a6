"""A length in pixels of rasters that lie askew, or are measured in feet, against points moved by so many metres."""

from __future__ import annotations

import numpy as np
import pytest
from affine import Affine
from rasterio.crs import CRS

from tiledseg.errors import ConfigError
from tiledseg.raster.info import RasterInfo, along
from tiledseg.units import Length, blocks_of, parse_length

PLACES = {
    "north above": Affine(0.5, 0, 7e5, 0, -0.5, 5e6),
    "oblong": Affine(0.5, 0, 7e5, 0, -2.0, 5e6),
    "rotated": Affine.translation(7e5, 5e6) @ Affine.rotation(31) @ Affine.scale(0.25, -0.75),
    "sheared": Affine.translation(7e5, 5e6) @ Affine.shear(20, 0) @ Affine.scale(1.5, -0.5),
}
FEET = 2263  # NAD83 / New York Long Island, in US survey feet


def info(place: Affine, code: int = 32633) -> RasterInfo:
    return RasterInfo("a.tif", 50, 60, 1, "uint8", crs=CRS.from_epsg(code), transform=place)


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize(("code", "metre"), [(32633, 1.0), (FEET, 3937 / 1200)])
def test_lines_so_far_apart_are_so_many_pixels_apart(name: str, code: int, metre: float) -> None:
    """From a row to a parallel one at a distance of 30 m: found by projecting on the row's normal."""
    place = PLACES[name]
    found = along(Length(30.0, metres=True), info(place, code), "key")
    right, down = (np.subtract(place @ point, place @ (0, 0)) for point in ((1, 0), (0, 1)))
    for pixels, step, line in ((found[0], down, right), (found[1], right, down)):
        normal = np.array([-line[1], line[0]]) / np.linalg.norm(line)
        assert pixels * abs(step @ normal) == pytest.approx(30 * metre, rel=1e-9)
    assert along(Length(7), info(place, code), "key") == (7, 7)


def test_lengths() -> None:
    assert [parse_length(text) for text in ("30 m", "2.5m", "7 px")] == [Length(30, True), Length(2.5, True), Length(7)]
    assert [parse_length(text) for text in ("30", "-3 m", "2.5 px", "3 km", "1e3 m", "nan m", "")] == [None] * 7
    assert [blocks_of(size, 10.0) for size in (1, 9, 14, 15, 24, 100)] == [1, 1, 1, 2, 2, 10]
    assert str(Length(2.5, True)) == "2.5 m"


@pytest.mark.parametrize("raster", [info(Affine.identity()), info(PLACES["oblong"], 4326)])
def test_without_metres(raster: RasterInfo) -> None:
    with pytest.raises(ConfigError, match=r"key is 30 m, but a.tif has no metres .*; give it in pixels, as 512 px"):
        along(Length(30, True), raster, "key")
    assert along(Length(30), raster, "key") == (30, 30)
