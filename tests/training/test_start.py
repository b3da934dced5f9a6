"""What a run does before its first step: defaults, checks first, writes last; and that it ends in time."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio

from tests.answers import errors_of
from tests.crash.runs import Material
from tests.small_files import tree, write_raster
from tiledseg.architecture.unet import UNet
from tiledseg.comm.mesh import ALONE
from tiledseg.commands.options import to_yaml
from tiledseg.config.run import Config
from tiledseg.errors import ConfigError, InputError
from tiledseg.geometry.halo import network_footprint
from tiledseg.planning.run.grid import usual_grids
from tiledseg.training import trainer
from tiledseg.training.preparation import Preparation
from tiledseg.training.run_journal import Journal
from tiledseg.training.start import few_steps, idle_ranks, start
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

    monkeypatch.setattr("tiledseg.training.start.Survey", fail)
    with pytest.raises(InputError, match="found at last"):
        run(config_of(material, tmp_path / "run"))
    assert tree(tmp_path) == {}


@pytest.mark.parametrize("key", ["images", "val_images"])
def test_a_raster_that_is_written_to_in_mid_run_is_said(
    material: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    config, said = config_of(material, tmp_path / "run"), "was written to while the run read it"
    config.run.verbosity = 1
    image, named = tmp_path / "image.tif", config.data.images
    first, others = (named, []) if isinstance(named, str) else (named[0], named[1:])
    shutil.copy(first, image)
    setattr(config.data, key, [str(image), *others])
    config.data.val_labels = config.data.labels if key == "val_images" else config.data.val_labels
    assert said not in errors_of(lambda: run(config))
    log_step = Journal.step

    def write_then_log(journal: Journal, line: dict[str, Any]) -> None:
        with rasterio.open(image, "r+") as raster:
            raster.write(raster.read(1), 1)
        log_step(journal, line)

    monkeypatch.setattr(Journal, "step", write_then_log)
    config.run.output = str(tmp_path / "other")
    assert f"warning: {image} {said}" in errors_of(lambda: run(config))
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


SIDE = 600


@pytest.fixture
def unsaid(material: Material, tmp_path: Path) -> Config:
    """A network and an image, nothing else."""
    write_raster(tmp_path / "large.tif", np.zeros((3, SIDE, SIDE), np.uint8))
    write_raster(tmp_path / "large-labels.tif", np.zeros((1, SIDE, SIDE), np.uint8))
    config = config_of(material, tmp_path / "run")
    plain = Config()
    config.train, config.tiling = plain.train, plain.tiling
    config.data = replace(plain.data, classes=3)
    config.data.images, config.data.labels = str(tmp_path / "large.tif"), str(tmp_path / "large-labels.tif")
    return config


def test_tiles_follow_from_the_halo_and_from_how_many_there_are() -> None:
    """8 halos, or 512 px; half of it for one image."""
    wide = network_footprint(UNet(levels=5, convs_per_level=2, base_channels=8).graph())
    narrow = network_footprint(UNet(levels=2, convs_per_level=1, base_channels=8).graph())
    assert wide.before == 96
    assert usual_grids([(10_000, 10_000)] * 100, wide) == [(13, 13)] * 100
    assert usual_grids([(10_000, 10_000)] * 100, narrow) == [(20, 20)] * 100
    assert usual_grids([(1536, 1536), (1024, 500)], narrow) == [(6, 6), (4, 2)]
    assert usual_grids([(1536, 1536)], wide) == [(4, 4)]
    assert usual_grids([(40, 300)], narrow) == [(1, 1)]


def steps_of(prepared: Preparation) -> tuple[list[tuple[int, int]], int | None, int, int]:
    grids = [tiling.grid for tiling in prepared.training.tilings]
    per_step = prepared.question.tiles_per_step
    return grids, per_step, prepared.sampler.steps_per_epoch, prepared.epochs


@pytest.mark.parametrize(("memory", "ranks"), [(1 << 32, 1), (1 << 28, 1), (1 << 32, 5)])
def test_ranks_and_memory_change_no_step(unsaid: Config, memory: int, ranks: int) -> None:
    prepared = Preparation(unsaid, memory, ranks)
    assert steps_of(prepared) == ([(2, 2)], 1, 4, 125)
    assert prepared.chosen
    assert not few_steps(prepared)


def test_idle_ranks_are_named_with_what_would_use_them(unsaid: Config) -> None:
    prepared = Preparation(unsaid, 1 << 32, 4)
    assert idle_ranks(prepared, 1) == ""
    assert idle_ranks(prepared, 4) == (
        "3 of 4 ranks are idle: a step has 1 tile; give train.tiles_per_step 4, or start 1 rank"
    )
    whole = replace(unsaid, train=replace(unsaid.train, tiles_per_step=None), tiling=replace(unsaid.tiling, grid=1))
    assert "give a finer tiling.grid, or start 1 rank" in idle_ranks(Preparation(whole, 1 << 32, 4), 4)


def test_what_is_said_stays(unsaid: Config, tmp_path: Path) -> None:
    """A grid, whole images (null), windows, or a norm that sees the whole image: steps are as they were."""
    one = [(1, 1)], None, 1, 1
    said = {
        "grid": (replace(unsaid, tiling=replace(unsaid.tiling, grid=3)), ([(3, 3)], None, 1, 1)),
        "null": (replace(unsaid, train=replace(unsaid.train, tiles_per_step=None)), one),
        "norm": (replace(unsaid, model=replace(unsaid.model, norm="instance")), one),
        "halo": (replace(unsaid, parallel=replace(unsaid.parallel, halo="layer")), one),
    }
    for name, (config, expected) in said.items():
        prepared = Preparation(config, 1 << 32, 1)
        assert (name, steps_of(prepared), prepared.chosen) == (name, expected, False)
    epochs = replace(unsaid, train=replace(unsaid.train, epochs=2))
    assert steps_of(Preparation(epochs, 1 << 32, 1)) == ([(2, 2)], 1, 4, 2)
    for name, bands in (("large", 3), ("large-labels", 1)):  # one small image
        write_raster(tmp_path / f"{name}.tif", np.zeros((bands, 96, 96), np.uint8))
    prepared = Preparation(unsaid, 1 << 32, 1)
    assert (steps_of(prepared), prepared.chosen) == (([(1, 1)], None, 1, 500), True)


def test_a_run_says_what_it_wrote_and_that_nothing_is_left(material: Material, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = config_of(material, folder, best="mean_iou")
    config.run.verbosity = 1
    said = errors_of(lambda: run(config)).splitlines()
    best = json.loads((folder / "summary.json").read_text())["best"]
    where = f"{folder}/checkpoints/step-000003"
    assert said[-1] == (f"wrote checkpoint {where}, best {where} (mean_iou {best['value']:.4f})")
    assert not [line for line in said if "nothing to do" in line]
    assert [line for line in said if line.startswith("warning: the run has 3 steps in all")]
    before = tree(folder)
    config.optimizer.lr *= 3
    words = "nothing to do: 3 steps, 1 epoch, are done; give train.epochs above 1 to go on, or another run.output\n"
    assert errors_of(lambda: run(config)) == words
    assert tree(folder) == before, "no step ran with the other rate"
    (folder / "summary.json").unlink()  # a run that was killed before its summary ends again
    assert run(config) == 0
    assert json.loads((folder / "summary.json").read_text())["finished"]


@pytest.mark.parametrize("ended", ["done", "killed"])
def test_the_wall_time_is_that_of_all_starts(material: Material, tmp_path: Path, ended: str) -> None:
    """Of a start that was killed as long as it wrote."""
    folder = tmp_path / "run"
    assert run(config_of(material, folder)) == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert json.loads((folder / "started.json").read_text())["seconds_before"] == 0
    if ended == "done":
        (folder / "summary.json").write_text(json.dumps({**summary, "seconds": 1000.0}))
    else:
        (folder / "summary.json").unlink()
        written = (folder / "metrics.jsonl").stat().st_mtime + 1000
        os.utime(folder / "metrics.jsonl", (written, written))
    config = config_of(material, folder)
    config.train.epochs = 2
    assert run(config) == 0
    before = json.loads((folder / "started.json").read_text())["seconds_before"]
    assert 1000 <= before < json.loads((folder / "summary.json").read_text())["seconds"] < 1300
