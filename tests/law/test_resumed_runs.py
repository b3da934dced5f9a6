"""The law over a resume: what may change changes the losses on no number of ranks, and a changed run is one run."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.law.test_training_steps import alone, configuration, losses, run
from tests.opens import opens
from tiledseg.architecture.unet import UNet
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.comm.mesh import Mesh
from tiledseg.config.run import Config, ParallelConfig, TilingConfig
from tiledseg.errors import TiledsegError
from tiledseg.execution.agreement import check_finite
from tiledseg.models.network import build_modules
from tiledseg.training.steps.optimizer import build_optimizer

pytestmark = pytest.mark.usefixtures("without_plots")


def six_epochs(shared: Path, output: str) -> Config:
    config = configuration(shared, shared / output, "fp64", "adamw", None)
    train = replace(config.train, epochs=6, validate_every=9)
    return replace(config, train=train, optimizer=replace(config.optimizer, policy="constant"))


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 4)
def test_all_that_the_law_leaves_free_changes_no_loss(shared: Path, meshes: dict[str, Mesh]) -> None:
    """Three epochs in one way, three in another: grid, halo, halo mode, stages, workers, transport."""
    whole = six_epochs(shared, "never-stopped")
    expected = meshes["gloo"].on_root(lambda: run(whole, alone()))
    first = six_epochs(shared, "changed")
    assert run(replace(first, train=replace(first.train, epochs=3)), meshes["mpi"])[-1]["step"] == 3
    several = meshes["gloo"].size > 1
    onward = replace(
        first,
        data=replace(first.data, workers=1, prefetch=3),
        tiling=TilingConfig(grid=4, halo=24),
        parallel=ParallelConfig(halo="layer" if several else "read"),
    )
    assert losses(run(replace(onward, train=replace(onward.train, epochs=5)), meshes["gloo"]))[:5] == pytest.approx(
        losses(expected)[:5], rel=1e-10
    )
    staged = replace(onward, parallel=ParallelConfig(stages=2 if several and meshes["gloo"].size % 2 == 0 else 1))
    assert losses(run(staged, meshes["gloo"])) == pytest.approx(losses(expected), rel=1e-10)
    recorded = find_checkpoint(shared / "changed").saved.resumed
    assert [entry.step for entry in recorded][:2] == [3, 5]
    assert {"data.workers", "data.prefetch", "tiling.grid", "tiling.halo"} <= recorded[0].changed.keys()


@pytest.mark.mpi
@pytest.mark.ranks(2, 4)
def test_a_checkpoint_is_read_as_often_as_by_one_rank(shared: Path, meshes: dict[str, Mesh]) -> None:
    """Each of its files, by all ranks together; the losses are those of a run never stopped, to the last bit."""
    mesh = meshes["gloo"]

    def averaged(output: str, epochs: int) -> Config:
        config = six_epochs(shared, output)
        return replace(config, train=replace(config.train, epochs=epochs, ema=0.9, keep_checkpoints=9))

    run(averaged("read", 2), mesh)
    mesh.on_root(lambda: shutil.copytree(shared / "read", shared / "read-alone") and None)
    checkpoint = Path("checkpoints", "step-000002")
    by_one = mesh.on_root(
        lambda: opens(shared / "read-alone" / checkpoint, lambda: run(averaged("read-alone", 3), alone()))
    )
    found: list[dict] = []

    def resume() -> None:
        found[:] = run(averaged("read", 3), mesh)

    counted = mesh.communicator.gather_objects(opens(shared / "read" / checkpoint, resume))
    assert sum(counted, Counter()) == by_one
    assert min(by_one[f"{name}.safetensors"] for name in ("model", "optimizer", "average")) >= 1
    assert losses(found) == losses(run(averaged("read-through", 3), mesh))


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_a_run_that_got_more_images_is_that_of_one_rank(shared: Path, meshes: dict[str, Mesh]) -> None:
    """One image for two epochs, then two for eight, by a cosine: losses, rates and the end."""
    mesh = meshes["gloo"]
    names = ("image", "labels")
    mesh.on_root(lambda: [shutil.copy(shared / f"{n}.tif", shared / f"{n}-second.tif") for n in names] and None)

    def grown(output: str, on: Mesh) -> list[dict]:
        config = six_epochs(shared, output)
        config = replace(config, optimizer=replace(config.optimizer, policy="cosine", warmup_steps=3))
        run(replace(config, train=replace(config.train, epochs=2)), on)
        paths = {name: [str(shared / f"{name}{end}.tif") for end in ("", "-second")] for name in names}
        data = replace(config.data, images=paths["image"], labels=paths["labels"])
        return run(replace(config, data=data, train=replace(config.train, epochs=8)), on)

    expected = mesh.on_root(lambda: grown("grown-alone", alone()))
    found = grown("grown", mesh)
    assert losses(found) == pytest.approx(losses(expected), rel=1e-10)
    assert [(line["lr"], line["epoch"]) for line in found] == [(line["lr"], line["epoch"]) for line in expected]
    assert find_checkpoint(shared / "grown").saved.step == len(losses(found)) == 14


@pytest.mark.mpi
def test_all_ranks_agree_that_one_of_them_is_not_finite(meshes: dict[str, Mesh]) -> None:
    """Else that one would stop, and the others wait for it."""
    mesh = meshes["gloo"]
    network = build_modules(UNet(levels=1, base_channels=2), 0)
    optimizer = build_optimizer(network.parameters(), Config().optimizer)
    check_finite(network, optimizer, mesh, 4)
    if mesh.rank == mesh.size - 1:
        with torch.no_grad():
            next(network.parameters()).view(-1)[0] = float("inf")
    with pytest.raises(TiledsegError, match="is not finite after step 5; its checkpoint is not written"):
        check_finite(network, optimizer, mesh, 5)


@pytest.mark.mpi
@pytest.mark.ranks(2, 4)
def test_factors_of_the_rate_go_by_names_in_every_split(shared: Path, meshes: dict[str, Mesh]) -> None:
    """Three epochs on all ranks, three in stages, each of which holds a part of each group: the losses of one rank."""
    mesh = meshes["gloo"]

    def factored(output: str) -> Config:
        config = six_epochs(shared, output)
        factors = {"encoder*": 0.1, "*.bias": 2.0}
        asked = replace(config.optimizer, lr_factors=factors, decay_norms=False, weight_decay=0.1)
        return replace(config, optimizer=asked)

    expected = mesh.on_root(lambda: run(factored("factors-alone"), alone()))
    split = factored("factors")
    run(replace(split, train=replace(split.train, epochs=3)), mesh)
    staged = replace(split, parallel=ParallelConfig(stages=2 if mesh.size % 2 == 0 else 1))
    assert losses(run(staged, mesh)) == pytest.approx(losses(expected), rel=1e-10)
