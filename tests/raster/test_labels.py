"""Classes in every form in which they can be written; raw values and colours become classes, counted and weighed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
from affine import Affine
from hypothesis import given, settings
from hypothesis import strategies as st
from rasterio.crs import CRS

from tests.answers import refusal
from tests.small_files import write_raster
from tiledseg.errors import ConfigError, LabelError
from tiledseg.geometry.box import Box
from tiledseg.raster.info import RasterInfo, check_grids_match
from tiledseg.raster.labels.classes import ClassRecord, default_classes, read_classes, records_of_map
from tiledseg.raster.labels.label_map import LabelMap, count_classes, median_frequency_weights, read_labels
from tiledseg.raster.reader import open_raster

DTYPES = [np.uint8, np.int8, np.uint16, np.int16, np.int32, np.uint32]


PLACE = Affine(0.5, 0, 350000, 0, -0.5, 3770000)


def records(*values: list[object], ignored: list[object] | None = None) -> list[dict[str, object]]:
    """Classes with these values, by the names a, b, ..."""
    found = [{"name": "abcdef"[at], "values": own} for at, own in enumerate(values)]
    return found if ignored is None else [*found, {"name": "void", "ignored": True, "values": ignored}]


def Info(  # noqa: N802
    path: str = "a.tif", height: int = 100, bands: int = 1, crs: Any = None, transform: Any = PLACE, palette: Any = None
) -> RasterInfo:
    return RasterInfo(path, height, 200, bands, "uint8", crs, transform, palette=palette)


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


def test_a_polygons_number_is_a_value_and_its_text_a_name_first() -> None:
    label_map = LabelMap.from_config([{"name": "7", "values": [3]}, {"name": "b", "values": [7]}])
    values = 7, 7.0, "7", "3", 3, 7.5, "b", "c"
    assert [label_map.class_of(value) for value in values] == [1, 1, 0, 0, 0, None, 1, None]


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
    place = f"(row {1000 + where // 7}, col {2000 + where % 7})"
    with refusal(LabelError, f"town.tif holds value {value} at {place}"):
        label_map.apply(raw_CHW, origin=(1000, 2000), path="town.tif")
    hidden = np.ones((5, 7), bool)
    hidden.flat[where] = False
    assert label_map.apply(raw_CHW, hidden).flat[where] == 255


def test_palette_png(tmp_path: Path) -> None:
    """And transparent pixels of colours, which do not count."""
    indices = np.arange(12, dtype=np.uint8).reshape(1, 3, 4) % 3
    palette = {0: (0, 0, 0, 255), 1: (255, 0, 0, 255), 2: (0, 255, 0, 255)}
    path = write_raster(tmp_path / "labels.png", indices, driver="PNG")
    with rasterio.open(path, "r+") as dataset:
        dataset.write_colormap(1, palette)
    by_colour = LabelMap.from_config(records(["#00ff00"], ["#000000", "#ff0000"]))
    by_value = LabelMap.from_config(records([2], [0, 1]))
    with open_raster(path) as reader:
        for label_map in (by_colour, by_value, by_colour.resolve(reader.info)):
            classes_HW = read_labels(reader, label_map, Box.of_shape((3, 4)))
            np.testing.assert_array_equal(classes_HW, np.array([1, 1, 0], np.uint8)[indices[0]])
        two_colours = LabelMap.from_config(records(["#00ff00"], ["#000000"]))
        with pytest.raises(LabelError, match="value 1 at"):
            read_labels(reader, two_colours, Box.of_shape((3, 4)))
    rgba_CHW = np.zeros((4, 1, 2), np.uint8)
    rgba_CHW[3, 0, 1] = 255
    with open_raster(write_raster(tmp_path / "rgba.png", rgba_CHW, driver="PNG")) as reader:
        assert read_labels(reader, two_colours, Box.of_shape((1, 2))).tolist() == [[255, 1]]


ROADS = [
    {"name": "road", "colour": "#804080", "values": [7, 8]},
    {"name": "tree", "color": [0, 128, 0], "value": 21},
    {"name": "void", "ignored": True, "values": [0, -1]},
]
COLOURED = [{"name": "a", "colour": "#ff0000"}, {"name": "b", "colour": "#00ff00"}]
REDS = [records(["#000000"], [red], ignored=["0,0,255"]) for red in ("#FF0000", "255,0,0", "[255, 0, 0]", (255, 0, 0))]
RED_PIXELS = [[0, 255, 0], [0, 0, 0], [0, 0, 255]]
CAMVID = "name,r,g,b,class\nSky,128,128,128,Sky\nWall,64,192,0,Building\nBuilding,128,0,0,Building\nVoid,0,0,0,\n"
IDS = "name,id,class,colour\nunlabeled,0,ignored,#000000\nroad,7,road,#804080\ncar,26,car,#00008e\nplate,-1,,\n"


@pytest.mark.parametrize(
    ("classes", "raw", "expected"),
    [
        *((red, RED_PIXELS, [0, 1, 255]) for red in REDS),
        (records([0], [7]), [[0, 255, 7]], [0, 255, 1]),
        (records([0], [7, 255]), [[0, 255, 7]], [0, 1, 1]),
        (records(["-3"], ["0"]), [[0, -3]], [1, 0]),
        (ROADS, [[7, 8, 21, 0, -1, 255]], [0, 0, 1, 255, 255, 255]),
        (COLOURED, [[1, 0, 255]], [1, 0, 255]),
        (COLOURED, [[0, 255], [255, 0], [0, 0]], [1, 0]),
        (CAMVID, [[128, 64, 128, 0], [128, 192, 0, 0], [128, 0, 0, 0]], [0, 1, 1, 255]),
        (IDS, [[7, 26, 0, -1]], [0, 1, 255, 255]),
    ],
)
def test_pixels_of_records(tmp_path: Path, classes: Any, raw: list[list[int]], expected: list[int]) -> None:
    """Of one band and of three; text is that of a CSV file. Records without values have number and colour."""
    if isinstance(classes, str):
        (tmp_path / "classes.csv").write_text(classes)
        classes = read_classes(str(tmp_path / "classes.csv"))
    raw_CHW = np.array(raw)[:, None].astype(np.uint8 if len(raw) == 3 else np.int16)
    label_map = LabelMap.from_config(classes).resolve(Info(bands=len(raw)))
    assert label_map.count == 2
    assert label_map.apply(raw_CHW).tolist() == [expected]


def test_bands_must_fit_the_keys() -> None:
    colours = LabelMap.from_config(records(["#000000"], ["#ffffff"]))
    with pytest.raises(LabelError, match="has bands: 3, but classes are raw values"):
        LabelMap.from_config(3).resolve(Info(bands=3))
    with pytest.raises(LabelError, match="has bands: 2, but classes are colours"):
        colours.resolve(Info(bands=2))
    with pytest.raises(LabelError, match="has bands: 1, but classes are colours"):
        colours.resolve(Info(bands=1))
    with pytest.raises(LabelError, match="colour #ff0100 at"):
        LabelMap.from_config(REDS[0]).apply(np.array([[[255]], [[1]], [[0]]], np.uint8))
    with pytest.raises(LabelError, match="float32"):
        LabelMap.from_config(3).apply(np.zeros((1, 2, 2), np.float32))


UTM = CRS.from_epsg(32611)


def test_equal_grids_pass_whatever_the_rounding_and_by_what_both_have() -> None:
    nudged = Affine(0.5 * (1 + 1e-9), 1e-12, 350000 + 1e-6, 0, -0.5, 3770000 - 1e-6)
    for other in (Info(crs=UTM, transform=nudged), Info(transform=Affine.identity()), Info(crs=None), Info(crs=UTM)):
        check_grids_match(Info(crs=UTM), other)
        check_grids_match(other, Info(crs=UTM))


def test_a_count_by_hand() -> None:
    """Three images of 10, 20 and 10 valid pixels. Class 0 is in all: 20 of 40; class 1 in two: 15 of 30; class 2 in
    one: 5 of 10... so the frequencies are 1/2, 1/2 and 1/4, and their median is 1/2."""
    counts = np.array([[5, 5, 0], [10, 10, 0], [5, 0, 5]])
    assert median_frequency_weights(counts) == (1.0, 1.0, 1.0)
    counts = np.array([[8, 2, 0], [0, 15, 5]])  # 8 of 10, 17 of 30, 5 of 20: the median is 17/30
    assert median_frequency_weights(counts) == pytest.approx((17 / 30 / 0.8, 1.0, 17 / 30 / 0.25))
    counts = np.array([[90, 0, 10]])  # frequencies 0.9 and 0.1: their median is 0.5; one that no image has
    assert median_frequency_weights(counts) == pytest.approx((0.5 / 0.9, 1.0, 5.0))


def test_pixels_that_are_not_valid_and_numbers_of_no_class_do_not_count() -> None:
    classes_HW = np.array([[0, 1, 1], [2, 255, 7]], np.uint8)
    valid_HW = np.array([[True, True, False], [True, True, True]])
    assert count_classes(classes_HW, valid_HW, 3).tolist() == [1, 1, 1]


def test_every_default_colour_is_one_of_its_own() -> None:
    records = default_classes(255)
    assert len({record.colour for record in records}) == 255
    assert records[:30] == default_classes(30)
    assert LabelMap.from_config(3).classes == records[:3]
    assert records[9].name == "class 9"
    assert all(0 <= part <= 255 for record in records for part in record.colour)


def test_a_class_has_its_own_colour_or_that_of_its_first_value() -> None:
    assert LabelMap.from_config(ROADS).classes == (
        ClassRecord("road", (128, 64, 128)),
        ClassRecord("tree", (0, 128, 0)),
    )
    assert LabelMap.from_config(REDS[0]).classes[1] == ClassRecord("b", (255, 0, 0))


def test_other_names_agree_and_moved_ones_do_not() -> None:
    plain = LabelMap.from_config(2)
    named = LabelMap.from_config([{"name": "a", "colour": "#ff0000"}, {"name": "b", "colour": "#00ff00"}])
    moved = LabelMap.from_config([{"name": "b"}, {"name": "a"}])
    other = LabelMap.from_config([{"name": "a", "colour": "#ff0000"}, {"name": "b", "colour": "#0000ff"}])
    assert plain.agrees(named)
    assert named.agrees(plain)
    assert not named.agrees(moved)
    assert not named.agrees(other)  # colours in labels of three bands
    assert not plain.agrees(LabelMap.from_config(3))


@pytest.mark.parametrize(
    ("classes", "words"),
    [
        ([], ["no class"]),
        ([{"name": ""}, {"name": "a"}], ["classes[0]", "a name"]),
        ([{"name": "a", "colour": "red"}, {"name": "b"}], ["class a", "red", "#ff0000"]),
        ([{"name": "a", "value": 1}, {"name": "b"}], ["class b has no values"]),
        ([{"name": "a", "value": 1}, {"name": "b", "value": 1}], ["value 1", "both a and b"]),
        ([{"name": "a", "value": 1, "values": [2]}, {"name": "b"}], ["both value and values"]),
        ([{"name": "a", "values": []}, {"name": "b"}], ["class a", "a list"]),
        ([{"name": "a", "shade": 1}, {"name": "b"}], ["classes[0]", "shade", "colour"]),
        ([{"name": "a", "colour": "#010101"}, {"name": "b", "colour": "#010101"}], ["#010101", "both a and b"]),
        ({7: 0, 11: 1}, ["a list of records: [{'name': 'class 0', 'values': [7]}, {'name': 'class 1', '"]),
        ({"a": {"value": 1}}, ["a list of records: [{'name': 'a', 'value': 1}]"]),
        (["a", "b"], ["classes[0]", "record"]),
        (0, ["0 classes"]),
        (256, ["256 classes"]),
        (True, ["True"]),
        ("five", ["five"]),
        (records(["300,0,0"], ["1,1,1"]), ["300,0,0"]),
        (records(["#000000"], ["0,0,0"]), ["keep one"]),
        (records([True], [0]), ["True"]),
        ([{"name": "a", "values": [1], "ignored": 1}, {"name": "b", "value": 0}], ["class a", "true or false"]),
    ],
)
def test_records_that_mean_nothing(classes: Any, words: list[str]) -> None:
    with refusal(ConfigError, *words):
        LabelMap.from_config(classes)
    for ignore_index, more in ((3, "ignore_index 3 with classes 0 to 4"), (256, "ignore_index 256")):
        with pytest.raises(ConfigError, match=more):
            LabelMap.from_config(5, ignore_index)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.txt", "1 2 3 sky\n", ["a.txt", "ends with .csv"]),
        ("a.csv", "name\n", ["no class"]),
        ("a.csv", "r,g,b\n1,2,3\n", ["line 1", "name"]),
        ("a.csv", "name,r,g,b\nsky,1,2,3\nsea,1,2\n", ["line 3", "3 columns", "4"]),
        ("a.csv", "name,class\nsky,\nsea,sea\n", ["sky", "no value and no colour"]),
        ("a.csv", b"\xff\xfe\x00", ["UTF-8"]),
    ],
)
def test_files_that_hold_no_classes(tmp_path: Path, name: str, text: str | bytes, words: list[str]) -> None:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with refusal(ConfigError, *words):
        read_classes(str(path))
