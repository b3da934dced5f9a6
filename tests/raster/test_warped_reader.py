"""Labels of other grids: what rasterio's warp without approximation gives, by tiles as whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import rasterio
from affine import Affine
from rasterio.warp import Resampling, reproject

from tests.small_files import UTM, write_raster
from tiledseg.errors import RasterError
from tiledseg.geometry.box import Box
from tiledseg.raster.label_sources import LabelReading
from tiledseg.raster.labels import LabelMap, read_labels
from tiledseg.raster.reader import open_raster

SHAPE = 90, 110
PLACE = Affine(0.5, 0, 500000.1, 0, -0.5, 3760000.2)
GRIDS = {
    "coarser": (UTM, Affine(0.7, 0, 499990.3, 0, -0.7, 3760003.1), (80, 120)),
    "turned": (UTM, Affine(0.4, 0.1, 499995, 0.1, -0.4, 3760001), (120, 130)),
    "degrees": ("EPSG:4326", Affine(7e-6, 0, -117.00002, 0, -6e-6, 33.980537), (70, 80)),
}


@pytest.mark.parametrize("grid", GRIDS)
def test_each_pixel_is_the_one_that_holds_its_centre(tmp_path: Path, grid: str) -> None:
    crs, place, shape = GRIDS[grid]
    raw_HW = np.random.default_rng(1).integers(0, 4, shape).astype(np.uint8)
    write_raster(tmp_path / "labels.tif", raw_HW[None], crs=crs, transform=place)
    write_raster(tmp_path / "image.tif", np.ones((1, *SHAPE), np.uint8), transform=PLACE)
    label_map = LabelMap.from_config(4)
    with open_raster(str(tmp_path / "image.tif")) as image:
        info = image.info
    with pytest.raises(RasterError, match=r"differ in .*data\.warp true"):
        LabelReading(label_map).open(str(tmp_path / "labels.tif"), info)
    wanted_HW = np.full(SHAPE, 255, np.uint8)
    grids = {"src_crs": crs, "dst_crs": UTM, "src_transform": place, "dst_transform": PLACE}
    reproject(raw_HW, wanted_HW, **grids, resampling=Resampling.nearest, init_dest_nodata=False, tolerance=0)
    with LabelReading(label_map, warp=True).open(str(tmp_path / "labels.tif"), info) as labels:
        whole_HW = read_labels(labels, label_map, Box.of_shape(SHAPE))
        found_HW = np.empty(SHAPE, np.uint8)
        for box in Box.of_shape(SHAPE).blocks(37, 41):
            found_HW[box.slices] = read_labels(labels, label_map, box)
    np.testing.assert_array_equal(found_HW, whole_HW)
    assert np.count_nonzero(whole_HW != wanted_HW) <= 2, "but for a centre on an edge, to the last digit"
    assert len(np.unique(whole_HW)) >= 4
    plain = replace(info, crs=None)
    with pytest.raises(RasterError, match=r"image\.tif has no CRS"):
        LabelReading(label_map, warp=True).open(str(tmp_path / "labels.tif"), plain)


def test_labels_on_the_grid_are_read_as_they_are(tmp_path: Path) -> None:
    raw_HW = np.random.default_rng(2).integers(0, 3, SHAPE).astype(np.uint8)
    write_raster(tmp_path / "labels.tif", raw_HW[None], transform=PLACE)
    with rasterio.open(tmp_path / "labels.tif") as dataset:
        assert dataset.crs.to_string() == UTM
    with open_raster(str(tmp_path / "labels.tif")) as image:
        info = image.info
    label_map = LabelMap.from_config(3)
    with LabelReading(label_map, warp=True).open(str(tmp_path / "labels.tif"), info) as labels:
        assert "Warped" not in type(labels).__name__
        np.testing.assert_array_equal(read_labels(labels, label_map, Box.of_shape(SHAPE)), raw_HW)
