"""The halo modes through the commands' own code: one configuration, one loss line, one map, whatever the mode."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import rasterio
import torch

from tests.law.test_training_steps import FEW, alone, configuration, losses, run
from tests.law.validations import check_validations
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.comm.mesh import Mesh
from tiledseg.commands.options import to_yaml
from tiledseg.config.run import Config, ParallelConfig, RunConfig, TrainConfig
from tiledseg.inference.mapper import checkpoint_mapper
from tiledseg.inference.predictor import Request, predict
from tiledseg.planning.run.parallelism import parallelism
from tiledseg.training.start import start

pytestmark = pytest.mark.usefixtures("small_views", "without_plots")
MODES = {
    "exchange": ParallelConfig(halo="exchange"),
    "layer": ParallelConfig(halo="layer"),
    "fused": ParallelConfig(halo="layer", fusion=3),
}


def in_mode(config: Config, mode: str, output: Path) -> Config:
    return replace(config, parallel=MODES[mode], run=RunConfig(output=str(output), verbosity=0))


@pytest.fixture(scope="module")
def reference(meshes: dict[str, Mesh], shared: Path) -> list[dict]:
    """The metrics of the run in mode read on one rank."""
    config = configuration(shared, shared / "read", "fp64", "adamw", None)
    return meshes["gloo"].on_root(lambda: run(config, alone()))


@pytest.mark.mpi
@pytest.mark.parametrize(
    "mode",
    [pytest.param(mode, marks=pytest.mark.ranks(2, 4) if mode in ("exchange", "fused") else ()) for mode in MODES],
)
def test_steps_and_validations_are_those_of_mode_read(
    mode: str, shared: Path, reference: list[dict], meshes: dict[str, Mesh]
) -> None:
    config = in_mode(configuration(shared, Path("unused"), "fp64", "adamw", None), mode, shared / mode)
    found = run(config, meshes["mpi" if mode == "layer" else "gloo"])
    assert losses(found) == pytest.approx(losses(reference), rel=1e-10)
    assert len(losses(found)) == FEW
    for mine, theirs in zip(found, reference, strict=True):
        if "val" in mine:
            assert mine["val"]["loss"] == pytest.approx(theirs["val"]["loss"], rel=1e-10)
            assert mine["val"]["mean_iou"] == pytest.approx(theirs["val"]["mean_iou"], abs=1e-12)
    check_validations(shared / mode, shared / "read")


@pytest.mark.mpi
@pytest.mark.ranks(2, 4)
def test_a_run_stopped_in_one_mode_goes_on_in_another(
    shared: Path, reference: list[dict], meshes: dict[str, Mesh]
) -> None:
    mesh = meshes["gloo"]
    whole = configuration(shared, Path("unused"), "fp64", "adamw", None)
    train: TrainConfig = whole.train
    first = in_mode(replace(whole, train=replace(train, epochs=5)), "layer", shared / "resumed")
    # The policy counts the steps of the whole run: a constant rate makes the two halves those of one run.
    constant = replace(whole.optimizer, policy="constant", warmup_steps=0)
    assert start(replace(first, optimizer=constant), to_yaml(first), mesh) == 0
    mesh.communicator.barrier()
    second = in_mode(replace(whole, optimizer=constant), "exchange", shared / "resumed")
    found = run(second, mesh)
    undivided = replace(whole, optimizer=constant, run=RunConfig(output=str(shared / "constant"), verbosity=0))
    expected = mesh.on_root(lambda: run(undivided, alone()))
    assert losses(found) == pytest.approx(losses(expected), rel=1e-10)


@pytest.mark.mpi
def test_the_map_is_the_same_in_every_mode(shared: Path, reference: list[dict], meshes: dict[str, Mesh]) -> None:
    mesh = meshes["gloo"]
    checkpoint = mesh.on_root(lambda: find_checkpoint(str(shared / "read")))
    maps = {}
    for mode, parallel in {"read": ParallelConfig(), **MODES}.items():
        names = [str(shared / f"{mode}-{what}.tif") for what in ("classes", "probabilities")]
        asked = parallelism(parallel)
        request = Request(str(shared / "image.tif"), *names, grid=(3, 3), precision="fp64", parallel=asked, verbosity=0)
        predict(request, checkpoint_mapper(checkpoint), 1 << 30, mesh)
        mesh.communicator.barrier()
        with rasterio.open(names[0]) as classes, rasterio.open(names[1]) as probabilities:
            maps[mode] = classes.read(), probabilities.read()
    for mode in MODES:
        assert (maps[mode][0] == maps["read"][0]).all(), mode
        torch.testing.assert_close(*(torch.from_numpy(maps[m][1]) for m in (mode, "read")), equal_nan=True)


@pytest.mark.mpi
@pytest.mark.parametrize("mode", [pytest.param("exchange", marks=pytest.mark.ranks(3, 4)), "layer"])
def test_several_images_a_step_are_spread_over_replicas(mode: str, shared: Path, meshes: dict[str, Mesh]) -> None:
    """Three images, two a step: with ranks for two replicas each takes one, and the last step has one image."""
    mesh = meshes["mpi"]
    config = configuration(shared, Path("unused"), "fp64", "sgd", None)
    names = {what: [str(shared / f"{what}-{i}.tif") for i in range(3)] for what in ("image", "labels")}
    mesh.on_root(
        lambda: [shutil.copy(shared / f"{w}.tif", path) for w, paths in names.items() for path in paths] and None
    )
    data = replace(config.data, images=names["image"], labels=names["labels"])
    train = replace(config.train, epochs=3, images_per_step=2)
    config = replace(config, data=data, train=train)
    if mesh.size > 1:
        config = replace(config, tiling=replace(config.tiling, grid=[3, 1]))
    found = run(in_mode(config, mode, shared / f"replicas-{mode}"), mesh)
    read = replace(config, run=RunConfig(output=str(shared / f"replicas-{mode}-read"), verbosity=0))
    expected = mesh.on_root(lambda: run(read, alone()))
    assert len(losses(expected)) == 6
    assert losses(found) == pytest.approx(losses(expected), rel=1e-10)
