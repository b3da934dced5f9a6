"""The page of a run: numbers of its files, nothing from outside, and no value that becomes markup."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from tests.small_files import tree
from tiledseg.errors import install
from tiledseg.execution.scores import reliability_counts
from tiledseg.geometry.box import Box, Interval
from tiledseg.raster.labels.classes import ClassRecord
from tiledseg.raster.labels.label_map import LabelMap
from tiledseg.raster.statistics import Normalization
from tiledseg.report import main
from tiledseg.reporting.page import draw_curves
from tiledseg.system.outputs import CONFIG, METRICS, PAGE, SUMMARY
from tiledseg.training import run_files as validations
from tiledseg.training import run_page as page
from tiledseg.training.run_files import read_metrics, read_validations, write_validation
from tiledseg.training.run_journal import Journal
from tiledseg.training.run_page import page_of
from tiledseg.training.validation import Findings, PanelView, SeenView

CLASSES = (
    ClassRecord("field", (158, 188, 94)),
    ClassRecord('<b>road & "rail"</b>', (70, 70, 74)),
    ClassRecord("a class whose name is rather too long for a table", (24, 104, 44)),
)
LABELS = LabelMap((), False, 3, 255, CLASSES)
WINDOW = Box(Interval(8, 40), Interval(4, 60))
VIEWS = (PanelView(0, Box.of_shape((64, 64)), 2), PanelView(0, WINDOW))
WARNING = "<script>alert(1)</script> is stored in blocks"
LOSS = "class-weighted (cross-entropy + 0.5 Dice)"
STEPS, EVERY = 40, 10


def make_run(folder: Path) -> None:
    """Every second step a little better than the one before."""
    folder.mkdir(exist_ok=True)
    draw = np.random.default_rng(3)
    lines = []
    for step in range(1, STEPS + 1):
        pace = {"lr": 0.01 * (1 - step / STEPS), "seconds": 0.5, "pixels": 10000, "pixels_per_second": 2e4}
        lines.append({"step": step, "epoch": (step - 1) // EVERY, "loss": 1 / (1 + step), **pace})
        if step % EVERY == 0:
            findings = found(draw, step / STEPS)
            lines.append({"step": step, "epoch": step // EVERY - 1, "val": findings.line()})
            of_images = LABELS, ("held/<i>out.tif",), "uint8", Normalization.identity(3)
            write_validation(folder, step, step // EVERY - 1, findings, *of_images)
    (folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / CONFIG).write_text("data:\n  images: <b>.tif\n")
    summary = {"title": "made: unet", "finished": True, "seconds": 20.0, "ranks": 2, "command": "tiledseg train"}
    summary |= {"warnings": [WARNING], "loss": LOSS, "versions": {"torch": "2.13"}}
    (folder / SUMMARY).write_text(json.dumps(summary))


def found(draw: np.random.Generator, good: float) -> Findings:
    """What a validation finds where a share `good` of the pixels is right, and the others are drawn."""
    labels_HW = np.add.outer(np.arange(64) // 20, np.arange(64) // 24).astype(np.uint8) % 3
    map_HW = np.where(draw.random((64, 64)) < good, labels_HW, draw.integers(0, 3, (64, 64))).astype(np.uint8)
    labels_HW[:6, :9] = 255
    image_CHW = draw.integers(0, 255, (3, 64, 64)).astype(np.float32)
    counted = labels_HW != 255
    matrix_KK = np.zeros((3, 3), np.int64)
    np.add.at(matrix_KK, (labels_HW[counted], map_HW[counted]), 1)
    mapped, right = map_HW[counted], (map_HW == labels_HW)[counted]
    reliability = reliability_counts(draw.uniform(0.34, 1, mapped.size), mapped, right, 3)
    seen = []
    for view in VIEWS:
        rows, cols = (slice(side.start, side.stop, view.stride) for side in (view.box.row, view.box.col))
        seen.append(SeenView(view, image_CHW[:, rows, cols], labels_HW[rows, cols], map_HW[rows, cols]))
    return Findings(1 - good, matrix_KK, reliability, 0.1, seen)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "run"
    make_run(folder)
    assert main(["--run", str(folder)]) == 0
    return folder


class Tags(HTMLParser):
    """Every tag with its attributes, and all text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_values_are_words_and_no_markup(made: Path) -> None:
    found = Tags((made / PAGE).read_text())
    assert '<b>road & "rail"</b>' in found.words
    assert "<i>out.tif: rows 8 to 40, columns 4 to 60" in found.words
    assert any("<script>alert(1)</script>" in words for words in found.words)
    assert [tag for tag, _ in found.tags].count("script") == 1, "the page's own"
    assert all(words != "rail" for words in found.words)


def test_nothing_is_fetched(made: Path) -> None:
    text = (made / PAGE).read_text()
    assert not re.search(r"(?:https?:)?//[a-z]", re.sub(r"data:image/\w+;base64,[\w+/=]+", "", text))
    for tag, attributes in Tags(text).tags:
        assert tag not in ("iframe", "object", "embed", "base")
        assert all((attributes.get(key) or "data:").startswith("data:") for key in ("src", "href")), tag


def test_numbers_are_those_of_the_files(made: Path) -> None:
    text, newest = (made / PAGE).read_text(), read_validations(made)[-1]
    for one in newest["classes"]:
        assert f"{100 * one['iou']:.1f} %" in text
    assert f">{100 * newest['mean_iou']:.1f} %<" in text
    for row in newest["confusion_matrix"]:
        for pixels in row:
            assert f"{pixels:,} pixels".replace(",", " ") in text
    assert f"step {STEPS}, epoch 3" in text
    curves = draw_curves(read_metrics(made / METRICS), read_validations(made), LOSS, "")
    labels = [text.get_text() for axes in curves.axes[:2] for text in axes.get_legend().get_texts()]
    assert labels[:2] == [f"training: {LOSS}", "validation: cross-entropy a pixel"]
    assert labels[2:] == ["mean", *(one["name"] for one in newest["classes"])]
    mean = curves.axes[1].get_lines()[0].get_xydata()[-1].tolist()
    assert mean == [STEPS, newest["mean_iou"]]


def test_a_killed_run_is_what_it_said_from_the_start(tmp_path: Path) -> None:
    """Not what the summary says of the start before it."""
    make_run(tmp_path)
    told = {"title": "made: segnet", "loss": "Dice", "begun": "then", "ranks": 1, "command": "the second"}
    Journal(tmp_path, STEPS, STEPS, 0, told, read_metrics(tmp_path / METRICS)).close()
    killed = page_of(tmp_path)
    assert (killed["state"], killed["subtitle"]) == ("not finished", "made: segnet")
    assert ("command", "the second") in killed["about"]["Run"]
    (tmp_path / "summary.json").unlink()
    assert page_of(tmp_path) == killed
    (tmp_path / "summary.json").write_text(json.dumps({**told, "finished": True, "seconds": 3.0}))
    done = page_of(tmp_path)
    assert (done["state"], done["facts"][-1]) == ("finished", ("wall time", "3 s", "1 rank, all starts"))


def test_the_command_refuses_what_is_no_run(tmp_path: Path, made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--run", str(tmp_path)]) == 2
    assert "no metrics.jsonl in it; give the folder of a run" in capfd.readouterr().err
    before = tree(made)
    for taken in ("metrics.jsonl", "validation/step-000010.json"):
        assert main(["--run", str(made), "--output", str(made / taken)]) == 2
        assert "choose another output" in capfd.readouterr().err
    assert main(["--run", str(made), "--output", str(tmp_path / "scene.tif")]) == 2
    assert "scene.tif'; give a file name that ends in .html or .htm" in capfd.readouterr().err
    assert tree(made) == before
    assert main(["--run", str(made), "--output", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_bytes() == (made / PAGE).read_bytes()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("validation/step-000040.png", "no picture"),
        ("validation/step-000040.json", json.dumps(dict.fromkeys(validations._KEYS, 3))),
        ("summary.json", '{"seconds": "x"}'),
    ],
)
def test_what_no_run_has_written_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    make_run(tmp_path)
    (tmp_path / name).write_text(text)
    assert main(["--run", str(tmp_path)]) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert "was not written by a run" in err
    assert not (tmp_path / PAGE).exists()


def test_a_page_that_cannot_be_made_stops_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path)
    monkeypatch.setattr("tiledseg.training.run_journal.plot_progress", lambda *given: False)
    journal = Journal(tmp_path, STEPS, STEPS, 1, {"title": "title", "loss": "focal"}, [])
    for reason, damage in (
        (
            "jinja2 or matplotlib is not installed: pip install",
            lambda: monkeypatch.setattr(page, "can_render", lambda: False),
        ),
        ("was not written by a run", lambda: (tmp_path / "validation" / "step-000040.png").write_text("x")),
    ):
        damage()
        journal.draw(now=True)
        assert f"warning: no {PAGE}: " in (err := capfd.readouterr().err)
        assert reason in err
        monkeypatch.undo()
        monkeypatch.setattr("tiledseg.training.run_journal.plot_progress", lambda *given: False)
    journal.close()
    assert not (tmp_path / PAGE).exists()


def test_without_jinja2_the_command_says_so(
    made: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tiledseg.report.can_render", lambda: False)
    assert main(["--run", str(made)]) == 2
    assert capfd.readouterr().err == f"error: the page needs jinja2 and matplotlib: {install('report')}\n"
