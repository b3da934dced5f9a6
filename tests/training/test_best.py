"""The best validation by a named score: its checkpoint stays, is found by its name, and a run ends without a better."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rasterio

from tests.answers import errors_of
from tests.crash.runs import Material, lines
from tests.training.test_start import config_of, run
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.config.run import Config
from tiledseg.errors import CheckpointError, ConfigError

EPOCHS = 7


def judged(material: Material, folder: Path, epochs: int = EPOCHS, **train: Any) -> Config:
    """Rates so high that scores go up and down."""
    config = config_of(material, folder, **{"keep_checkpoints": 1, "best": "mean_iou", "seed": 5, **train})
    config.train.epochs, config.optimizer = epochs, replace(config.optimizer, lr=0.2, policy="constant")
    return config


def validations(folder: Path) -> list[dict[str, Any]]:
    return [{"step": line["step"], "epoch": line["epoch"], **line["val"]} for line in lines(folder) if "val" in line]


def value(validation: dict[str, Any], score: str) -> float:
    found = -validation["loss"] if score == "loss" else validation["iou"][2] if score == "iou.2" else validation[score]
    return float(found)


@pytest.fixture(scope="module")
def whole(material: Material) -> Path:
    folder = material.root / "whole"
    assert run(judged(material, folder)) == 0
    return folder


@pytest.mark.parametrize("score", ["loss", "iou.2"])
def test_the_best_checkpoint_stays(score: str, material: Material, tmp_path: Path) -> None:
    config = judged(material, tmp_path / "run", best=score)
    assert run(config) == 0
    found = validations(tmp_path / "run")
    best = max(found, key=lambda validation: value(validation, score))  # the first of equals
    assert find_checkpoint(tmp_path / "run", "best").saved.step == best["step"]
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert kept == sorted({f"step-{best['step']:06d}", f"step-{found[-1]['step']:06d}"})
    recorded = json.loads((tmp_path / "run" / "summary.json").read_text())["best"]
    assert (recorded["score"], recorded["step"], recorded["epoch"]) == (score, best["step"], best["epoch"])
    assert recorded["value"] == abs(value(best, score))


def test_a_run_ends_without_a_better_one(material: Material, whole: Path, tmp_path: Path) -> None:
    """By hand, of the run that goes to its end. Run again, there is nothing left to do; without patience it goes on."""
    scores, last, best = [value(v, "mean_iou") for v in validations(whole)], EPOCHS - 1, 0
    for epoch, score in enumerate(scores):
        best = epoch if score > scores[best] else best
        if epoch - best >= 1:
            last = epoch
            break
    assert 0 < last < EPOCHS - 1, "the case says something"
    for _ in range(2):
        assert run(judged(material, tmp_path / "run", early_stop=1)) == 0
        assert validations(tmp_path / "run") == validations(whole)[: last + 1]
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert (summary["stopped_early"], summary["epochs"], summary["finished"]) == (True, last + 1, True)
    assert run(judged(material, tmp_path / "run")) == 0
    assert validations(tmp_path / "run") == validations(whole)


def test_without_its_checkpoint_the_best_begins_anew(material: Material, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    best = find_checkpoint(tmp_path / "run", "best").path
    assert best != find_checkpoint(tmp_path / "run").path, "the case says something"
    shutil.rmtree(best)
    config = judged(material, tmp_path / "run", EPOCHS + 1)
    config.run.verbosity = 1
    assert "of the best mean_iou, is not there: the best begins anew" in errors_of(lambda: run(config))
    assert find_checkpoint(tmp_path / "run", "best").saved.step == validations(tmp_path / "run")[-1]["step"]


def test_a_best_of_other_images_is_none(material: Material, whole: Path, tmp_path: Path) -> None:
    """Scores of other images say nothing of it; the same images elsewhere do."""
    moved, other = tmp_path / "moved.tif", tmp_path / "other.tif"
    shutil.copy(material.root / "held-out.tif", moved)
    with rasterio.open(moved) as file:
        pixels_CHW, profile = file.read(), file.profile
    pixels_CHW[:, :20] = 9
    with rasterio.open(other, "w", **profile) as file:
        file.write(pixels_CHW)
    best = find_checkpoint(whole, "best").saved.step
    for name, image in (("moved", moved), ("other", other)):
        shutil.copytree(whole, tmp_path / name)
        config = judged(material, tmp_path / name, EPOCHS + 1)
        config.data.val_images, config.run.verbosity = [str(image)], 1
        said = errors_of(lambda config=config: run(config))
        last = validations(tmp_path / name)[-1]
        better = last["mean_iou"] > max(each["mean_iou"] for each in validations(whole))
        anew = "was found on other validation images: the best begins anew" in said
        assert anew == (name == "other")
        found = find_checkpoint(tmp_path / name, "best").saved
        assert found.step == (last["step"] if anew or better else best)
        assert [Path(source.image.path) for source in find_checkpoint(tmp_path / name).saved.judged] == [image]


def test_what_cannot_be_found(material: Material, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is one checkpoint, not a run with a best one"):
        find_checkpoint(find_checkpoint(whole).path, "best")
    assert run(judged(material, tmp_path / "run", 1, best="none")) == 0
    with pytest.raises(CheckpointError, match=r"keeps no best checkpoint.*leave --which out"):
        find_checkpoint(tmp_path / "run", "best")
    with pytest.raises(ConfigError, match=r"train.best is iou.tree, but no class is 'tree'; give one of class 0, .*"):
        run(judged(material, tmp_path / "other", best="iou.tree"))
    with pytest.raises(
        ConfigError, match=r"train.best is mean_iou, but train.validate_every is 8 and train.epochs 7: .*"
    ):
        run(judged(material, tmp_path / "other", validate_every=8))
