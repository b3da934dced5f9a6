import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
from affine import Affine

from tests.answers import errors_of, output_of, refuse
from tests.small_files import write_raster
from tiledseg.commands import scoring
from tiledseg.commands.scoring import as_table, compare, thumbnail
from tiledseg.errors import LabelError, install
from tiledseg.evaluate import evaluate_map, main
from tiledseg.execution.scores import confusion_matrix, scores
from tiledseg.raster.reader import open_raster

PLACE = Affine(0.5, 0, 350000, 0, -0.5, 3770000)
SHAPE = 60, 130


def write(path: Path, pixels: np.ndarray, nodata: float | None = 255, **changes: Any) -> str:
    pixels_CHW = pixels if pixels.ndim == 3 else pixels[None]
    return write_raster(path, pixels_CHW, **{"transform": PLACE, "nodata": nodata, **changes})


def named(path: Path, pixels: np.ndarray, names: Sequence[str]) -> str:
    write(path, pixels)
    with rasterio.open(path, "r+") as file:
        file.update_tags(1, **{f"CLASS_{k}": name for k, name in enumerate(names)})
    return str(path)


@pytest.fixture
def truth() -> np.ndarray:
    truth = np.random.default_rng(0).integers(0, 4, SHAPE).astype(np.uint8)
    truth[:5] = 255
    return truth


@pytest.fixture
def prediction(truth: np.ndarray) -> np.ndarray:
    rng = np.random.default_rng(1)
    prediction = np.where(rng.random(SHAPE) < 0.7, truth, rng.integers(0, 4, SHAPE)).astype(np.uint8)
    prediction[:, :7] = 255
    prediction[prediction == 2] = 1  # a class that is never predicted
    return prediction


@pytest.fixture
def files(tmp_path: Path, prediction: np.ndarray, truth: np.ndarray) -> list[str]:
    return ["--prediction", write(tmp_path / "p.tif", prediction), "--labels", write(tmp_path / "b.tif", truth)]


def evaluate(*arguments: str) -> dict[str, Any]:
    text = output_of(lambda: main([*arguments, "--format", "json"]))
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not strict JSON"))


def test_scores_are_those_of_the_whole_arrays(files: list[str], truth: np.ndarray, prediction: np.ndarray) -> None:
    expected = confusion_matrix(truth, prediction, 4)
    answer = evaluate(*files)
    assert answer["confusion_matrix"] == expected.tolist()
    assert answer["classes"] == 4
    assert answer["mean_iou"] == scores(expected).mean_iou
    assert answer["iou"][2] == 0
    assert answer["pixels"] == int(((truth < 255) & (prediction < 255)).sum())
    wider = evaluate(*files, "--classes", "6")
    assert wider["iou"] == [*answer["iou"], None, None]
    assert wider["mean_iou"] == answer["mean_iou"]


@pytest.mark.parametrize("block", [(7, 13), (64, 32), (1000, 1000)])
def test_blocks_do_not_change_the_counts(
    files: list[str], monkeypatch: pytest.MonkeyPatch, truth: np.ndarray, prediction: np.ndarray, block: Any
) -> None:
    monkeypatch.setattr(scoring, "_BLOCK", block)
    with open_raster(files[1]) as map_reader, open_raster(files[3]) as label_reader:
        matrix = compare(map_reader, label_reader, None)
    np.testing.assert_array_equal(matrix, confusion_matrix(truth, prediction, 4))


def test_raw_values_of_labels_are_mapped(tmp_path: Path, truth: np.ndarray, prediction: np.ndarray) -> None:
    raw = np.array([10, 20, 30, 31], np.int16)[np.minimum(truth, 3)]
    raw[truth == 255] = -9
    files = ["--prediction", write(tmp_path / "p.tif", prediction), "--labels", write(tmp_path / "b.tif", raw, -9)]
    records = [{"name": f"class {k}", "value": value} for k, value in enumerate([10, 20, 30, 31])]
    answer = evaluate(*files, "--classes", json.dumps(records))
    assert answer["confusion_matrix"] == confusion_matrix(truth, prediction, 4).tolist()
    records[3]["ignored"] = True
    left_out = evaluate(*files, "--classes", json.dumps(records), "--ignore-index", "3")
    expected = confusion_matrix(*(np.where(each == 3, 255, each) for each in (truth, prediction)), 3)
    assert left_out["confusion_matrix"] == expected.tolist()


def test_names_of_classes(files: list[str], tmp_path: Path, truth: np.ndarray, prediction: np.ndarray) -> None:
    """Given ones first, then those of the labels' file, then of the map's."""
    named(tmp_path / "p.tif", prediction, ["sea", "land"])
    named(tmp_path / "b.tif", truth, ["water"])
    assert evaluate(*files)["class_names"] == ["water", "land", "class 2", "class 3"]
    (tmp_path / "classes.csv").write_text("name,r,g,b\nfield,1,2,3\nroad,4,5,6\ntree,7,8,9\nrock,0,0,0\n")
    assert evaluate(*files, "--classes", str(tmp_path / "classes.csv"))["class_names"][2:] == ["tree", "rock"]
    table = output_of(lambda: main(files))
    assert "water" in table
    assert "as land" in table


def test_the_picture(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("PIL")
    image = write(tmp_path / "a.tif", np.random.default_rng(2).normal(0, 1, (4, *SHAPE)).astype(np.float32), None)
    for options in ([], ["--image", image]):
        picture = tmp_path / "map.png"
        assert main([*files, "--plot", str(picture), *options]) == 0
        with rasterio.open(picture) as dataset:
            assert dataset.width > 800
            assert dataset.read(1).std() > 10
    assert "IoU" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "PIL", None)
    refuse(lambda: main([*files, "--plot", str(tmp_path / "map.png")]), f"--plot needs Pillow: {install('plot')}")


def test_a_thumbnail_is_every_kth_pixel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, truth: np.ndarray) -> None:
    monkeypatch.setattr(scoring, "_BLOCK", (16, 24))
    path = write(tmp_path / "b.tif", truth)
    for side in (10, 45, 500):
        step = -(-max(SHAPE) // side)
        with open_raster(path) as reader:
            read, areas = reader.read, list[int]()
            monkeypatch.setattr(reader, "read", lambda box, read=read, areas=areas: areas.append(box.area) or read(box))
            pixels_CHW, valid_HW = thumbnail(reader, side)
        assert max(areas) <= 16 * 24
        np.testing.assert_array_equal(pixels_CHW[0], truth[::step, ::step])
        np.testing.assert_array_equal(valid_HW, truth[::step, ::step] != 255)


def test_a_class_that_has_two_numbers_is_refused(tmp_path: Path, truth: np.ndarray, prediction: np.ndarray) -> None:
    """Refuse by the names in both files, or the given ones; `values` in the map's order are the remedy."""
    labels = named(tmp_path / "b.tif", truth, ["field", "road"])
    files = ["--prediction", named(tmp_path / "p.tif", prediction, ["road", "field"]), "--labels", labels]
    same = ["--classes", '[{"name": "field"}, {"name": "road"}, {"name": "c"}, {"name": "d"}]']
    for classes in ([], same):
        refuse(lambda classes=classes: main([*files, *classes]), "p.tif holds class field as 1, but ", "b.tif it is 0")
    with pytest.raises(LabelError, match="holds class field as 1"):
        evaluate_map(tmp_path / "p.tif", tmp_path / "b.tif")
    moved = '[{"name": "road", "value": 1}, {"name": "field", "value": 0}, {"name": "c", "value": 2}, '
    answer = evaluate(*files, "--classes", moved + '{"name": "d", "value": 3}]')
    swapped = np.array([1, 0, 2, 3, *[255] * 252], np.uint8)[truth]
    assert answer["confusion_matrix"] == confusion_matrix(swapped, prediction, 4).tolist()
    assert answer["class_names"][:2] == ["road", "field"]


def test_a_class_of_two_names_is_said(tmp_path: Path, truth: np.ndarray, prediction: np.ndarray) -> None:
    """It may be the same in two languages; names that only one of both has say nothing, nor do those of numbers."""
    named(tmp_path / "b.tif", truth, ["Feld", "road", "class 3", "tree"])
    named(tmp_path / "p.tif", prediction, ["field", "road", "c", "class 2"])
    files = ["--prediction", str(tmp_path / "p.tif"), "--labels", str(tmp_path / "b.tif")]
    (line,) = errors_of(lambda: main(files)).splitlines()
    assert "class 0 is 'Feld' of " in line
    assert "b.tif and 'field' of " in line
    with pytest.warns(UserWarning, match="'Feld'"):
        evaluate_map(tmp_path / "p.tif", tmp_path / "b.tif")


def test_many_classes_of_long_names_have_80_columns() -> None:
    matrix = np.arange(400).reshape(20, 20)
    lines = as_table(matrix, scores(matrix), [f"a class with a long name, number {k}" for k in range(20)]).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].startswith("(a map of a class wit.., number 19 alone: 9.8 %, ")
    assert lines[-1].split("  ")[1:] == ["a class wit.., number 19", "5.1 %", "a class wit.., number 18", " 5.1 %"]
