"""What a run does before its first step: checks first, writes last."""

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
from tiledseg.errors import InputError
from tiledseg.training.run_journal import Journal
from tiledseg.training.start import start


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
