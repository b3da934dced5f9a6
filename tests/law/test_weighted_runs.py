"""Whole runs with weights of classes that all ranks count, and a loss of ratios: the loss lines of one rank."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import rasterio
import torch
from safetensors.torch import load_file

from tests.law.test_training_steps import alone, configuration, losses, run
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.comm.mesh import Mesh
from tiledseg.config.run import Config, ParallelConfig, RunConfig

pytestmark = pytest.mark.usefixtures("without_plots")
STEPS = 4


def weighted(shared: Path, output: Path, epochs: int = STEPS) -> Config:
    config = configuration(shared, output, "fp64", "sgd", None)
    train = replace(
        config.train,
        epochs=epochs,
        validate_every=2,
        loss={
            "cross_entropy": {"smoothing": 0.1},
            "focal": 0.5,
            "dice": 1.0,
            "boundary": {"weight": 0.1, "radius": 5},
        },
        class_weights="median_frequency",
        ema=0.9,
        best="mean_f1",
    )
    return replace(config, train=train, optimizer=replace(config.optimizer, policy="constant", warmup_steps=0))


def counted(shared: Path) -> list[float]:
    """By hand, of the one image: pixels that are valid in the image too."""
    with rasterio.open(shared / "image.tif") as image, rasterio.open(shared / "labels.tif") as labels:
        found = labels.read(1)[(image.read_masks() > 0).any(0)]
    frequencies = [float(np.mean(found == k)) for k in range(3)]
    return [sorted(frequencies)[1] / frequency for frequency in frequencies]


@pytest.fixture(scope="module")
def reference(meshes: dict[str, Mesh], shared: Path) -> list[dict]:
    return meshes["gloo"].on_root(lambda: run(weighted(shared, shared / "weighted-one"), alone()))


@pytest.mark.mpi
@pytest.mark.parametrize(
    "how",
    [
        pytest.param("read", marks=pytest.mark.ranks(1, 3)),
        pytest.param("layer", marks=pytest.mark.ranks(2, 4)),
        pytest.param("stages", marks=pytest.mark.ranks(2, 4)),
    ],
)
def test_a_run_that_is_resumed_has_the_loss_lines_of_one_rank(
    how: str, shared: Path, reference: list[dict], meshes: dict[str, Mesh]
) -> None:
    """The second half has the weights that the first has counted; the labels are not looked at again. The average of
    the weights, by which the runs validate, goes on too."""
    mesh, folder = meshes["gloo"], shared / f"weighted-{how}"
    parallel = ParallelConfig(stages=min(mesh.size, 2)) if how == "stages" else ParallelConfig(halo=how)
    for epochs in (STEPS // 2, STEPS):
        config = replace(weighted(shared, folder, epochs), parallel=parallel)
        found = run(replace(config, run=RunConfig(str(folder), 0)), mesh)
    assert losses(found) == pytest.approx(losses(reference), rel=1e-10)
    assert len(losses(found)) == STEPS
    assert losses(found)[-1] < losses(found)[0]
    checks = [[line["val"]["loss"] for line in lines if "val" in line] for lines in (found, reference)]
    assert checks[0] == pytest.approx(checks[1], rel=1e-10)
    check_kept(folder, shared / "weighted-one", checks[0])
    expected = counted(shared)
    assert find_checkpoint(folder).saved.class_weights == pytest.approx(expected, rel=1e-14)
    assert json.loads((folder / "summary.json").read_text())["class_weights"] == pytest.approx(expected, rel=1e-14)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("how", ["windows", "batch"])
def test_a_loss_of_ratios_over_windows_and_batches_of_tiles(how: str, shared: Path, meshes: dict[str, Mesh]) -> None:
    """A rank that has several goes forward twice, one that has one window does not."""
    config = weighted(shared, shared / f"ratios-{how}", 2)
    windows = replace(config.train, sampling="windows", window=16, windows_per_step=2 * meshes["gloo"].size - 1)
    train = windows if how == "windows" else replace(config.train, tiles_per_batch=3)
    found = run(replace(config, train=train), meshes["gloo"])
    one = replace(config, run=RunConfig(str(shared / f"ratios-{how}-one"), 0), train=replace(train, tiles_per_batch=1))
    expected = meshes["gloo"].on_root(lambda: run(one, alone()))
    assert len(losses(found)) >= 2
    assert losses(found) == pytest.approx(losses(expected), rel=1e-10)


def impatient(shared: Path, name: str, score: str) -> Config:
    """A rate with which the validation gets worse now and then; a plateau where nothing is learned."""
    config = configuration(shared, shared / name, "fp64", "sgd", None)
    train = replace(config.train, epochs=12, validate_every=1, best=score, early_stop=2)
    rate = 1e-30 if score == "loss" else 0.3
    return replace(config, train=train, optimizer=replace(config.optimizer, lr=rate, policy="constant", warmup_steps=0))


@pytest.mark.mpi
@pytest.mark.parametrize(("score", "hows"), [("loss", ["layer"]), ("mean_iou", ["read", "layer", "stages"])])
def test_a_run_ends_early_after_the_same_epoch(
    score: str, hows: list[str], shared: Path, meshes: dict[str, Mesh]
) -> None:
    mesh = meshes["gloo"]

    def ended(name: str, parallel: ParallelConfig, on: Mesh) -> dict:
        run(replace(impatient(shared, name, score), parallel=parallel), on)
        on.communicator.barrier()
        told = json.loads((shared / name / "summary.json").read_text())
        return {key: told[key] for key in ("steps", "epochs", "stopped_early", "finished")} | told["best"]

    wanted = mesh.on_root(lambda: ended(f"early-{score}", ParallelConfig(), alone()))
    assert wanted["stopped_early"]
    assert 2 < wanted["epochs"] < 12 or score == "loss"
    for how in hows:
        parallel = (
            ParallelConfig(stages=min(mesh.size, 2), idle_ranks=mesh.size > 2)
            if how == "stages"
            else ParallelConfig(halo=how)
        )
        found = ended(f"early-{score}-{how}", parallel, mesh)
        assert found == {**wanted, "value": pytest.approx(wanted["value"], rel=1e-9)}


def check_kept(folder: Path, alone: Path, validations: list[float]) -> None:
    """The averaged weights of one rank, and the best checkpoint that the validations name."""
    found, expected = find_checkpoint(folder), find_checkpoint(alone)
    mine, theirs = (load_file(checkpoint.path / "average.safetensors") for checkpoint in (found, expected))
    assert mine.keys() == theirs.keys() == load_file(found.path / "model.safetensors").keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(mine[name], tensor, rtol=1e-9, atol=1e-12)
    assert found.saved.best is not None is not expected.saved.best
    assert found.saved.best.step == expected.saved.best.step == find_checkpoint(folder, "best").saved.step
    assert found.saved.best.value == pytest.approx(expected.saved.best.value, rel=1e-9)
    assert len(validations) == STEPS // 2
