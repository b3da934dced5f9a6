"""Runs that go on with other settings: their end is that of their last epoch, and nothing changes unsaid."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.crash.runs import Material, after_step, lines, train
from tests.small_files import tree, write_raster
from tiledseg.checkpoint.folder import find_checkpoint

SGD = ("--optimizer.name", "sgd", "--optimizer.policy", "constant", "--train.precision", "fp32")
pytestmark = pytest.mark.usefixtures("without_plots")
WHOLE = ("--train.tiles_per_step", "null")


def one_image(material: Material) -> tuple[str, ...]:
    return ("--data.images", str(material.root / "one.tif"), "--data.labels", str(material.root / "one-labels.tif"))


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def steps(folder: Path) -> list[dict[str, Any]]:
    return [line for line in lines(folder) if "loss" in line]


@pytest.fixture(scope="module")
def begun(material: Material) -> Path:
    """One image for two epochs of four, one step each: stopped by its epochs."""
    folder = material.root / "begun"
    assert train(material, folder, *one_image(material), *WHOLE, "--train.epochs", "2") == 0
    return folder


def copy(begun: Path, name: str) -> Path:
    return Path(shutil.copytree(begun, begun.with_name(name)))


def test_more_images_and_epochs_are_trained_to_their_end_and_saved(material: Material, begun: Path) -> None:
    """It was: exit 0, finished, and the newest checkpoint step-000002: 12 steps lost."""
    folder = copy(begun, "more-images")
    assert train(material, folder, *WHOLE, "--train.epochs", "8", "--train.checkpoint_every", "100") == 0
    assert [line["step"] for line in steps(folder)] == list(range(1, 15))
    assert [line["epoch"] for line in steps(folder)] == [0, 1, *(epoch for epoch in range(2, 8) for _ in range(2))]
    assert find_checkpoint(folder).saved.step == 14
    found = summary(folder)
    assert (found["finished"], found["steps"], found["epochs"]) == (True, 14, 8)
    rates = [line["lr"] for line in steps(folder)][3:]
    assert rates == sorted(rates, reverse=True)
    assert 0 < rates[-1] < 0.1 * rates[0], "the cosine ends with the last epoch"


def test_fewer_epochs_in_the_middle_of_one(
    material: Material, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Three epochs and a step are more than three; four epochs are still to come, and end there."""
    folder = material.root / "in-the-middle"
    with monkeypatch.context() as patch:
        after_step(patch, 9)
        assert train(material, folder, "--train.epochs", "6") == 75
    assert find_checkpoint(folder).saved.position == (3, 1)
    assert train(material, folder, "--train.epochs", "3") == 2
    assert "has done 3 epochs and 1 steps, but train.epochs is 3; give at least 4" in capfd.readouterr().err
    assert train(material, folder, "--train.epochs", "4") == 0
    assert (summary(folder)["steps"], find_checkpoint(folder).saved.step) == (12, 12)


def test_weights_that_are_not_finite_are_never_saved(
    material: Material, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The loss of a last step is finite where its update is not: it was exit 0 with a checkpoint of NaN.

    Pixels of 1e34 give a loss and gradients of their size, and a rate of 1e6 an update beyond float32.
    """
    generator = np.random.default_rng(0)
    write_raster(tmp_path / "huge.tif", generator.uniform(1e34, 2e34, (3, 64, 64)).astype(np.float32))
    data = ("--data.images", str(tmp_path / "huge.tif"), *one_image(material)[2:], "--data.normalize", "false")
    validation = ("--data.val_images", "[]", "--data.val_labels", "[]")
    options = (*data, *validation, *WHOLE, *SGD, "--optimizer.clip_norm", "0", "--optimizer.warmup_steps", "0")
    assert train(material, tmp_path / "run", *options, "--train.epochs", "2", "--optimizer.lr", "1e-36") == 0
    capfd.readouterr()
    assert train(material, tmp_path / "run", *options, "--train.epochs", "3", "--optimizer.lr", "1e6") == 1
    assert "is not finite after step 3; its checkpoint is not written" in capfd.readouterr().err
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step-000002"]
    assert train(material, tmp_path / "run", *options, "--train.epochs", "3", "--optimizer.lr", "1e-36") == 0
    assert find_checkpoint(checkpoints).saved.step == 3


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "report.html"])
def test_a_file_that_no_run_has_written_stays(
    material: Material, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """A new run removed, or replaced, other programs' files of its names."""
    (tmp_path / name).write_text("mine\n")
    before = tree(tmp_path)
    assert train(material, tmp_path) == 2
    assert f"{name} was not written by a run, which would replace it" in capsys.readouterr().err
    assert tree(tmp_path) == before


@pytest.mark.parametrize("ended", ["finished", "killed long after", "killed soon"])
def test_checkpoints_that_are_gone_are_missed(
    material: Material, begun: Path, capsys: pytest.CaptureFixture[str], ended: str
) -> None:
    """A run began anew without a word, and its first write removed the metrics of the one before."""
    folder = copy(begun, f"gone-{ended.replace(' ', '-')}")
    shutil.rmtree(folder / "checkpoints")
    every = {"finished": "9", "killed long after": "1", "killed soon": "9"}[ended]
    if ended != "finished":
        (folder / "summary.json").unlink()
        more = (folder / "metrics.jsonl").read_text().splitlines()[0]
        more = json.dumps({**json.loads(more), "step": 3})
        with (folder / "metrics.jsonl").open("a") as metrics:
            metrics.write(more + "\n")
    before = tree(folder)
    options = (*one_image(material), *WHOLE, "--train.epochs", "2", "--train.checkpoint_every", every)
    code = train(material, folder, *options, "--run.verbosity", "1")
    said = capsys.readouterr().err
    if ended == "killed soon":
        assert code == 0
        assert "has 3 steps, but there is no checkpoint of them: the run begins anew" in said
    else:
        assert code == 2
        assert "but no checkpoint is left in" in said
        assert tree(folder) == before
