"""A map, and a tile store, lie where the raster does: by its transform, its control points or its polynomials."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
from affine import Affine
from rasterio.control import GroundControlPoint
from rasterio.crs import CRS
from rasterio.rpc import RPC

from tests.raster.test_tile_store import cut, plan
from tests.small_files import UTM, write_raster
from tiledseg.errors import RasterError
from tiledseg.raster.info import GroundControl, RasterInfo
from tiledseg.raster.map_writer import RasterLayout, publish
from tiledseg.raster.reader import open_raster
from tiledseg.system.outputs import unfinished

POINTS = [
    GroundControlPoint(row, col, 5e5 + col / 3, 4e6 - row / 7, 3.25)
    for row, col in ((0, 0), (0, 48), (48, 0), (48, 48), (17.5, 21.25))
]
POLYNOMIALS = RPC(
    height_off=100.0,
    height_scale=500.0,
    lat_off=45.1,
    lat_scale=0.1,
    line_den_coeff=[1.0] + [0.001 * at for at in range(19)],
    line_num_coeff=[0.1 * at for at in range(20)],
    line_off=24.0,
    line_scale=24.0,
    long_off=7.0,
    long_scale=0.1,
    samp_den_coeff=[1.0] + [0.0] * 19,
    samp_num_coeff=[0.3] * 20,
    samp_off=24.0,
    samp_scale=24.0,
)
TURNED = Affine(0.5, 0.1 / 3, 5e5 + 1 / 7, -0.2 / 7, -0.5, 4e6)
UNUSUAL = CRS.from_proj4("+proj=ob_tran +o_proj=longlat +lon_0=40 +o_lon_p=1 +o_lat_p=30 +R=6370000 +no_defs")

NOWHERE = {"crs": None, "transform": None}
PLACES: dict[str, dict[str, Any]] = {
    "turned": {"transform": TURNED, "crs": UTM},
    "points": {"gcps": POINTS, "crs": UTM},
    "points without CRS": {"gcps": POINTS, "crs": CRS()},
    "points and polynomials": {"gcps": POINTS, "crs": UTM, "rpcs": POLYNOMIALS},
    "transform and polynomials": {"transform": TURNED, "crs": UTM, "rpcs": POLYNOMIALS},
    "transform without CRS": {"transform": TURNED},
    "CRS of no TIFF": {"transform": TURNED, "crs": UNUSUAL},
    "nothing": {},
}


def write(path: Path, **place: Any) -> str:
    return write_raster(path, np.arange(48 * 48, dtype=np.uint8).reshape(1, 48, 48), **NOWHERE | place)


def place_of(path: str | Path) -> Any:
    """Everything that GDAL says of where a file lies, but the points' names."""
    with rasterio.open(path) as file:
        points, crs = file.gcps
        return (
            file.transform,
            file.crs,
            [(p.row, p.col, p.x, p.y, p.z) for p in points],
            crs,
            {key: text for key, text in file.tags(ns="RPC").items() if not key.startswith("ERR")},
        )


def mapped(source: str, target: Path) -> RasterLayout:
    """An empty map of `source`, finished."""
    with open_raster(source) as reader, unfinished(target) as output:
        layout = RasterLayout(output, reader.info, 1, "uint8", 255.0)
        publish(layout)
    return layout


@pytest.mark.parametrize("name", PLACES)
def test_a_map_lies_where_its_raster_does(tmp_path: Path, name: str) -> None:
    source = write(tmp_path / "source.tif", **PLACES[name])
    assert (place_of(source) == place_of(write(tmp_path / "plain.tif"))) == (name == "nothing")
    layout = mapped(source, tmp_path / "map.tif")
    assert place_of(tmp_path / "map.tif") == place_of(source)
    assert layout.notes == []


@pytest.mark.parametrize("name", ["turned", "points without CRS", "points and polynomials", "CRS of no TIFF"])
def test_a_tile_store_keeps_it_for_its_map(tmp_path: Path, name: str) -> None:
    source = write(tmp_path / "source.tif", **PLACES[name])
    store = cut(tmp_path / "tiles.h5", plan([source], None, grid=(2, 2)))
    mapped(f"{store}#0", tmp_path / "map.tif")
    assert place_of(tmp_path / "map.tif") == place_of(source)


def test_points_that_a_map_cannot_hold_are_said_before_a_pixel_is_mapped(tmp_path: Path) -> None:
    """rasterio 1.4 writes the ids of more points from freed memory, which Python 3.12 uses anew."""
    ground = GroundControl(((0.5, 1.5, 5e5, 4e6, 0.0),) * 10_923, CRS.from_string(UTM).to_wkt())
    with unfinished(tmp_path / "map.tif") as output:
        layout = RasterLayout(output, RasterInfo("a.tif", 48, 48, 1, "uint8", ground=ground), 1, "uint8")
    assert layout.notes[0] == "the map does not keep the ground control points of a.tif"


def test_a_map_over_one_with_a_sidecar_has_its_own_place(tmp_path: Path) -> None:
    mapped(write(tmp_path / "odd.tif", **PLACES["CRS of no TIFF"]), tmp_path / "map.tif")
    assert (tmp_path / "map.tif.aux.xml").exists()
    source = write(tmp_path / "turned.tif", **PLACES["turned"])
    mapped(source, tmp_path / "map.tif")
    assert place_of(tmp_path / "map.tif") == place_of(source)


def test_what_a_map_cannot_keep_is_said_and_points_at_no_place_are_refused(tmp_path: Path) -> None:
    """A TIFF has a transform or control points, not both; a PAM file beside a PNG gives it both."""
    source = tmp_path / "both.png"
    with rasterio.open(source, "w", driver="PNG", count=1, height=48, width=48, dtype="uint8") as file:
        file.write(np.ones((1, 48, 48), np.uint8))
    pam = (
        f"<PAMDataset><SRS>{UTM}</SRS><GeoTransform>500000,0.5,0,4000000,0,-0.5</GeoTransform>"
        f'<GCPList Projection="{UTM}"><GCP Id="1" Info="" Pixel="1" Line="2" X="3" Y="4"/></GCPList></PAMDataset>'
    )
    Path(f"{source}.aux.xml").write_text(pam)
    assert mapped(str(source), tmp_path / "map.tif").notes == [
        f"the map does not keep the ground control points of {source}",
        f"the map does not keep the CRS of its control points of {source}",
    ]
    Path(f"{source}.aux.xml").write_text(pam.replace('X="3"', 'X="nan"'))
    with pytest.raises(RasterError, match=r"both.png has the control point 1 at \(2.0, 1.0, nan, .*not finite"):
        open_raster(str(source))
