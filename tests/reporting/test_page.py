"""The page of a run: numbers of its files, nothing from outside, and no value that becomes markup."""

from __future__ import annotations

import json
import re
import shutil
import sys
from html import unescape
from pathlib import Path

import pytest

import tiledseg
from tests.crash.runs import Material
from tests.small_files import tree
from tiledseg.errors import install
from tiledseg.report import main
from tiledseg.reporting.page import draw_curves
from tiledseg.system.outputs import METRICS, PAGE, SUMMARY
from tiledseg.training import run_files as validations
from tiledseg.training.run_files import read_metrics, read_validations
from tiledseg.training.run_journal import Journal
from tiledseg.training.run_page import page_of

CLASSES = ("field", '<b>road & "rail"</b>', "a class whose name is rather too long for a table")
WARNING = "<script>alert(1)</script> is stored in blocks"
STEPS = 12


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four validations, with names and a warning that hold markup."""
    material = Material.make(tmp_path_factory.mktemp("made"))
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


def test_the_command_refuses_what_is_no_run(tmp_path: Path, made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--run", str(tmp_path)]) == 2
    assert "no metrics.jsonl in it; give the folder of a run" in capfd.readouterr().err
    before = tree(made)
    assert main(["--run", str(made), "--output", str(made / "validation/step-000003.json")]) == 2
    assert "choose another output" in capfd.readouterr().err
    assert main(["--run", str(made), "--output", str(tmp_path / "scene.tif")]) == 2
    assert "scene.tif'; give a file name that ends in .html or .htm" in capfd.readouterr().err
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
def test_what_no_run_has_written_is_one_line(
    copied: Path, capfd: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    (copied / "started.json").unlink()
    (copied / name).write_text(text)
    assert main(["--run", str(copied)]) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert "was not written by a run" in err
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


def test_without_jinja2_the_command_says_so(
    made: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert main(["--run", str(made)]) == 2
    assert capfd.readouterr().err == f"error: the page needs jinja2: {install('report')}\n"
