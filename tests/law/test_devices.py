"""The law on each device: the CPU always, a GPU where there is one. The same code runs on both.

A GPU's kernels differ by the kind of layer, by what determinism allows and by precision; so all of these are crossed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from tests.law.cases import Case, difference, gradients, step_gradients, undivided
from tests.pipeline.undivided import Drawn, network_of
from tiledseg.architecture.unet import UNet
from tiledseg.comm.collectives import SerialCommunicator
from tiledseg.comm.launch import SERIAL
from tiledseg.comm.mesh import Mesh, serial_axes
from tiledseg.config.words import NORMS, UPSAMPLINGS
from tiledseg.execution.carrying import autocast, make_deterministic
from tiledseg.models.network import Tensors
from tiledseg.pipeline.executor import PipelineExecutor
from tiledseg.pipeline.partition import split_network
from tiledseg.pipeline.schedule import Settings

CASE = Case(UNet(3, 2, 3, 4, "same", "pixel", "transposed", 0.25, bands=3, classes=4), (3, 2))
SIZES = ((16, 24), (32, 16))
CPU = torch.device("cpu")
Result = tuple[float, dict[str, torch.Tensor]]  # the sum of losses, and gradients
# Of a whole gradient, relative. float32 keeps 24 bits, TF32 and fp16 11, bfloat16 8; each layer rounds once or twice.
BOUNDS = {"fp32": 1e-5, "tf32": 3e-2, "bf16": 0.2}
STEP_BOUNDS = {"fp64": 1e-11, "fp32": 1e-4, "bf16": 0.03, "fp16": 0.004}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU on this machine")
    yield torch.device(request.param)
    make_deterministic(True)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("precision", STEP_BOUNDS)
def test_a_step_over_tiles_is_that_of_the_whole(device: torch.device, precision: str) -> None:
    """Under autocast to its own rounding: each tile's weight gradient is rounded on its own."""
    mesh, bound = Mesh(SERIAL, SerialCommunicator(), device, "serial", "here"), STEP_BOUNDS[precision]
    loss, found = step_gradients(CASE, mesh, precision)
    if precision in ("fp64", "fp32"):
        whole = undivided(CASE)
        expected = whole.loss, whole.gradients
    else:
        expected = step_gradients(CASE, mesh, precision, (1, 1))
    assert loss == pytest.approx(expected[0], rel=bound)
    assert difference(found, expected[1]) < bound


def kind(norm: str, upsampling: str) -> UNet:
    return UNet(3, 1, 3, 8, "same", norm, upsampling, 0.2, bands=2, classes=3)


@dataclass
class OnDevice(Drawn):
    """A micro-batch on a device, computed in `precision`."""

    device: torch.device = torch.device("cpu")  # noqa: RUF009
    precision: str = "fp32"

    def source(self) -> torch.Tensor:
        return super().source().to(self.device)

    def run_nodes(self, tensors: Tensors, first: int, stop: int) -> None:
        with autocast(self.precision, self.device):
            super().run_nodes(tensors, first, stop)

    def loss(self, *outputs_BKHW: torch.Tensor) -> torch.Tensor:
        return super().loss(*(output.double().cpu() for output in outputs_BKHW))


@cache
def expected(norm: str, upsampling: str) -> Result:
    """Compute the micro-batches one after the other through the whole network, in float64."""
    network, loss = network_of(kind(norm, upsampling)), 0.0
    for number, size in enumerate(SIZES):
        drawn = Drawn(network, number, size)
        tensors = {0: drawn.source()}
        drawn.run_nodes(tensors, 0, len(network.graph))
        drawn.loss(*tensors.values()).backward()
        loss += drawn.losses[0]
    return loss, gradients(network)


def computed(unet: UNet, device: torch.device, precision: str, recompute: str) -> Result:
    """By the executor of one stage that holds all layers."""
    network = network_of(unet).float()
    cast = autocast(precision, device) if precision == "bf16" else None
    settings = Settings("1f1b", (len(network.graph),), (recompute,))
    executor = PipelineExecutor(split_network(network, settings, 0, device, torch.float32, cast), serial_axes())
    drawn = [OnDevice(network, n, size, device=device, precision=precision) for n, size in enumerate(SIZES)]
    executor.train(drawn, lambda parameters: None)
    return sum(one.losses[0] for one in drawn), gradients(network)


@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "fast"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("norm", "upsampling"), [*zip(NORMS, UPSAMPLINGS * 2, strict=False), ("none", UPSAMPLINGS[1])])
def test_a_network_of_each_kind(
    norm: str, upsampling: str, precision: str, deterministic: bool, device: torch.device
) -> None:
    """Within the rounding of its format; and with deterministic kernels, recomputed or not, the same bits."""
    make_deterministic(deterministic)
    unet, reference = kind(norm, upsampling), expected(norm, upsampling)
    results = [computed(unet, device, precision, recompute) for recompute in ("never", "always")]
    bound = BOUNDS["tf32" if precision == "fp32" and not deterministic and device.type == "cuda" else precision]
    for loss, found in results:
        assert loss == pytest.approx(reference[0], rel=bound)
        assert difference(found, reference[1]) < bound
    if deterministic:
        again = computed(unet, device, precision, "never")
        for other in (results[1], again):
            assert all(torch.equal(results[0][1][name], gradient) for name, gradient in other[1].items())
