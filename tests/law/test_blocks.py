"""The law for blocks of an image on one rank: losses, gradients, buffers and outputs of the whole image, norms over it
included, for all our networks and every layer; and on tiles, on as many ranks as the job has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.law.cases import Case, relative
from tests.law.every_layer import EveryLayer, ForeignLayers
from tests.law.test_halo_modes import Setting, alone, difference, one_rank, outputs, steps, undivided_setting, unet
from tests.law.test_losses import LOSSES
from tests.law.test_losses import unet as unet_of_losses
from tests.law.test_networks import EDGES, Short, gated, residual, segnet
from tiledseg.comm.mesh import Mesh
from tiledseg.config.run import ParallelConfig
from tiledseg.planning.run.spread import Spread
from tiledseg.training.losses.objective import Objective


@dataclass(frozen=True)
class InBlocks:
    """A network on an image of one tile, unless `grid` says otherwise, in `blocks`."""

    network: Any
    blocks: tuple[int, int] = (2, 3)
    objective: Objective | None = None
    grid: tuple[int, int] = (1, 1)
    kind: type[Case] = Case
    halo: str = "read"

    @property
    def setting(self) -> Setting:
        return Setting(self.kind(self.network, self.grid), ParallelConfig(halo=self.halo))


CASES = {
    "unet-none": InBlocks(unet("same", "transposed")),
    "unet-batch": InBlocks(unet("same", "bilinear", "batch"), (3, 1)),
    "unet-group": InBlocks(unet("same", "nearest", "group"), (1, 2)),
    "unet-instance": InBlocks(unet("same", "transposed", "instance"), (4, 3)),
    "valid-instance": InBlocks(unet("valid", "bilinear", "instance"), (2, 2)),
    "segnet-batch": InBlocks(segnet("batch"), (3, 2), kind=Short),
    "residual-batch": InBlocks(residual("batch"), (3, 2), kind=Short),
    "residual50-group": InBlocks(residual("group", "resnet50", "bilinear"), (2, 1), kind=Short),
    "gated-batch": InBlocks(gated("batch", True), (2, 2), EDGES, kind=Short),
    "every-layer": InBlocks(EveryLayer(True), (3, 2)),
    "foreign-layers": InBlocks(ForeignLayers(True), (2, 3)),
    "ratios": InBlocks(unet_of_losses("batch"), (2, 2), LOSSES["both"][0]),
}
TILES = {
    "tiles": InBlocks(unet("same", "bilinear"), (2, 2), grid=(2, 2)),
    "places": InBlocks(ForeignLayers(), (2, 2), grid=(2, 2)),
    "ratios": InBlocks(unet_of_losses("none"), (2, 1), LOSSES["both"][0], grid=(2, 2)),
}


LAYER = {  # more in tests/spatial/blocks/test_block_network.py, where ranks are threads
    "unet-instance": InBlocks(unet("same", "transposed", "instance"), (1, 2), grid=(8, 4), halo="layer"),
    "every-layer": InBlocks(EveryLayer(True), (2, 2), grid=(4, 2), halo="layer"),
    "ratios": InBlocks(unet_of_losses("batch"), (2, 1), LOSSES["both"][0], (4, 2), halo="layer"),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_and_outputs_are_those_of_the_whole_image(name: str) -> None:
    torch.set_num_threads(1)
    check(CASES[name], one_rank())


@pytest.mark.mpi
@pytest.mark.parametrize("name", TILES)
def test_tiles_in_blocks_are_those_of_the_whole_image(name: str, meshes: dict[str, Mesh]) -> None:
    torch.set_num_threads(1)
    check(TILES[name], meshes["mpi"])


@pytest.mark.mpi
@pytest.mark.parametrize("name", LAYER)
def test_ranks_share_an_image_in_blocks(name: str, meshes: dict[str, Mesh]) -> None:
    """Each has several blocks of its own; halos and statistics of the others' come between segments."""
    torch.set_num_threads(1)
    check(LAYER[name], meshes["mpi"])


def check(case: InBlocks, mesh: Mesh) -> None:
    """Two steps, so that running statistics have moved twice; the second at the weights of the first."""
    setting = case.setting
    spread = setting.plan(mesh.size)
    found = steps(setting, spread, mesh, 2, 0.0, case.objective, case.blocks)
    expected = mesh.on_root(lambda: alone(setting, 2, 0.0, case.objective))
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)
    assert difference(found.gradients, expected.gradients) < 1e-12
    assert difference(found.state, expected.state) < 1e-12
    found_KHW = outputs(setting, spread, mesh, case.blocks)
    expected_KHW = mesh.on_root(lambda: outputs(undivided_setting(setting), Spread(), one_rank()))
    assert relative(found_KHW, expected_KHW) < 1e-12


def test_one_block_is_the_whole_image_to_the_last_bit() -> None:
    """Norms included: no node is in two segments then."""
    torch.set_num_threads(1)
    setting = CASES["unet-instance"].setting
    found, expected = steps(setting, Spread(), one_rank(), 2, 0.01, blocks=(1, 1)), alone(setting, 2, 0.01)
    assert found.losses == expected.losses
    for key, tensor in expected.state.items():
        assert torch.equal(found.state[key], tensor), key


def test_blocks_in_a_file_are_those_in_memory_to_the_last_bit(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    case = CASES["unet-instance"]
    found, expected = (
        steps(case.setting, Spread(), one_rank(), 2, 0.01, blocks=case.blocks, store=store)
        for store in (str(tmp_path), "host")
    )
    assert found.losses == expected.losses
    for key, tensor in expected.state.items():
        assert torch.equal(found.state[key], tensor), key
    assert not list(tmp_path.iterdir()), "the file has no name"
