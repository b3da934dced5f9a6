"""The law of batches: several tiles of one shape at once give what they give one by one, dropout and losses included.

Against whole images, one after the other on one rank: losses and weights after three steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.law.cases import IGNORED, KEY, Case
from tests.law.steps import losses_of_steps
from tests.law.test_halo_modes import difference
from tests.law.test_in_order import Strip, dataset
from tests.law.test_networks import EDGES, Short, gated
from tiledseg.architecture.unet import UNet
from tiledseg.comm.launch import SERIAL
from tiledseg.comm.mesh import Mesh
from tiledseg.comm.transports.collectives import SerialCommunicator
from tiledseg.config.run import ParallelConfig
from tiledseg.execution.parallel_run import ParallelRun
from tiledseg.execution.precision import INPUT_DTYPES, PARAMETER_DTYPES
from tiledseg.planning.run.parallelism import parallelism
from tiledseg.planning.run.spread import choose_spread
from tiledseg.training.steps.step import Stepper, StepRules

STEPS, IMAGES = 3, 3
TILES = Strip(UNet(3, 1, 3, 4, "same", "pixel", "bilinear", 0.3, bands=2, classes=3), (4, 3))
WHOLE = Strip(replace(TILES.unet, norm="instance"), (1, 1))
EDGED = Short(gated("pixel", False), (5, 2))


@dataclass
class Found:
    """`sizes`: of the batches that the network's first layer was given."""

    losses: list[float | None]
    state: dict[str, torch.Tensor]
    sizes: set[int]


def train(case: Case, mesh: Mesh, batch: int, halo: str = "read", precision: str = "fp64") -> Found:
    network, sizes = case.network(PARAMETER_DTYPES[precision]).train(), set()
    data = dataset(case, IMAGES, INPUT_DTYPES[precision])
    data.margin = EDGES.margin if case is EDGED else 0
    spread = choose_spread(
        parallelism(ParallelConfig(halo=halo)), case.unet.graph(), data.tilings, mesh.size, IMAGES, case.unet.bands, 8
    )
    run = ParallelRun.open(spread, network, mesh, precision)

    def seen(module: nn.Module, given: tuple[Any, ...]) -> None:
        sizes.add(len(given[0]))

    next(iter(network.layers.values())).register_forward_pre_hook(seen)
    passes = run.over(data.tilings, batch)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    rules = StepRules(IGNORED, KEY.seed, objective=EDGES if case is EDGED else None)
    stepper = Stepper(optimizer, mesh, passes, run.axes, rules)
    losses = losses_of_steps(stepper, passes, data, STEPS)
    run.close()
    return Found(losses, network.state_dict(), sizes)


def alone(case: Case) -> Found:
    """Whole images, one by one."""
    mesh = Mesh(SERIAL, SerialCommunicator(), torch.device("cpu"), "serial", "here")
    return train(case if case is EDGED else replace(case, grid=(1, 1)), mesh, 1)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("case", "halo", "batch"),
    [(TILES, "read", 2), (TILES, "read", 100), (TILES, "exchange", 3), (WHOLE, "read", 2), (EDGED, "read", 4)],
    ids=["read", "read-all", "exchange", "images", "edges"],
)
def test_a_batch_is_its_tiles(case: Case, halo: str, batch: int, meshes: dict[str, Mesh]) -> None:
    torch.set_num_threads(1)
    mesh = meshes["gloo"]
    found = train(case, mesh, batch, halo)
    expected = mesh.on_root(lambda: alone(case))
    assert expected.sizes == {1}
    largest = max(max(sizes, default=0) for sizes in mesh.communicator.gather_objects(found.sizes))
    assert 1 < largest <= batch or (case is WHOLE and mesh.size > 1), "ranks with one image each have no batch"
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)
    assert difference(found.state, expected.state) < 1e-12
    assert difference(case.network().state_dict(), expected.state) > 1e-3, "weights have moved"


@pytest.mark.mpi
@pytest.mark.parametrize("batch", [1, 3])
def test_ranks_do_not_change_a_float32_loss_line(batch: int, meshes: dict[str, Mesh]) -> None:
    """With batches too, which follow from the step alone.

    One by one, which is what `auto` takes in float32 on any number of ranks, gives another rounding.
    """
    torch.set_num_threads(1)
    mesh = meshes["gloo"]
    found = train(TILES, mesh, batch, precision="fp32")
    serial = Mesh(SERIAL, SerialCommunicator(), torch.device("cpu"), "serial", "here")
    expected, single = mesh.on_root(lambda: [train(TILES, serial, size, precision="fp32") for size in (batch, 1)])
    assert max(expected.sizes) == batch
    assert found.losses == pytest.approx(expected.losses, rel=1e-13)
    assert all(torch.equal(tensor, expected.state[name]) for name, tensor in found.state.items())
    assert found.losses == pytest.approx(single.losses, rel=0 if batch == 1 else 1e-6)
    assert batch == 1 or any(not torch.equal(tensor, single.state[name]) for name, tensor in found.state.items())
