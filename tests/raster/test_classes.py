"""Classes as records: names, colours and raw values, in every form in which they can be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiledseg.errors import ConfigError, LabelError
from tiledseg.raster.info import RasterInfo
from tiledseg.raster.labels.classes import ClassRecord, default_classes, read_classes
from tiledseg.raster.labels.label_map import LabelMap

ROADS = [
    {"name": "road", "colour": "#804080", "values": [7, 8]},
    {"name": "tree", "color": [0, 128, 0], "value": 21},
    {"name": "void", "ignored": True, "values": [0, -1]},
]


def info(bands: int, palette: Any = None) -> RasterInfo:
    return RasterInfo("labels.png", 1, 4, bands, "uint8", palette=palette)


def test_every_default_colour_is_one_of_its_own() -> None:
    records = default_classes(255)
    assert len({record.colour for record in records}) == 255
    assert records[:30] == default_classes(30)
    assert LabelMap.from_config(3).classes == records[:3]
    assert records[9].name == "class 9"
    assert all(0 <= part <= 255 for record in records for part in record.colour)


def test_records_say_name_colour_and_values() -> None:
    label_map = LabelMap.from_config(ROADS)
    assert label_map.classes == (ClassRecord("road", (128, 64, 128)), ClassRecord("tree", (0, 128, 0)))
    raw_CHW = np.array([[[7, 8, 21, 0, -1, 255]]], np.int16)
    assert label_map.apply(raw_CHW).tolist() == [[0, 0, 1, 255, 255, 255]]


def test_without_values_one_band_holds_numbers_and_three_hold_colours() -> None:
    label_map = LabelMap.from_config([{"name": "a", "colour": "#ff0000"}, {"name": "b", "colour": "#00ff00"}])
    assert label_map.resolve(info(1)).apply(np.array([[[1, 0, 255]]], np.uint8)).tolist() == [[1, 0, 255]]
    raw_CHW = np.array([[[0, 255]], [[255, 0]], [[0, 0]]], np.uint8)
    assert label_map.resolve(info(3)).apply(raw_CHW).tolist() == [[1, 0]]
    palette = ((0, (9, 9, 9, 255)), (1, (255, 0, 0, 255)))
    assert label_map.resolve(info(1, palette)).apply(np.array([[[1]]], np.uint8)).tolist() == [[1]]
    with pytest.raises(LabelError, match="bands: 3"):
        LabelMap.from_config([{"name": "a"}, {"name": "b"}]).resolve(info(3))


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
        ([{"name": "a"}, {"name": "a"}], ["two classes named a"]),
        ([{"name": ""}, {"name": "a"}], ["classes[0]", "a name"]),
        ([{"name": "a", "colour": "red"}, {"name": "b"}], ["class a", "red", "#ff0000"]),
        ([{"name": "a", "value": 1}, {"name": "b"}], ["class b has no values"]),
        ([{"name": "a", "value": 1}, {"name": "b", "value": 1}], ["value 1", "both a and b"]),
        ([{"name": "a", "value": 1}, {"name": "b", "value": "#000000"}], ["mixes"]),
        ([{"name": "a", "value": 1, "values": [2]}, {"name": "b"}], ["both value and values"]),
        ([{"name": "a", "values": []}, {"name": "b"}], ["class a", "a list"]),
        ([{"name": "a", "shade": 1}, {"name": "b"}], ["classes[0]", "shade", "colour"]),
        ([{"name": "a", "colour": "#010101"}, {"name": "b", "colour": "#010101"}], ["#010101", "both a and b"]),
        ({7: 0, 11: 1}, ["a list of records: [{'name': 'class 0', 'values': [7]}, {'name': 'class 1', '"]),
        ({"a": {"value": 1}}, ["a list of records: [{'name': 'a', 'value': 1}]"]),
        (["a", "b"], ["classes[0]", "record"]),
        ([{"name": "a", "value": 2**70}, {"name": "b", "value": 1}], ["64 bits"]),
        ([{"name": "a", "values": [1], "ignored": 1}, {"name": "b", "value": 0}], ["class a", "true or false"]),
    ],
)
def test_records_that_mean_nothing(classes: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        LabelMap.from_config(classes)
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert "\n" not in text


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_csv_groups_colours(tmp_path: Path) -> None:
    rows = "name,r,g,b,class\nSky,128,128,128,Sky\nWall,64,192,0,Building\nBuilding,128,0,0,Building\nVoid,0,0,0,\n"
    label_map = LabelMap.from_config(read_classes(written(tmp_path / "classes.csv", rows)))
    assert label_map.classes == (ClassRecord("Sky", (128, 128, 128)), ClassRecord("Building", (128, 0, 0)))
    raw_CHW = np.array([[[128, 64, 128, 0]], [[128, 192, 0, 0]], [[128, 0, 0, 0]]], np.uint8)
    assert label_map.resolve(info(3)).apply(raw_CHW).tolist() == [[0, 1, 1, 255]]


def test_a_csv_takes_ids_to_train_ids(tmp_path: Path) -> None:
    rows = "name,id,class,colour\nunlabeled,0,ignored,#000000\nroad,7,road,#804080\ncar,26,car,#00008e\nplate,-1,,\n"
    label_map = LabelMap.from_config(read_classes(written(tmp_path / "cityscapes.csv", rows)))
    assert [record.name for record in label_map.classes] == ["road", "car"]
    assert label_map.apply(np.array([[[7, 26, 0, -1]]], np.int16)).tolist() == [[0, 1, 255, 255]]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.txt", "1 2 3 sky\n", ["a.txt", "ends with .csv"]),
        ("a.csv", "name\n", ["no class"]),
        ("a.csv", "r,g,b\n1,2,3\n", ["line 1", "name"]),
        ("a.csv", "name,r,g,b\nsky,1,2,3\nsea,1,2\n", ["line 3", "3 columns", "4"]),
        ("a.csv", "name,class\nsky,\nsea,sea\n", ["sky", "no value and no colour"]),
        ("a.csv", b"\xff\xfe\x00", ["UTF-8"]),
        ("missing.csv", None, ["missing.csv", "No such file"]),
    ],
)
def test_files_that_hold_no_classes(tmp_path: Path, name: str, text: str | bytes | None, words: list[str]) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        read_classes(str(path))
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)
