"""Raw values and colours become classes; classes are counted and weighed by their frequency."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
from affine import Affine
from hypothesis import given, settings
from hypothesis import strategies as st
from rasterio.crs import CRS

from tiledseg.errors import ConfigError, LabelError, RasterError
from tiledseg.geometry.box import Box
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.labels.classes import records_of_map
from tiledseg.raster.labels.label_map import (
    LabelMap,
    check_grids_match,
    count_classes,
    median_frequency_weights,
    read_labels,
)
from tiledseg.raster.reader import open_raster

DTYPES = [np.uint8, np.int8, np.uint16, np.int16, np.int32, np.uint32]


PLACE = Affine(0.5, 0, 350000, 0, -0.5, 3770000)


def records(*values: list[object], ignored: list[object] | None = None) -> list[dict[str, object]]:
    """Classes with these values, by the names a, b, ..."""
    found = [{"name": "abcdef"[at], "values": own} for at, own in enumerate(values)]
    return found if ignored is None else [*found, {"name": "void", "ignored": True, "values": ignored}]


def Info(  # noqa: N802
    path: str = "a.tif", height: int = 100, width: int = 200, bands: int = 1, crs: Any = None, transform: Any = PLACE
) -> RasterInfo:
    return RasterInfo(path, height, width, bands, "uint8", crs, transform)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_every_pixel_gets_the_class_of_its_value(data: st.DataObject, dtype: type) -> None:
    limits = np.iinfo(dtype)
    keys = data.draw(st.lists(st.integers(int(limits.min), int(limits.max)), min_size=2, max_size=12, unique=True))
    numbers = [min(i, data.draw(st.integers(1, 6))) for i in range(len(keys))]
    numbers = [0, 1, *numbers[2:]]
    used = sorted(set(numbers))
    mapping = {key: used.index(number) for key, number in zip(keys, numbers, strict=True)}
    label_map = LabelMap.from_config(records_of_map(mapping))
    raw = np.array(data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=30)), dtype)
    expected = np.array([[mapping[int(value)] for value in raw]], np.uint8)
    result = label_map.apply(raw[None, None, :])
    assert result.dtype == np.uint8
    np.testing.assert_array_equal(result, expected)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(label_map)).apply(raw[None, None, :]), expected)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(dtype=st.sampled_from(DTYPES), value=st.integers(-(2**31), 2**32 - 1), where=st.integers(0, 34))
def test_a_value_outside_the_classes_is_named_with_its_place(dtype: type, value: int, where: int) -> None:
    limits = np.iinfo(dtype)
    value = int(np.clip(value, limits.min, limits.max))
    label_map = LabelMap.from_config(5)
    raw_CHW = (np.arange(35) % 5).astype(dtype).reshape(1, 5, 7)
    raw_CHW.flat[where] = value
    if 0 <= value < 5 or value == 255:
        expected = raw_CHW[0].astype(np.uint8)
        np.testing.assert_array_equal(label_map.apply(raw_CHW), expected)
        return
    with pytest.raises(LabelError) as caught:
        label_map.apply(raw_CHW, origin=(1000, 2000), path="town.tif")
    text = str(caught.value)
    assert f"town.tif holds value {value} at (row {1000 + where // 7}, col {2000 + where % 7})" in text
    assert "\n" not in text
    hidden = np.ones((5, 7), bool)
    hidden.flat[where] = False
    assert label_map.apply(raw_CHW, hidden).flat[where] == 255


def test_colours_in_every_spelling() -> None:
    for red in ("#ff0000", "#FF0000", "255,0,0", "[255, 0, 0]", (255, 0, 0)):
        label_map = LabelMap.from_config(records(["#000000"], [red], ignored=["0,0,255"]), ignore_index=9)
        raw_CHW = np.array([[[0, 255, 0]], [[0, 0, 0]], [[0, 0, 255]], [[7, 7, 7]]], np.uint8)
        assert label_map.count == 2
        assert label_map.apply(raw_CHW).tolist() == [[0, 1, 9]]
    raw_CHW[1, 0, 1] = 1
    with pytest.raises(LabelError, match="colour #ff0100 at"):
        label_map.apply(raw_CHW[:3])


def write(path: Path, pixels_CHW: np.ndarray, palette: dict | None = None, nodata: float | None = None) -> str:
    bands, height, width = pixels_CHW.shape
    driver = "PNG" if path.suffix == ".png" else "GTiff"
    shape = {"height": height, "width": width, "count": bands, "dtype": pixels_CHW.dtype}
    with rasterio.open(path, "w", driver=driver, nodata=nodata, **shape) as dataset:
        dataset.write(pixels_CHW)
        if palette:
            dataset.write_colormap(1, palette)
    return str(path)


def test_palette_png(tmp_path: Path) -> None:
    indices = np.arange(12, dtype=np.uint8).reshape(1, 3, 4) % 3
    palette = {0: (0, 0, 0, 255), 1: (255, 0, 0, 255), 2: (0, 255, 0, 255)}
    by_colour = LabelMap.from_config(records(["#00ff00"], ["#000000", "#ff0000"]))
    by_value = LabelMap.from_config(records([2], [0, 1]))
    with open_raster(write(tmp_path / "labels.png", indices, palette)) as reader:
        for label_map in (by_colour, by_value, by_colour.resolve(reader.info)):
            classes_HW = read_labels(reader, label_map, Box.of_shape((3, 4)))
            np.testing.assert_array_equal(classes_HW, np.array([1, 1, 0], np.uint8)[indices[0]])
        two_colours = LabelMap.from_config(records(["#00ff00"], ["#000000"]))
        with pytest.raises(LabelError, match="value 1 at"):
            read_labels(reader, two_colours, Box.of_shape((3, 4)))


@pytest.mark.parametrize("bands", [3, 4])
def test_colour_png_with_and_without_alpha(tmp_path: Path, bands: int) -> None:
    pixels_CHW = np.zeros((bands, 3, 4), np.uint8)
    pixels_CHW[0, :, 2:] = 255
    pixels_CHW[3:] = 255
    pixels_CHW[3:, 0, 0] = 0
    label_map = LabelMap.from_config(records(["#000000"], ["#ff0000"]))
    with open_raster(write(tmp_path / "labels.png", pixels_CHW)) as reader:
        classes_HW = read_labels(reader, label_map, Box.of_shape((3, 4)))
    expected = np.array([[0, 0, 1, 1]] * 3)
    expected[0, 0] = 255 if bands == 4 else 0
    np.testing.assert_array_equal(classes_HW, expected)


def test_the_ignored_value_in_the_raster_and_numbers_as_text() -> None:
    raw_CHW = np.array([[[0, 255, 7]]], np.int16)
    assert LabelMap.from_config(records([0], [7])).apply(raw_CHW).tolist() == [[0, 255, 1]]
    assert LabelMap.from_config(records([0], [7, 255])).apply(raw_CHW).tolist() == [[0, 1, 1]]
    assert LabelMap.from_config(records(["-3"], ["0"])).apply(np.array([[[0, -3]]], np.int32)).tolist() == [[1, 0]]


@pytest.mark.parametrize(
    ("classes", "ignore_index", "match"),
    [
        (0, 255, "0 classes"),
        (256, 255, "256 classes"),
        (True, 255, "True"),
        ("five", 255, "five"),
        (5, 3, "ignore_index 3 with classes 0 to 4"),
        (5, 256, "ignore_index 256"),
        (records(["300,0,0"], ["1,1,1"]), 255, "300,0,0"),
        (records(["#000000"], ["0,0,0"]), 255, "keep one"),
        (records([True], [0]), 255, "True"),
    ],
)
def test_bad_classes(classes: object, ignore_index: int, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        LabelMap.from_config(classes, ignore_index)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_bands_must_fit_the_keys() -> None:
    colours = LabelMap.from_config(records(["#000000"], ["#ffffff"]))
    with pytest.raises(LabelError, match="has bands: 3, but classes are raw values"):
        LabelMap.from_config(3).resolve(Info(bands=3))
    with pytest.raises(LabelError, match="has bands: 2, but classes are colours"):
        colours.resolve(Info(bands=2))
    with pytest.raises(LabelError, match="has bands: 1, but classes are colours"):
        colours.resolve(Info(bands=1))
    with pytest.raises(LabelError, match="float32"):
        LabelMap.from_config(3).apply(np.zeros((1, 2, 2), np.float32))


class TestGrids:
    utm = CRS.from_epsg(32611)

    def test_equal_grids_pass_whatever_the_rounding(self) -> None:
        image = Info(crs=self.utm)
        nudged = Affine(0.5 * (1 + 1e-9), 1e-12, 350000 + 1e-6, 0, -0.5, 3770000 - 1e-6)
        check_grids_match(image, Info(crs=self.utm, transform=nudged))

    @pytest.mark.parametrize(
        "plain", [Info(transform=Affine.identity()), Info(crs=None), Info(crs=CRS.from_epsg(32611))]
    )
    def test_missing_georeferencing_compares_what_both_have(self, plain: RasterInfo) -> None:
        check_grids_match(Info(crs=self.utm), plain)
        check_grids_match(plain, Info(crs=self.utm))

    @pytest.mark.parametrize(
        ("labels", "shown"),
        [
            (Info("b.tif", height=99, crs=CRS.from_epsg(32611)), ["100 x 200 px", "99 x 200 px"]),
            (Info("b.tif", crs=CRS.from_epsg(32612)), ["EPSG:32611", "EPSG:32612"]),
            (
                Info("b.tif", crs=CRS.from_epsg(32611), transform=Affine(0.5, 0, 350000.5, 0, -0.5, 3770000)),
                ["350000,", "350000.5,"],
            ),
            (
                Info("b.tif", crs=CRS.from_epsg(32611), transform=Affine(0.501, 0, 350000, 0, -0.5, 3770000)),
                ["(0.5,", "(0.501,"],
            ),
        ],
    )
    def test_differences_show_both(self, labels: RasterInfo, shown: list[str]) -> None:
        with pytest.raises(RasterError) as caught:
            check_grids_match(Info(crs=self.utm), labels)
        text = str(caught.value)
        assert all(part in text for part in [*shown, "a.tif", "b.tif"]), text
        assert "\n" not in text


def test_a_count_by_hand() -> None:
    """Three images of 10, 20 and 10 valid pixels. Class 0 is in all: 20 of 40; class 1 in two: 15 of 30; class 2 in
    one: 5 of 10... so the frequencies are 1/2, 1/2 and 1/4, and their median is 1/2."""
    counts = np.array([[5, 5, 0], [10, 10, 0], [5, 0, 5]])
    assert median_frequency_weights(counts) == (1.0, 1.0, 1.0)
    counts = np.array([[8, 2, 0], [0, 15, 5]])  # 8 of 10, 17 of 30, 5 of 20: the median is 17/30
    assert median_frequency_weights(counts) == pytest.approx((17 / 30 / 0.8, 1.0, 17 / 30 / 0.25))


def test_an_even_number_of_classes_and_one_that_no_image_has() -> None:
    counts = np.array([[90, 0, 10]])  # frequencies 0.9 and 0.1: their median is 0.5
    assert median_frequency_weights(counts) == pytest.approx((0.5 / 0.9, 1.0, 5.0))
    assert median_frequency_weights(np.zeros((2, 3), np.int64)) == (1.0, 1.0, 1.0)


def test_pixels_that_are_not_valid_and_numbers_of_no_class_do_not_count() -> None:
    classes_HW = np.array([[0, 1, 1], [2, 255, 7]], np.uint8)
    valid_HW = np.array([[True, True, False], [True, True, True]])
    assert count_classes(classes_HW, valid_HW, 3).tolist() == [1, 1, 1]
