"""The law on each device: the CPU always, a GPU where there is one. The same code runs on both."""

from __future__ import annotations

import pytest
import torch

from tests.law.cases import IGNORED, KEY, Case, gradients, relative, undivided
from tiledseg.architecture.unet import UNet
from tiledseg.comm.axes import serial_axes
from tiledseg.comm.collectives import SerialCommunicator
from tiledseg.comm.launch import SERIAL
from tiledseg.comm.mesh import Mesh
from tiledseg.execution.halo_modes import Part, ReadMode
from tiledseg.execution.part_passes import SerialPasses
from tiledseg.execution.precision import PARAMETER_DTYPES, make_deterministic
from tiledseg.training.step import Stepper, StepRules

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
CASE = Case(UNet(3, 2, 3, 4, "same", "pixel", "transposed", 0.25, bands=3, classes=4), (3, 2))
BOUNDS = {"fp64": 1e-11, "fp32": 1e-4}
# bfloat16 keeps 8 bits, fp16 11, and each tile's weight gradient is rounded to them on its own.
HALVES = {"bf16": 0.03, "fp16": 0.004}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU on this machine")
    return torch.device(request.param)


def tiled_step(
    device: torch.device, precision: str, grid: tuple[int, int] = CASE.grid
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one real step over the tiles, on `device`."""
    mesh = Mesh(SERIAL, SerialCommunicator(), device, "serial", "here")
    network = CASE.network().to(device, PARAMETER_DTYPES[precision]).train()
    dataset = CASE.dataset(grid, dtype="float64" if precision == "fp64" else "float32")
    mode = ReadMode(network, mesh, dataset.tilings, precision)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
    stepper = Stepper(optimizer, mesh, SerialPasses(mode), serial_axes(mesh.communicator), StepRules(IGNORED, KEY.seed))
    parts = [Part(0, tile) for tile in dataset.tilings[0].tiles]
    result = stepper.run(KEY.step, (dataset.load(0, part.tile) for part in parts), parts, stop=False)
    stepper.close()
    assert result.loss is not None
    return result.loss, {name: g.cpu() for name, g in gradients(network).items()}


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_a_step_over_tiles_is_the_undivided_networks(device: torch.device, precision: str) -> None:
    expected = undivided(CASE)
    loss, found = tiled_step(device, precision)
    assert loss == pytest.approx(expected.loss, rel=BOUNDS[precision])
    assert distance(found, expected.gradients) < BOUNDS[precision]


@pytest.mark.parametrize("precision", HALVES)
def test_autocast_keeps_the_law_to_its_own_rounding(precision: str, device: torch.device) -> None:
    (loss, found), (whole_loss, whole) = (tiled_step(device, precision, grid) for grid in (CASE.grid, (1, 1)))
    assert loss == pytest.approx(whole_loss, rel=HALVES[precision])
    assert distance(found, whole) < HALVES[precision]


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Relative difference of two whole gradients."""
    pair = [torch.cat([values[name].double().reshape(-1) for name in expected]) for values in (found, expected)]
    return relative(*pair)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_deterministic_step_gives_the_same_bits_twice(device: torch.device, precision: str) -> None:
    make_deterministic(True)
    try:
        first, second = tiled_step(device, precision), tiled_step(device, precision)
    finally:
        torch.use_deterministic_algorithms(False)
    assert first[0] == second[0]
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])
