"""The law for steps of several images in blocks, with a batch norm that learns: its statistics are of all their pixels.

Against all images whole, which go through the network together on one rank (`test_batch_norm` holds that against torch
alone): losses, gradients, weights and running statistics. Images differ in size, and so in their blocks; they are more
than ranks, as many, and fewer: the second step has one, and ranks without any take part in every sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.law.cases import IGNORED, KEY, ArrayReader, footprint_of, gradients
from tests.law.every_layer import EveryLayer
from tests.law.test_halo_modes import Run, difference, one_rank
from tests.law.test_losses import LOSSES
from tiledseg.architecture.unet import UNet
from tiledseg.comm.mesh import Mesh
from tiledseg.config.run import ParallelConfig
from tiledseg.execution.agreement import agree_on_buffers, check_agreement
from tiledseg.execution.parallel_run import ParallelRun
from tiledseg.execution.passes.part_passes import read_ahead
from tiledseg.geometry.tiling import Tiling, make_tiling
from tiledseg.memory.mover import HOST
from tiledseg.models.frozen import freeze
from tiledseg.models.network import GraphNetwork, build_modules
from tiledseg.planning.run.parallelism import parallelism
from tiledseg.planning.run.spread import choose_spread
from tiledseg.raster.labels.label_map import LabelMap
from tiledseg.raster.samples.dataset import Dataset
from tiledseg.raster.samples.sampling import TileReference
from tiledseg.raster.statistics import Normalization
from tiledseg.training.steps.step import Stepper, StepRules

STEPS = ((0, 1, 2, 3, 4), (1,))
UNITS = ((6, 3), (4, 5), (4, 3), (5, 4), (4, 3))  # of images, rows and columns, in the network's alignment


@dataclass(frozen=True)
class Steps:
    """A network, and how it learns."""

    network: Any
    momentum: float | None = 0.1
    frozen: Mapping[str, float] = field(default_factory=dict)
    loss: str | None = None

    def __hash__(self) -> int:
        return hash(repr(self))

    def tilings(self, grid: tuple[int, int]) -> list[Tiling]:
        footprint = footprint_of(self.network)
        unit = footprint.alignment
        return [make_tiling((rows * unit + 1, cols * unit + 3), grid, footprint) for rows, cols in UNITS]

    def dataset(self, grid: tuple[int, int]) -> Dataset:
        draw, tilings, bands = np.random.default_rng(5), self.tilings(grid), self.network.bands
        images = [draw.normal(1.0, 2.0, (bands, *tiling.raster)) for tiling in tilings]
        labels = [draw.integers(0, self.network.classes, (1, *t.raster)).astype(np.uint8) for t in tilings]
        labels[3][:] = IGNORED  # an image of which the loss sees nothing, and norms all
        label_map = LabelMap.from_config(self.network.classes, IGNORED)
        readers = [[ArrayReader(pixels) for pixels in each] for each in (images, labels)]
        return Dataset(*readers, tilings, label_map, Normalization.identity(bands), "float64")

    def modules(self) -> GraphNetwork:
        network = freeze(build_modules(self.network, seed=1).double(), self.frozen)
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = self.momentum
        return network.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload, no-any-return]


@dataclass(frozen=True)
class InBlocks:
    """`mesh`: None for mode `read`; blocks of the rank's part of an image."""

    blocks: tuple[int, int] | None
    mesh: tuple[int, int] | None = None
    store: str = HOST

    @property
    def grid(self) -> tuple[int, int]:
        return self.mesh or (1, 1)


WHOLE = InBlocks(None, (1, 1))


def run(steps: Steps, how: InBlocks, mesh: Mesh) -> Run:
    data = steps.dataset(how.grid)
    asked = ParallelConfig() if how.mesh is None else ParallelConfig(halo="layer", mesh=list(how.mesh))
    graph, most, bands = steps.network.graph(), len(STEPS[0]), steps.network.bands
    given = mesh.size, most, bands, 8, None, how.blocks is None
    spread = choose_spread(parallelism(asked), graph, data.tilings, *given)
    assert spread.together
    network = steps.modules()
    parallel = ParallelRun.open(spread, network, mesh, "fp64", blocks=how.blocks, store=how.store)
    passes = parallel.over(data.tilings)
    objective = LOSSES[steps.loss][0] if steps.loss else None
    rules = StepRules(IGNORED, KEY.seed, objective=objective)
    stepper = Stepper(torch.optim.SGD(network.parameters(), lr=0.05), mesh, passes, parallel.axes, rules)
    losses = []
    for number, images in enumerate(STEPS):
        parts = passes.mode.share([TileReference(i, t) for i in images for t in range(len(data.tilings[i]))])
        assert stepper.rounds(parts) == 1, "all are at hand together"
        losses.append(stepper.run(number, read_ahead(passes, data, parts, 0, 1), parts, stop=False).loss)
        check_agreement(network, mesh, parallel.axes.weights)  # running statistics too, before ranks agree on theirs
        agree_on_buffers(network, parallel.axes.weights, passes.mode.speaks(parts))
    stepper.close()
    parallel.close()
    return Run(losses, gradients(network), {name: tensor.clone() for name, tensor in network.state_dict().items()})


@cache
def whole(steps: Steps) -> Run:
    return run(steps, WHOLE, one_rank())


def check(steps: Steps, how: InBlocks, mesh: Mesh) -> None:
    torch.set_num_threads(1)
    found = run(steps, how, mesh)
    expected = mesh.on_root(lambda: whole(steps))
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)
    assert difference(found.gradients, expected.gradients) < 1e-12
    assert difference(found.state, expected.state) < 1e-12


def unet(padding: str = "same", upsampling: str = "bilinear") -> UNet:
    return UNet(3, 1, 3, 4, padding, "batch", upsampling, 0.2, bands=2, classes=4)


UNET = Steps(unet())
ONE_RANK = {
    "read": (UNET, InBlocks((2, 3))),
    "one-block": (UNET, InBlocks((1, 1))),
    "valid": (Steps(unet("valid", "transposed")), InBlocks((3, 2))),
    "mean-of-all-steps": (Steps(unet(), momentum=None), InBlocks((2, 2))),
    "frozen": (Steps(unet(), frozen={"encoder*": 0}), InBlocks((2, 1))),
    "every-layer": (Steps(EveryLayer(True)), InBlocks((3, 1))),
    "ratios": (Steps(unet(), loss="both"), InBlocks((1, 2))),
}
RANKS = {  # with the numbers of ranks that show something of their own
    "read": (UNET, InBlocks((2, 3)), (2, 3, 4)),
    "frozen": (ONE_RANK["frozen"][0], InBlocks((2, 1)), (3,)),
    "ratios": (ONE_RANK["ratios"][0], InBlocks((1, 2)), (2, 4)),
    "every-layer": (ONE_RANK["every-layer"][0], InBlocks((2, 1)), (3,)),
    "layer-1": (UNET, InBlocks((2, 2), (1, 1)), (1, 4)),
    "layer-2": (UNET, InBlocks((1, 3), (2, 1)), (2, 3, 4)),
    "layer-2-ratios": (ONE_RANK["ratios"][0], InBlocks((2, 1), (1, 2)), (3,)),
    "layer-2-every-layer": (ONE_RANK["every-layer"][0], InBlocks((1, 2), (1, 2)), (2, 4)),
    "layer-4": (UNET, InBlocks((2, 1), (2, 2)), (4,)),
}


@pytest.mark.parametrize("name", ONE_RANK)
def test_images_in_blocks_are_a_step_of_whole_images(name: str) -> None:
    check(*ONE_RANK[name], one_rank())


def test_a_file_gives_the_bits_of_memory(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    how = InBlocks((2, 3))
    found, expected = (run(UNET, each, one_rank()) for each in (replace(how, store=str(tmp_path)), how))
    assert found.losses == expected.losses
    assert all(torch.equal(found.state[name], tensor) for name, tensor in expected.state.items())
    assert not list(tmp_path.iterdir()), "the file has no name"


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("steps", "how"),
    [pytest.param(*case, id=name, marks=pytest.mark.ranks(*ranks)) for name, (*case, ranks) in RANKS.items()],
)
def test_ranks_have_many_images_few_or_none(steps: Steps, how: InBlocks, meshes: dict[str, Mesh]) -> None:
    """In mode `read` images of their own; in mode `layer` ranks share some, others stand outside the mesh."""
    mesh = meshes["gloo"]
    if how.grid[0] * how.grid[1] > mesh.size:
        pytest.skip("needs more ranks")
    check(steps, how, mesh)
