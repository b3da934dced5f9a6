"""A rank is killed or signalled in training or mapping: the job ends soon, and goes on as if nothing had been."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.comm.launching import needs_mpirun
from tests.crash.runs import STEPS, Material, Moment, lines, train
from tests.law.runs import check_same_run
from tiledseg.checkpoint.folder import find_checkpoint, newest_checkpoint
from tiledseg.geometry.box import Box
from tiledseg.predict import main
from tiledseg.raster.reader import open_raster

pytestmark = [needs_mpirun, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def uninterrupted(material: Material) -> Path:
    """A run, trained on two ranks, against which all interrupted ones are held."""
    folder = material.root / "uninterrupted"
    done = material.train(2, folder)
    assert done.code == 0, done.err
    assert (folder / "progress.png").exists()
    assert [line["step"] for line in lines(folder) if "loss" in line] == list(range(1, STEPS + 1))
    return folder


def newest_step(folder: Path) -> int:
    """The step of the checkpoint that a resume takes, which is also what `latest` leads to, or the one after."""
    newest = newest_checkpoint(folder / "checkpoints")
    assert newest is not None
    assert find_checkpoint(folder).saved.step <= newest.saved.step
    return newest.saved.step


def test_killed_in_a_step(material: Material, uninterrupted: Path) -> None:
    """Rank 1 of 2 dies in step 8 (its 10th tile): steps of 3, 3 and 2 tiles give it 1, 1 and 1, or 2, 1 and 1. On as
    many ranks the rest has the same bits; the tests below go on with one rank, in this process."""
    folder = material.root / "killed-in-step"
    done = material.train(2, folder, at=Moment("step", rank=1, count=10))
    assert done.code == 137
    at = newest_step(folder)
    assert 0 < at <= len([line for line in lines(folder) if "loss" in line]) < 12
    assert not (folder / "summary.json").exists()
    done = material.train(2, folder)
    assert done.code == 0, done.err
    check_same_run(folder, uninterrupted, 0.0)


def test_killed_in_a_checkpoint_of_two_and_resumed_on_one(material: Material, uninterrupted: Path) -> None:
    """Rank 0 of 2 dies with its third checkpoint written but not yet named."""
    folder = material.root / "killed-in-save"
    done = material.train(2, folder, at=Moment("save", rank=0, count=3))
    assert done.code == 137
    assert [path.name for path in (folder / "checkpoints").glob(".partial-*")] == [".partial-step-000006"]
    assert newest_step(folder) == 4
    assert train(material, folder) == 0
    check_same_run(folder, uninterrupted, 1e-10)
    assert not list((folder / "checkpoints").glob(".*"))


def test_stopped_by_a_wall_time_signal(material: Material, uninterrupted: Path) -> None:
    """SIGUSR1 to one rank: all stop after that step with its checkpoint and exit 75."""
    folder = material.root / "stopped"
    done = material.train(2, folder, at=Moment("step", rank=1, count=7, signal="USR1"))
    assert done.code == 75, done.err
    assert "error:" not in done.err
    stopped_at = lines(folder)[-1]["step"]
    assert newest_step(folder) == stopped_at < 12
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["finished"], summary["steps"]) == (False, stopped_at)
    assert train(material, folder) == 0
    check_same_run(folder, uninterrupted, 1e-10)
    assert json.loads((folder / "summary.json").read_text())["finished"] is True


def test_killed_while_neighbours_wait_for_its_halos(material: Material) -> None:
    """In mode layer rank 1 of 2 dies before its backward pass, in which rank 0 waits for its halos."""
    options = ("--train.tiles_per_step", "null", "--parallel.halo", "layer")
    whole, folder = material.root / "layer-whole", material.root / "layer-killed"
    assert train(material, whole, *options) == 0
    done = material.train(2, folder, *options, at=Moment("step", rank=1, count=6))
    assert done.code == 137
    assert 0 < newest_step(folder) <= 4, "of step 4 it may be under way"
    assert train(material, folder, *options) == 0
    check_same_run(folder, whole, 1e-10)


@pytest.fixture(scope="module")
def whole_map(material: Material, uninterrupted: Path) -> bytes:
    """The map by one rank that nobody interrupts."""
    output = material.root / "whole.tif"
    assert main(material.predict_command(uninterrupted, output)[1:]) == 0
    return output.read_bytes()


@pytest.mark.parametrize(
    ("ranks", "at", "older"),
    [(2, Moment("map", rank=1, count=5), None), (1, Moment("publication"), b"an older map")],
    ids=["among-the-tiles", "before-it-gets-its-name"],
)
def test_killed_in_a_map(
    material: Material, uninterrupted: Path, whole_map: bytes, ranks: int, at: Moment, older: bytes | None
) -> None:
    """An older map of that name stays as it was."""
    output = material.root / f"killed-{ranks}.tif"
    if older is not None:
        output.write_bytes(older)
    assert material.predict(ranks, uninterrupted, output, at=at).code == 137
    assert (output.read_bytes() if output.exists() else None) == older
    assert main(material.predict_command(uninterrupted, output)[1:]) == 0
    assert output.read_bytes() == whole_map
    assert not list(material.root.glob(".killed*"))


def test_killed_among_the_chunks_of_a_store(material: Material, uninterrupted: Path, whole_map: bytes) -> None:
    output, options = material.root / "killed.zarr", ("--format", "zarr")
    done = material.predict(1, uninterrupted, output, *options, at=Moment("chunk"))
    assert done.code == 137
    assert not output.exists()
    assert main([*material.predict_command(uninterrupted, output)[1:], *options]) == 0
    with open_raster(output) as found, open_raster(material.root / "whole.tif") as expected:
        box = Box.of_shape(expected.info.shape)
        assert np.array_equal(found.read(box)[0], expected.read(box)[0])
    assert not list(material.root.glob(".killed*"))
