"""A checkpoint that one rank reads for all: the bits of a file that each reads by itself."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.saved import make_network, save, seal, train
from tests.opens import opens
from tiledseg.checkpoint.folder import AVERAGE, MODEL, OPTIMIZER, Checkpoint, find_checkpoint
from tiledseg.checkpoint.loading import load_average, load_network, load_optimizer
from tiledseg.comm.mesh import Mesh
from tiledseg.config.run import OptimizerConfig
from tiledseg.errors import CheckpointError
from tiledseg.inference.trained import checkpoint_mapper
from tiledseg.training.optimizer import build_optimizer

FILES = (MODEL, OPTIMIZER, AVERAGE)


@pytest.fixture(scope="module")
def saved(meshes: dict[str, Mesh], tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """With an average of its weights, on all ranks."""
    folder = tmp_path_factory.mktemp("loading")

    def write() -> Checkpoint:
        path = save(folder, 3)
        weights = load_file(path / MODEL)
        save_file({name: tensor + tensor.ne(0) for name, tensor in weights.items()}, path / AVERAGE)
        seal(path, lambda manifest: None)
        return find_checkpoint(path)

    return meshes["gloo"].on_root(write)


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("transport", ["gloo", "mpi"])
def test_all_ranks_hold_the_file_that_one_has_opened_once(
    transport: str, saved: Checkpoint, meshes: dict[str, Mesh]
) -> None:
    mesh = meshes[transport]
    network = make_network(seed=mesh.rank + 5)
    optimizer = build_optimizer(network.parameters(), OptimizerConfig())
    train(network, optimizer, 1 + mesh.rank)  # on each rank other values, which the file's replace
    average: dict[str, torch.Tensor] = {}

    def load() -> None:
        load_network(saved, network, mesh=mesh)
        load_optimizer(saved, optimizer, mesh)
        average.update(load_average(saved, mesh))
        average.update({f"built {k}": v for k, v in checkpoint_mapper(saved).build(mesh).state_dict().items()})

    counted = opens(saved.path, load)
    assert counted == ({MODEL: 1, OPTIMIZER: 1, AVERAGE: 2} if mesh.is_root else {})
    weights, state, averages = (load_file(saved.path / name) for name in FILES)
    held = {f"{k}.{n}": v for k, p in enumerate(network.parameters()) for n, v in optimizer.state[p].items()}
    assert held.keys() == state.keys()
    assert not any(torch.equal(weights[name], averages[name]) for name in weights if name.endswith("weight"))
    assert average.keys() == averages.keys() | {f"built {name}" for name in averages}
    for name, tensor in averages.items():
        assert torch.equal(average[name], tensor), name
        assert torch.equal(average[f"built {name}"], tensor), name
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    for name, tensor in state.items():
        assert torch.equal(held[name], tensor), name


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 4)
def test_a_file_that_the_root_cannot_read_is_raised_on_all(
    saved: Checkpoint, meshes: dict[str, Mesh], tmp_path: Path
) -> None:
    """Before anything comes: nobody waits for it. The others could read theirs, and do not look."""
    mesh = meshes["gloo"]
    path = tmp_path / saved.path.name
    shutil.copytree(saved.path, path)
    own = Checkpoint(path, saved.saved, averages=True)
    if mesh.is_root:
        (path / MODEL).unlink()
        (path / OPTIMIZER).write_bytes(b"cut")
    network = make_network()
    optimizer = build_optimizer(network.parameters(), OptimizerConfig())
    with pytest.raises(CheckpointError, match=rf"{MODEL} was whole and cannot be read any more \(No such file"):
        load_network(own, network, mesh=mesh)
    with pytest.raises(CheckpointError, match=rf"{OPTIMIZER} was whole and cannot be read any more"):
        load_optimizer(own, optimizer, mesh)


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 4)
def test_a_network_that_fits_on_all_ranks_but_one_is_refused_on_all(saved: Checkpoint, meshes: dict[str, Mesh]) -> None:
    mesh = meshes["gloo"]
    other = mesh.rank == mesh.size - 1
    with pytest.raises(CheckpointError, match="is of another model"):
        load_network(saved, make_network(channels=4 if other else 3), mesh=mesh)
    network = make_network()
    asked = OptimizerConfig(name="sgd" if other else "adamw")
    with pytest.raises(CheckpointError, match="the state of another optimizer"):
        load_optimizer(saved, build_optimizer(network.parameters(), asked), mesh)
