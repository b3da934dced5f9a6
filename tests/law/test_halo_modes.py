"""The law in every halo mode: outputs, gradients, buffers and twenty optimizer steps of whole U-Nets.

Under mpirun, on as many ranks as the job has; `make test` runs 1 to 4, and 9 where it says so.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from _pytest.mark import ParameterSet

from tests.law.cases import IGNORED, KEY, Case, gradients, relative, undivided
from tiledseg.architecture.unet import UNet
from tiledseg.comm.launch import SERIAL
from tiledseg.comm.mesh import Mesh
from tiledseg.comm.transports.collectives import SerialCommunicator
from tiledseg.config.run import ParallelConfig
from tiledseg.execution.agreement import agree_on_buffers
from tiledseg.execution.parallel_run import ParallelRun
from tiledseg.execution.passes.part_passes import read_ahead
from tiledseg.geometry.sharing.layer_windows import WHOLE
from tiledseg.memory.mover import HOST
from tiledseg.models.dropout import set_dropout_key
from tiledseg.planning.run.parallelism import parallelism
from tiledseg.planning.run.spread import Spread, choose_spread
from tiledseg.raster.samples.sampling import TileReference
from tiledseg.training.losses.objective import Objective
from tiledseg.training.steps.step import Stepper, StepRules

STEPS = 20
PADDINGS, UPSAMPLINGS = ("same", "valid"), ("transposed", "nearest", "bilinear")


@dataclass(frozen=True)
class Setting:
    """One U-Net in one mode."""

    case: Case
    parallel: ParallelConfig

    def plan(self, ranks: int) -> Spread:
        case = self.case
        asked = parallelism(self.parallel)
        return choose_spread(asked, case.unet.graph(), [case.tiling()], ranks, 1, case.unet.bands, 8)


def unet(padding: str, upsampling: str, norm: str = "none", levels: int = 3, convs: int = 2) -> UNet:
    # A dropped channel has no variance: with more of them an unpadded network with a norm is so touchy that weights
    # changed by 1e-15 change the loss of its own undivided run by 1e-4 within twenty steps.
    return UNet(levels, convs, 3, 4, padding, norm, upsampling, dropout=0.1, bands=3, classes=4)


def setting(network: UNet, halo: str, fusion: int = 1, mesh: list[int] | str = "auto") -> Setting:
    grid = (8, 4) if halo == "layer" else (4, 4)  # 8 rows of tiles: a block for each of 5, 7 or 8 ranks too
    return Setting(Case(network, grid), ParallelConfig(halo=halo, mesh=mesh, fusion=fusion))


EXACT = [setting(unet(p, u), "exchange") for p, u in itertools.product(PADDINGS, UPSAMPLINGS)]
LAYER = [
    setting(unet(p, u, norm), "layer", fusion)
    for p, u, norm, fusion in (
        ("same", "transposed", "none", 1),
        ("same", "transposed", "batch", 1),
        ("same", "transposed", "batch", 3),
        ("same", "nearest", "group", 1),
        ("same", "nearest", "instance", 2),
        ("same", "bilinear", "batch", 1),
        ("same", "bilinear", "none", WHOLE),
        ("same", "bilinear", "pixel", 4),
        ("valid", "transposed", "batch", 1),
        ("valid", "transposed", "none", 2),
        ("valid", "nearest", "batch", 1),
        ("valid", "nearest", "none", WHOLE),
        ("valid", "bilinear", "batch", 1),
        ("valid", "bilinear", "instance", 3),
    )
]
OVERLAP = [
    replace(s, parallel=replace(s.parallel, overlap=True)) for s in (LAYER[1], LAYER[2], LAYER[5], LAYER[8], LAYER[9])
]


def name(setting: Setting) -> str:
    u, p = setting.case.unet, setting.parallel
    fusion = "whole" if p.fusion == WHOLE else p.fusion
    return f"{p.halo}{'-overlap' * p.overlap}-{u.padding}-{u.upsampling}-{u.norm}-fusion-{fusion}"


@dataclass
class Run:
    """A network, and what its steps gave so far."""

    losses: list[float | None]
    gradients: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]


def steps(
    setting: Setting,
    plan: Spread,
    mesh: Mesh,
    count: int,
    rate: float,
    objective: Objective | None = None,
    blocks: tuple[int, int] | None = None,
    store: str = HOST,
) -> Run:
    """`count` optimizer steps on the case's image, as the trainer makes them."""
    case = setting.case
    network = case.network().train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate)
    dataset = case.dataset()
    parallel = ParallelRun.open(plan, network, mesh, "fp64", blocks=blocks, store=store)
    passes = parallel.over(dataset.tilings)
    stepper = Stepper(optimizer, mesh, passes, parallel.axes, StepRules(IGNORED, KEY.seed, objective=objective))
    parts = passes.mode.share([TileReference(0, tile) for tile in range(len(dataset.tilings[0]))])
    losses = []
    for step in range(count):
        again = (part for _ in range(stepper.rounds(parts)) for part in parts)
        samples = read_ahead(passes, dataset, again, 0, 1)
        losses.append(stepper.run(KEY.step + step, samples, parts, stop=False).loss)
        agree_on_buffers(network, parallel.axes.weights, passes.mode.speaks(parts))
    stepper.close()
    parallel.close()
    return Run(losses, gradients(network), {k: v.clone() for k, v in network.state_dict().items()})


def alone(setting: Setting, count: int, rate: float, objective: Objective | None = None) -> Run:
    """The same on the undivided raster: one rank, one tile."""
    return steps(undivided_setting(setting), Spread(), one_rank(), count, rate, objective)


@cache
def first_step(unet: UNet) -> Run:
    """Of the undivided raster, by rank 0: several settings have the same network."""
    return alone(Setting(Case(unet, (1, 1)), ParallelConfig()), 1, 0.0)


@cache
def first_outputs(unet: UNet) -> torch.Tensor:
    """The same of its logits."""
    return outputs(Setting(Case(unet, (1, 1)), ParallelConfig()), Spread(), one_rank())


def undivided_setting(setting: Setting) -> Setting:
    return Setting(replace(setting.case, grid=(1, 1)), ParallelConfig())


def check_steps_and_outputs(setting: Setting, mesh: Mesh, count: int, rate: float) -> None:
    """`count` steps at this `rate`, and the outputs, are those of the undivided raster on one rank."""
    spread = setting.plan(mesh.size)
    found, found_KHW = steps(setting, spread, mesh, count, rate), outputs(setting, spread, mesh)
    expected = mesh.on_root(lambda: alone(setting, count, rate))
    expected_KHW = mesh.on_root(lambda: outputs(undivided_setting(setting), Spread(), one_rank()))
    assert relative(found_KHW, expected_KHW) < 1e-12
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)
    assert difference(found.gradients, expected.gradients) < 1e-12
    assert difference(found.state, expected.state) < 1e-12


def one_rank() -> Mesh:
    return Mesh(SERIAL, SerialCommunicator(), torch.device("cpu"), "serial", "here")


def outputs(setting: Setting, plan: Spread, mesh: Mesh, blocks: tuple[int, int] | None = None) -> torch.Tensor:
    """The logits of the whole raster as a training step computes them, put together from all ranks. Collective."""
    case = setting.case
    network = case.network().train()
    set_dropout_key(network, KEY)
    dataset = case.dataset()
    parallel = ParallelRun.open(plan, network, mesh, "fp64", blocks=blocks)
    passes = parallel.over(dataset.tilings)
    parts = passes.mode.share([TileReference(0, tile) for tile in range(len(dataset.tilings[0]))])
    logits_KHW = torch.zeros(case.unet.classes, *case.raster, dtype=torch.float64)
    with torch.no_grad():
        for _, piece in passes.outputs(read_ahead(passes, dataset, parts, 0, 1), parts):
            logits_KHW[(slice(None), *piece.core.slices)] = piece.logits_BKHW[0]
    parallel.close()
    mesh.communicator.all_reduce_sum(logits_KHW).wait()
    return logits_KHW


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    flat = [torch.cat([values[key].double().reshape(-1) for key in expected]) for values in (found, expected)]
    return relative(*flat)


NINE = (EXACT[0], LAYER[1], LAYER[5], LAYER[9], LAYER[12], OVERLAP[0])


def chosen(settings: list[Setting], everywhere: tuple[Setting, ...], *ranks: int) -> list[ParameterSet]:
    """Settings with the numbers of ranks that show something of their own; those `everywhere` on nine too."""
    nine, some = [pytest.mark.nine], [pytest.mark.ranks(*ranks)]
    return [pytest.param(each, id=name(each), marks=nine if each in everywhere else some) for each in settings]


@pytest.mark.mpi
@pytest.mark.parametrize("setting", chosen(EXACT + LAYER + OVERLAP, NINE, 2, 3, 4))
def test_one_step_has_the_undivided_networks_loss_gradients_and_buffers(
    setting: Setting, meshes: dict[str, Mesh]
) -> None:
    torch.set_num_threads(1)
    mesh = meshes["mpi"]
    found = steps(setting, setting.plan(mesh.size), mesh, 1, 0.0)
    expected = mesh.on_root(lambda: first_step(setting.case.unet))
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)
    assert difference(found.gradients, expected.gradients) < 1e-12
    assert difference(found.state, expected.state) < 1e-12
    if setting.case.unet.norm == "none" and mesh.is_root:
        assert expected.losses[0] == pytest.approx(undivided(setting.case).loss, rel=1e-12)


@pytest.mark.mpi
@pytest.mark.parametrize("setting", chosen(EXACT + LAYER + OVERLAP, NINE, 2, 4))
def test_outputs_are_those_of_the_undivided_network(setting: Setting, meshes: dict[str, Mesh]) -> None:
    """With dropout on, and norms over the image as in training."""
    torch.set_num_threads(1)
    mesh = meshes["mpi"]
    found_KHW = outputs(setting, setting.plan(mesh.size), mesh)
    expected_KHW = mesh.on_root(lambda: first_outputs(setting.case.unet))
    assert relative(found_KHW, expected_KHW) < 1e-12
    if setting.case.unet.norm == "none" and mesh.is_root:
        assert relative(expected_KHW, undivided(setting.case).logits_KHW) < 1e-12


TWENTY = chosen([EXACT[3], LAYER[9]], (EXACT[3], LAYER[9])) + chosen([LAYER[1]], (), 1, 2, 3, 4)
TWENTY += chosen([EXACT[2], LAYER[5], LAYER[10], LAYER[12]], (), 2)


@pytest.mark.mpi
@pytest.mark.parametrize("setting", TWENTY)
def test_twenty_steps(setting: Setting, meshes: dict[str, Mesh]) -> None:
    torch.set_num_threads(1)
    mesh = meshes["gloo" if setting.case.unet.padding == "same" else "mpi"]
    found = steps(setting, setting.plan(mesh.size), mesh, STEPS, 0.002)
    expected = mesh.on_root(lambda: alone(setting, STEPS, 0.002))
    assert difference(setting.case.network().state_dict(), expected.state) > 0.05, "the weights have moved"
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)
    assert difference(found.state, expected.state) < 1e-12
