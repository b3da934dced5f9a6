"""What a run does before its first step: checks first, writes last; and that it stops in time for its job's end."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rasterio

from tests.crash.runs import Material
from tests.small_files import tree
from tiledseg.comm.mesh import ALONE
from tiledseg.commands.options import to_yaml
from tiledseg.config.run import Config
from tiledseg.errors import ConfigError, InputError
from tiledseg.training import trainer
from tiledseg.training.run_journal import Journal
from tiledseg.training.start import start
from tiledseg.training.trainer import StopFlag, end_of_job


def config_of(material: Material, folder: Path, **train: Any) -> Config:
    groups = material.config()
    config = Config()
    for name, group in groups.items():
        for key, value in group.items():
            setattr(getattr(config, name), key, value)
    config.run.output = str(folder)
    config.train = replace(config.train, epochs=1, **train)
    return config


def run(config: Config) -> int:
    mesh = ALONE
    return start(config, to_yaml(config), mesh)


def test_a_failure_before_the_first_step_leaves_no_trace(
    material: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the last of the checks fails: the survey of all pixels."""

    def fail(*_: object) -> None:
        raise InputError("found at last")

    monkeypatch.setattr("tiledseg.training.start.survey", fail)
    with pytest.raises(InputError, match="found at last"):
        run(config_of(material, tmp_path / "run"))
    assert tree(tmp_path) == {}


@pytest.mark.parametrize("key", ["images", "val_images"])
def test_a_raster_that_is_written_to_in_mid_run_is_said(
    material: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], key: str
) -> None:
    config, said = config_of(material, tmp_path / "run"), "was written to while the run read it"
    config.run.verbosity = 1
    image, named = tmp_path / "image.tif", config.data.images
    first, others = (named, []) if isinstance(named, str) else (named[0], named[1:])
    shutil.copy(first, image)
    setattr(config.data, key, [str(image), *others])
    config.data.val_labels = config.data.labels if key == "val_images" else config.data.val_labels
    assert run(config) == 0
    assert said not in capfd.readouterr().err
    log_step = Journal.step

    def write_then_log(journal: Journal, line: dict[str, Any]) -> None:
        with rasterio.open(image, "r+") as raster:
            raster.write(raster.read(1), 1)
        log_step(journal, line)

    monkeypatch.setattr(Journal, "step", write_then_log)
    config.run.output = str(tmp_path / "other")
    assert run(config) == 0
    assert f"warning: {image} {said}" in capfd.readouterr().err
    (note,) = json.loads((tmp_path / "other" / "summary.json").read_text())["warnings"]
    assert note.startswith(f"{image} {said}")
    assert ("train anew" in note) == (key == "images"), "validation trains nothing"


def test_the_end_of_the_job_is_kept_clear_by_two_of_the_longest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(trainer.time, "time", lambda: now[0])
    monkeypatch.setattr(trainer, "is_met", lambda: False)
    flag, seen = StopFlag(end=1200), []
    for step in (10, 40, 10, 10, 10, 10):
        seen.append(flag.is_set)
        now[0] += step
    # Asked at 0, 10, 50, 60, 70, 80 of 200 seconds: two steps of 40 and 30 spare leave those up to 90.
    assert seen == [False] * 6
    now[0] = 1091
    assert flag.is_set
    assert not StopFlag().is_set, "nobody says when the job ends"


def test_who_says_when_the_job_ends() -> None:
    assert end_of_job({}) is None
    assert end_of_job({"SLURM_JOB_END_TIME": "1700000000"}) == 1.7e9
    assert end_of_job({"SLURM_JOB_END_TIME": "1700000000", "TILEDSEG_END_TIME": "1600000000"}) == 1.6e9
    with pytest.raises(ConfigError, match="TILEDSEG_END_TIME is 'soon'; give Unix seconds"):
        end_of_job({"TILEDSEG_END_TIME": "soon"})
