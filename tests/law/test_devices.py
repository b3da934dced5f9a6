"""The law on each device: the CPU always, a GPU where there is one. The same code runs on both.

A GPU's kernels differ by the kind of layer, by what determinism allows and by precision; so all of these are crossed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.law.cases import Case, Strip, difference
from tests.law.steps import Run, Steps, by_torch, check_same_bits, expected, train
from tiledseg.architecture.unet import UNet
from tiledseg.comm.collectives import Communicator
from tiledseg.comm.launch import SERIAL
from tiledseg.comm.mesh import Mesh
from tiledseg.config.words import NORMS, UPSAMPLINGS
from tiledseg.execution.carrying import make_deterministic

CASE = Case(UNet(3, 2, 3, 4, "same", "pixel", "transposed", 0.25, bands=3, classes=4), (3, 2))
KINDS = {
    f"{norm}, {upsampling}": Steps(
        Strip(UNet(3, 1, 3, 8, "same", norm, upsampling, 0.2, bands=2, classes=3), (1, 1)), images=((0,),)
    )
    for norm, upsampling in [*zip(NORMS, UPSAMPLINGS * 2, strict=False), ("none", UPSAMPLINGS[1])]
}
# Of a whole gradient, relative. float32 keeps 24 bits, TF32 and fp16 11, bfloat16 8; each layer rounds once or twice.
BOUNDS = {"fp32": 1e-5, "tf32": 3e-2, "bf16": 0.2}
STEP_BOUNDS = {"fp64": 1e-11, "fp32": 1e-4, "bf16": 0.03, "fp16": 0.004}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def mesh(request: pytest.FixtureRequest) -> Iterator[Mesh]:
    """One rank on a device."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU on this machine")
    yield Mesh(SERIAL, Communicator(), torch.device(request.param), "serial", "here")
    make_deterministic(True)
    torch.use_deterministic_algorithms(False)


def check_near(found: Run, wanted: Run, bound: float) -> None:
    assert found.losses == pytest.approx(wanted.losses, rel=bound)
    assert difference(found.gradients, wanted.gradients) < bound


@pytest.mark.parametrize("precision", STEP_BOUNDS)
def test_a_step_over_tiles_is_that_of_the_whole(mesh: Mesh, precision: str) -> None:
    """Under autocast to its own rounding: each tile's weight gradient is rounded on its own."""
    steps = Steps(CASE, images=((0,),), precision=precision)
    is_cast = precision in ("bf16", "fp16")
    wanted = train(steps.whole(), mesh) if is_cast else by_torch(replace(steps, precision="fp64"))
    check_near(train(steps, mesh), wanted, STEP_BOUNDS[precision])


@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "fast"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", KINDS)
def test_a_network_of_each_kind(name: str, precision: str, deterministic: bool, mesh: Mesh) -> None:
    """Within the rounding of its format; and with deterministic kernels, rebuilt or not, the same bits."""
    make_deterministic(deterministic)
    steps = replace(KINDS[name], precision=precision)
    found, rebuilt = (train(replace(steps, policy=policy), mesh) for policy in ("", "everything"))
    bound = BOUNDS["tf32" if precision == "fp32" and not deterministic and mesh.device.type == "cuda" else precision]
    for run in (found, rebuilt):
        check_near(run, expected(KINDS[name]), bound)
    if deterministic:
        for other in (rebuilt, train(steps, mesh)):
            check_same_bits(other, found)
