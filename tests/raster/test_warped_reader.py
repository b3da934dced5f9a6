"""Labels and images of other grids: what rasterio's warp without approximation gives, by tiles as whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import rasterio
from affine import Affine
from rasterio.warp import Resampling, reproject, transform
from scipy.ndimage import map_coordinates

from tests.small_files import UTM, write_raster
from tiledseg.errors import ConfigError, RasterError
from tiledseg.geometry.box import Box
from tiledseg.raster.labels.label_map import LabelMap, read_labels
from tiledseg.raster.labels.pair_reading import LabelReading, PairReading
from tiledseg.raster.reading.reader import open_raster

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


@pytest.mark.parametrize("grid", ["metres", "a turn away"])
def test_degrees_are_the_same_a_turn_away(tmp_path: Path, grid: str) -> None:
    """Labels on both sides of 180 degrees; an image at 190 degrees of labels at -170."""
    image = (
        ("EPSG:32601", Affine(30, 0, 283500, 0, -30, 5545000))
        if grid == "metres"
        else (
            "EPSG:4326",
            Affine(0.001, 0, 189.95, 0, -0.001, 50.0),
        )
    )
    west = 179.9 if grid == "metres" else -170.1
    place, shape = Affine(0.001, 0, west, 0, -0.001, 50.1), (200, 400)
    raw_HW = np.random.default_rng(1).integers(0, 4, shape).astype(np.uint8)
    write_raster(tmp_path / "labels.tif", raw_HW[None], crs="EPSG:4326", transform=place)
    write_raster(tmp_path / "image.tif", np.ones((1, *SHAPE), np.uint8), crs=image[0], transform=image[1])
    with open_raster(str(tmp_path / "image.tif")) as opened:
        info = opened.info
    wanted_HW = np.full(SHAPE, 255, np.uint8)
    grids = {"src_crs": "EPSG:4326", "dst_crs": image[0], "src_transform": place, "dst_transform": image[1]}
    reproject(raw_HW, wanted_HW, **grids, resampling=Resampling.nearest, init_dest_nodata=False, tolerance=0)
    with LabelReading(LabelMap.from_config(4), warp=True).open(str(tmp_path / "labels.tif"), info) as labels:
        found_HW = read_labels(labels, LabelMap.from_config(4), Box.of_shape(SHAPE))
    assert (wanted_HW != 255).all()
    assert np.count_nonzero(found_HW != wanted_HW) <= 15, "but for centres within 0.003 pixels of an edge"


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


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_an_image_is_blended_of_four_pixels(tmp_path: Path, grid: str, dtype: str) -> None:
    """As scipy interpolates at the centres, and where pixels are not shrunk, as GDAL's warp does; a pixel without data
    leaves out those that it has a share in; by tiles as whole."""
    crs, place, shape = GRIDS[grid]
    raw_CHW = (np.random.default_rng(1).random((2, *shape)) * 250 + 1).astype(dtype)
    raw_CHW[:, 20:24, 30:33] = 0
    write_raster(tmp_path / "image.tif", raw_CHW, crs=crs, transform=place, nodata=0)
    write_raster(tmp_path / "labels.tif", np.ones((1, *SHAPE), np.uint8), transform=PLACE)
    reading = PairReading(None, None, False, LabelReading(LabelMap.from_config(4)), warps_images=True)
    with reading.open_pair(str(tmp_path / "image.tif"), str(tmp_path / "labels.tif")) as (image, labels):
        assert image.info.shape == labels.info.shape == SHAPE
        assert (image.info.crs, image.info.transform) == (labels.info.crs, labels.info.transform)
        pixels_CHW, valid_HW = image.read(Box.of_shape(SHAPE))
        for box in Box.of_shape(SHAPE).blocks(37, 41):
            part_CHW, part_HW = image.read(box)
            np.testing.assert_array_equal(part_CHW, pixels_CHW[:, *box.slices])
            np.testing.assert_array_equal(part_HW, valid_HW[box.slices])
        with reading.open_as(str(tmp_path / "image.tif"), image.info) as again:
            np.testing.assert_array_equal(again.read(Box.of_shape(SHAPE))[0], pixels_CHW)
    rows, cols = np.mgrid[: SHAPE[0], : SHAPE[1]].reshape(2, -1) + 0.5
    points = np.array(transform(UTM, crs, *(PLACE @ (cols, rows))))
    cols, rows = (part - 0.5 for part in (~place) @ points)
    known_CHW = np.where(raw_CHW == 0, np.nan, raw_CHW.astype(np.float64))
    wanted_CHW = np.array([map_coordinates(band_HW, (rows, cols), order=1, mode="nearest") for band_HW in known_CHW])
    outside = (rows < -0.5) | (rows >= shape[0] - 0.5) | (cols < -0.5) | (cols >= shape[1] - 0.5)
    wanted_CHW = np.where(outside, np.nan, wanted_CHW).reshape(2, *SHAPE)
    both_HW = valid_HW & np.isfinite(wanted_CHW[0])
    between_HW = np.min(np.abs([rows - np.rint(rows), cols - np.rint(cols)]), axis=0).reshape(SHAPE) > 1e-5
    assert between_HW.mean() > 0.5
    np.testing.assert_array_equal(valid_HW[between_HW], np.isfinite(wanted_CHW[0])[between_HW])
    assert 0.3 < valid_HW.mean() < 1
    rounding = 0.5 if dtype == "uint8" else 0.0
    np.testing.assert_allclose(pixels_CHW[:, both_HW], wanted_CHW[:, both_HW], atol=rounding + 1e-3)
    assert (pixels_CHW[:, ~valid_HW] == 0).all()
    if grid != "turned":
        warped_CHW = np.zeros((2, *SHAPE))
        grids = {"src_crs": crs, "dst_crs": UTM, "src_transform": place, "dst_transform": PLACE, "tolerance": 0}
        reproject(raw_CHW.astype(np.float64), warped_CHW, **grids, resampling=Resampling.bilinear)
        np.testing.assert_allclose(pixels_CHW[:, both_HW], warped_CHW[:, both_HW], atol=rounding + 0.02)


def test_images_that_cannot_be_warped(tmp_path: Path) -> None:
    write_raster(tmp_path / "plain.tif", np.ones((1, 9, 9), np.uint8), crs=None, transform=Affine.identity())
    write_raster(tmp_path / "labels.tif", np.ones((1, *SHAPE), np.uint8), transform=PLACE)
    reading = PairReading(None, None, False, LabelReading(LabelMap.from_config(4)), warps_images=True)
    for labels, error, words in (
        ("labels.tif", RasterError, r"plain.tif has no CRS, so data.warp_images has nothing to go by"),
        ("labels.gpkg", ConfigError, r"labels.gpkg are polygons, which have no grid"),
    ):
        with (
            pytest.raises(error, match=words),
            reading.open_pair(str(tmp_path / "plain.tif"), str(tmp_path / labels)),
        ):
            pass
