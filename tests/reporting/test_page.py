"""The page of a run: numbers of its files, nothing from outside, and no value that becomes markup; and its panels."""

import json
import re
import shutil
import sys
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import tiledseg
from tests.answers import refuse
from tests.crash.runs import Material
from tests.small_files import tree
from tiledseg.errors import install
from tiledseg.report import main
from tiledseg.reporting.page import (
    BLANK,
    RIGHT,
    as_picture,
    class_picture,
    draw_curves,
    draw_panel,
    error_picture,
    write_panel,
)
from tiledseg.system.outputs import METRICS, PAGE, SUMMARY
from tiledseg.training import run_files as validations
from tiledseg.training.run_files import read_metrics, read_validations
from tiledseg.training.run_journal import Journal
from tiledseg.training.run_page import page_of

CLASSES = ("field", '<b>road & "rail"</b>', "a class whose name is rather too long for a table")
WARNING = "<script>alert(1)</script> is stored in blocks"
STEPS = 12


@pytest.fixture(scope="module")
def made(material: Material) -> Path:
    """A run of four validations, with names and a warning that hold markup."""
    image = (material.root / "held-out.tif").rename(material.root / "held<i>out.tif")
    config = material.config()
    config["data"] |= {"classes": [{"name": name} for name in CLASSES], "val_images": str(image)}
    config["train"] |= {"loss": {"cross_entropy": 1.0, "dice": 0.5}}
    config["run"]["output"] = str(material.root / "run")
    folder = tiledseg.train_network(config)
    summary = json.loads((folder / SUMMARY).read_text())
    (folder / SUMMARY).write_text(json.dumps({**summary, "warnings": [WARNING]}))
    assert main(["--run", str(folder)]) == 0
    return folder


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    """The run without its page."""
    return Path(shutil.copytree(made, tmp_path / "run", ignore=shutil.ignore_patterns(PAGE)))


def test_values_are_words_and_no_markup_and_nothing_is_fetched(made: Path) -> None:
    text = re.sub(r"data:image/\w+;base64,[\w+/=]+", "", (made / PAGE).read_text())
    for value in ('<b>road & "rail"</b>', "held<i>out.tif: rows 0 to 64, columns 0 to 64", "<script>alert(1)</script>"):
        assert value in unescape(text)
        assert value not in text
    assert text.count("<script") == 1, "the page's own"
    assert not re.search(r"(?:https?:)?//[a-z]|<(?:iframe|object|embed|base)\b|\b(?:src|href)=\"(?!data:|\")", text)


def test_numbers_are_those_of_the_files(made: Path) -> None:
    text, newest = (made / PAGE).read_text(), read_validations(made)[-1]
    for one in newest["classes"]:
        assert f"{100 * one['iou']:.1f} %" in text
    assert f">{100 * newest['mean_iou']:.1f} %<" in text
    matrix = [f"{pixels:,}".replace(",", " ") for row in newest["confusion_matrix"] for pixels in row]
    assert re.findall(r"title=\"(\d[\d ]*) pixels, ", text) == matrix
    assert f"step {STEPS}, epoch 3" in text
    curves = draw_curves(read_metrics(made / METRICS), read_validations(made), "Dice", "")
    labels = [text.get_text() for axes in curves.axes[:2] for text in axes.get_legend().get_texts()]
    assert labels[:2] == ["training: Dice", "validation: cross-entropy a pixel"]
    assert labels[2:] == ["mean", *(one["name"] for one in newest["classes"])]
    mean = curves.axes[1].get_lines()[0].get_xydata()[-1].tolist()
    assert mean == [STEPS, newest["mean_iou"]]


def test_a_killed_run_is_what_it_said_from_the_start(copied: Path) -> None:
    """Not what the summary says of the start before it."""
    told = {"title": "made: segnet", "loss": "Dice", "begun": "then", "ranks": 1, "command": "the second"}
    Journal(copied, STEPS, STEPS, 0, told).close()
    killed = page_of(copied)
    assert (killed["state"], killed["subtitle"]) == ("not finished", "made: segnet")
    assert ("command", "the second") in killed["about"]["Run"]
    (copied / "summary.json").unlink()
    assert page_of(copied) == killed
    (copied / "summary.json").write_text(json.dumps({**told, "finished": True, "seconds": 3.0}))
    done = page_of(copied)
    assert (done["state"], done["facts"][-1]) == ("finished", ("wall time", "3 s", "1 rank, all starts"))


def test_the_command_refuses_what_is_no_run(tmp_path: Path, made: Path) -> None:
    before, mine, other = tree(made), made / "validation/step-000003.json", tmp_path / "scene.tif"
    refuse(lambda: main(["--run", str(tmp_path)]), "no metrics.jsonl in it; give the folder of a run")
    refuse(lambda: main(["--run", str(made), "--output", str(mine)]), "choose another output")
    words = "scene.tif'; give a file name that ends in .html or .htm"
    refuse(lambda: main(["--run", str(made), "--output", str(other)]), words)
    assert tree(made) == before
    assert main(["--run", str(made), "--output", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_bytes() == (made / PAGE).read_bytes()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("validation/step-000012.png", "no picture"),
        ("validation/step-000012.json", json.dumps(dict.fromkeys(validations._KEYS, 3))),
        ("summary.json", '{"seconds": "x"}'),
    ],
)
def test_what_no_run_has_written_is_one_line(copied: Path, name: str, text: str) -> None:
    (copied / "started.json").unlink()
    (copied / name).write_text(text)
    refuse(lambda: main(["--run", str(copied)]), "was not written by a run")
    assert not (copied / PAGE).exists()


def test_a_page_that_cannot_be_made_stops_no_run(
    copied: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tiledseg.training.run_journal.plot_progress", lambda *given: False)
    journal = Journal(copied, STEPS, STEPS, 1, {"title": "title", "loss": "focal"})
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "jinja2", None)
        journal.draw(now=True)
    (copied / "validation" / "step-000012.png").write_text("x")
    journal.draw(now=True)
    journal.close()
    one, other = [line for line in capfd.readouterr().err.splitlines() if line.startswith(f"warning: no {PAGE}: ")]
    assert "the page needs jinja2: pip install" in one
    assert "was not written by a run" in other
    assert not (copied / PAGE).exists()


def test_without_jinja2_the_command_says_so(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    refuse(lambda: main(["--run", str(made)]), f"the page needs jinja2: {install('report')}")


LEGEND = [("water", (1, 2, 200)), ("a class of a name much too long for its place in the legend", (7, 150, 9))]


def test_pictures_stand_in_rows_and_columns(tmp_path) -> None:
    draw = np.random.default_rng(0)
    rows = [
        [draw.integers(0, 256, (*shape, 3)).astype(np.uint8) for _ in range(2)]
        for shape in [(40, 90), (70, 30), (1, 1)]
    ]
    write_panel(tmp_path / "panel.png", draw_panel(rows, ("image", "map"), LEGEND))
    found = np.asarray(Image.open(tmp_path / "panel.png"))
    tops = 29, 77, 155
    for row, top in zip(rows, tops, strict=True):
        for picture, left in zip(row, (8, 106), strict=True):
            height, width = picture.shape[:2]
            assert (found[top : top + height, left : left + width] == picture).all()
    for _, colour in LEGEND:
        assert (found[156:] == colour).all(-1).sum() > 80, "its square in the legend"


def test_errors_and_ignored_pixels() -> None:
    labels_HW, map_HW = np.array([[0, 1, 255, 1]], np.uint8), np.array([[0, 0, 1, 255]], np.uint8)
    one, two = colours = [(1, 1, 1), (2, 2, 2)]
    missed, false = (
        error_picture(*pair, colours, 255)[0].tolist() for pair in ((labels_HW, map_HW), (map_HW, labels_HW))
    )
    assert missed == [list(c) for c in (RIGHT, two, BLANK, BLANK)], "of the labels"
    assert false == [list(c) for c in (RIGHT, one, BLANK, BLANK)], "of the map"
    assert class_picture(labels_HW, [(1, 1, 1), (2, 2, 2)])[0].tolist() == [[1] * 3, [2] * 3, list(BLANK), [2] * 3]


@pytest.mark.parametrize("bands", [1, 2, 3, 5])
def test_images_of_any_bands_become_colours(bands: int) -> None:
    draw = np.random.default_rng(1)
    pixels_CHW, valid_HW = draw.normal(1000, 50, (bands, 20, 20)), np.ones((20, 20), bool)
    pixels_CHW[:, 3, 4], valid_HW[3, 4] = np.nan, False
    picture = as_picture(pixels_CHW, valid_HW)
    assert picture.shape == (20, 20, 3)
    assert picture[3, 4].tolist() == list(BLANK)
    assert picture[valid_HW].min() == 0
    assert picture[valid_HW].max() == 255
    small = draw.integers(90, 99, (3, 20, 20)).astype(np.uint8)
    assert (as_picture(small, np.ones((20, 20), bool)) == np.moveaxis(small, 0, -1)).all(), "bytes stay as they are"
