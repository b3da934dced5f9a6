"""The law for a network that somebody's function builds: one configuration, one loss line, whatever the mode."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.foreign.modules import Somebody
from tests.law.test_training_steps import alone, configuration, losses, run
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.comm.mesh import Mesh
from tiledseg.config.run import Config, ModelConfig, ParallelConfig, RunConfig
from tiledseg.errors import ConfigError

EPOCHS = 5


def built(folder: Path, mode: str, parallel: ParallelConfig, norm: bool = False) -> Config:
    config = configuration(folder, folder / mode, "fp64", "adamw", None)
    model = ModelConfig(build="tests.foreign.modules:build", arguments={"width": 3, "norm": norm})
    train = replace(config.train, epochs=EPOCHS, validate_every=EPOCHS)
    return replace(config, model=model, train=train, parallel=parallel, run=RunConfig(str(folder / mode), 0))


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 4)
@pytest.mark.usefixtures("without_plots")
def test_losses_and_weights_are_those_of_one_rank(shared: Path, meshes: dict[str, Mesh]) -> None:
    mesh = meshes["gloo"]
    modes = {
        "read": ParallelConfig(),
        "exchange": ParallelConfig(halo="exchange"),
        "layer": ParallelConfig(halo="layer"),
    }
    if mesh.size > 1:
        modes["stages"] = ParallelConfig(stages=min(3, mesh.size), idle_ranks=mesh.size == 4)
    expected = losses(mesh.on_root(lambda: run(built(shared, "alone", ParallelConfig()), alone())))
    weights = load_file(find_checkpoint(shared / "alone").path / "model.safetensors")
    assert sorted(weights) == sorted(Somebody().state_dict())
    assert expected[-1] < expected[0]
    for mode, parallel in modes.items():
        assert losses(run(built(shared, mode, parallel), mesh)) == pytest.approx(expected, rel=1e-10), mode
        found = load_file(find_checkpoint(shared / mode).path / "model.safetensors")
        assert all((found[name] - weights[name]).abs().max() < 1e-9 for name in weights), mode


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 4)
@pytest.mark.usefixtures("without_plots")
def test_a_norm_over_the_image_is_that_of_one_rank(shared: Path, meshes: dict[str, Mesh]) -> None:
    layer = ParallelConfig(halo="layer")
    expected = losses(meshes["gloo"].on_root(lambda: run(built(shared, "alone-norm", layer, norm=True), alone())))
    found = losses(run(built(shared, "norm", layer, norm=True), meshes["gloo"]))
    assert found == pytest.approx(expected, rel=1e-10)


def still(folder: Path, name: str, grid: int, parallel: ParallelConfig) -> Config:
    config = built(folder, name, parallel)
    model = ModelConfig(build="tests.foreign.modules:build_measured", arguments={"width": 3}, freeze_norm=True)
    return replace(config, model=model, tiling=replace(config.tiling, grid=grid))


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.usefixtures("without_plots")
def test_norms_that_stand_still_are_those_of_whole_images(shared: Path, meshes: dict[str, Mesh]) -> None:
    """Tiles by `read` against one rank with one tile; all statistics are those that the module came with."""
    mesh = meshes["gloo"]
    alone_ = still(shared, "alone-still", 1, ParallelConfig())
    expected = losses(mesh.on_root(lambda: run(alone_, alone())))
    assert losses(run(still(shared, "still", 3, ParallelConfig()), mesh)) == pytest.approx(expected, rel=1e-10)
    one, other = (load_file(find_checkpoint(shared / n).path / "model.safetensors") for n in ("alone-still", "still"))
    moved = [key for key in one if "running" in key and not torch.equal(one[key], other[key])]
    assert moved == []
    assert int(other["stem.norm.num_batches_tracked"]) == 0


@pytest.mark.mpi
def test_weights_that_differ_between_ranks_are_refused_on_all(shared: Path, meshes: dict[str, Mesh]) -> None:
    mesh = meshes["gloo"]
    if mesh.size == 1:
        pytest.skip("one rank is like itself")
    config = built(shared, "differing", ParallelConfig())
    with pytest.raises(ConfigError, match="by_rank gives rank 1 other weights than rank 0"):
        run(replace(config, model=ModelConfig(build="tests.foreign.wrong:by_rank")), mesh)
    mesh.communicator.barrier()
    assert not (shared / "differing" / "checkpoints").exists()


@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.usefixtures("without_plots")
def test_a_network_that_is_not_its_graph_ends_on_all_ranks(shared: Path, meshes: dict[str, Mesh]) -> None:
    """In each mode; not where the check is switched off."""
    mesh = meshes["gloo"]
    modes = {"read": {}, "exchange": {"halo": "exchange"}, "layer": {"halo": "layer"}, "stages": {"stages": 2}}
    for mode, keys in modes.items():
        config = built(shared, f"sly-{mode}", ParallelConfig(**keys))
        config = replace(config, train=replace(config.train, epochs=1, validate_every=1))
        model = ModelConfig(build="tests.foreign.sly:in_training")
        with pytest.raises(ConfigError, match="SmallOnly computes in training what its graph does not"):
            run(replace(config, model=model), mesh)
        mesh.communicator.barrier()
    assert len(losses(run(replace(config, model=replace(model, verify=False)), mesh))) == 1
