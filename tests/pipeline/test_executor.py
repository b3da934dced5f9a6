"""The law of pipelines: loss, gradients and buffers are those of the undivided network, however it is cut and run.

Under mpirun; each number of stages that the job has ranks for, `make test` starts jobs of 1 to 4 and of 6.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from tests.law.cases import relative
from tests.pipeline.undivided import Drawn, Result, network_of, result_of, undivided
from tiledseg.architecture.presets import PRESETS
from tiledseg.architecture.unet import UNet
from tiledseg.comm.axes import Axes, open_axes
from tiledseg.comm.mesh import Mesh
from tiledseg.config.words import RECOMPUTE, SCHEDULES
from tiledseg.geometry.sharing.decomposition import MeshShape
from tiledseg.pipeline.balance import BalancePrices, choose_balances, choose_folded_balances
from tiledseg.pipeline.executor import PipelineExecutor
from tiledseg.pipeline.partition import split_network
from tiledseg.pipeline.schedule import Settings
from tiledseg.planning.walk.cost import layer_costs

BOUND = 1e-12


@dataclass(frozen=True)
class Case:
    """A network, how it is cut and run, and the sizes of its micro-batches."""

    unet: UNet
    schedule: str
    recompute: str
    sizes: tuple[tuple[int, int], ...]
    balance: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        u = self.unet
        kind = f"{u.padding}-{u.upsampling}-{u.norm}-L{u.levels}"
        return f"{self.schedule}-{self.recompute}-{len(self.sizes)}-{kind}"


def sizes(unet: UNet, count: int) -> tuple[tuple[int, int], ...]:
    """Uneven ones, as the tiles at a raster's edges are."""
    unit = 1 << (unet.levels - 1)
    least = 2 * unit if unet.padding == "same" else 2 * unit * (unet.levels + 2) + (12 if unet.levels == 3 else 28)
    if unet.padding == "valid":
        least = 44  # three levels: 44 + 4 n
    return tuple((least + unit * (m % 3), least + unit * ((m + 1) % 2)) for m in range(count))


def work(unet: UNet) -> list[int]:
    """Multiply-adds of each layer and pixel, for a balance that is fair enough."""
    return [1 + cost.multiply_adds for cost in layer_costs(unet.graph(), unet.bands, sizes(unet, 1)[0])]


def balance(case: Case, stages: int) -> tuple[int, ...]:
    if case.balance is not None and stages == len(case.balance):
        return case.balance
    layers = case.unet.graph()
    if case.schedule == "folded":
        ends = [(tensor - 1, reader) for tensor, reader in layers.skips]
        return choose_folded_balances(BalancePrices(work(case.unet)), ends, stages)[0]
    return choose_balances(BalancePrices(work(case.unet)), stages)[0]


def run(case: Case, axes: Axes, stages: int) -> tuple[Result, PipelineExecutor, list[Drawn]]:
    """One step of the pipeline in which this rank stands: what this rank holds after it."""
    assert axes.position is not None
    network = network_of(case.unet)
    settings = Settings(case.schedule, balance(case, stages), (case.recompute,) * stages)
    split = split_network(network, settings, axes.position.stage, torch.device("cpu"), torch.float64)
    executor = PipelineExecutor(split, axes)
    drawn = [Drawn(network, number, size) for number, size in enumerate(case.sizes)]
    executor.train(drawn, lambda chunk: None)
    return result_of(network, sum(loss for one in drawn for loss in one.losses)), executor, drawn


def merged(parts: Sequence[Result]) -> Result:
    """What the stages hold, together; each parameter on one rank."""
    gradients: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    for part in parts:
        assert not gradients.keys() & part.gradients.keys(), "a layer is on two ranks"
        gradients |= part.gradients
        buffers |= part.buffers
    return Result(sum(part.loss for part in parts), gradients, buffers)


def check(found: Result, expected: Result) -> None:
    assert found.loss == pytest.approx(expected.loss, rel=BOUND)
    for mine, theirs in ((found.gradients, expected.gradients), (found.buffers, expected.buffers)):
        assert mine.keys() == theirs.keys()
        if theirs:
            flat = [torch.cat([values[k].double().reshape(-1) for k in theirs]) for values in (mine, theirs)]
            assert relative(*flat) < BOUND


def check_case(case: Case, mesh: Mesh, stages: int) -> None:
    """Collective over the job; ranks beyond the pipeline look on."""
    axes = open_axes(mesh, MeshShape(1, 1, 1, stages))
    part = None
    if axes.position is not None:
        part, executor, drawn = run(case, axes, stages)
        assert [one.sources for one in drawn] == [int(executor.has_first)] * len(drawn)
        assert [len(one.losses) for one in drawn] == [int(executor.has_last)] * len(drawn)
    parts = [p for p in mesh.communicator.gather_objects(part) if p is not None]
    axes.close()
    check(merged(parts), undivided(case.unet, case.sizes))


PLAIN = UNet(3, 2, 3, 3, "same", "none", "transposed", 0.2, bands=2, classes=3)
NETWORKS = (
    UNet(3, 1, 3, 3, "same", "batch", "bilinear", 0.2, bands=2, classes=3),
    UNet(3, 2, 3, 3, "valid", "none", "nearest", 0.2, bands=2, classes=3),
    UNet(3, 2, 3, 4, "same", "instance", "transposed", 0.0, bands=2, classes=3),
    UNet(3, 2, 3, 4, "same", "pixel", "nearest", 0.2, bands=2, classes=3),
)
EVERY = [
    Case(PLAIN, schedule, recompute, sizes(PLAIN, 5)) for schedule, recompute in itertools.product(SCHEDULES, RECOMPUTE)
]
OTHERS = [
    *(Case(unet, SCHEDULES[i % 3], RECOMPUTE[(i + 1) % 3], sizes(unet, 4)) for i, unet in enumerate(NETWORKS)),
    Case(NETWORKS[0], "folded", "except_last", sizes(NETWORKS[0], 1)),
]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("case", EVERY + OTHERS, ids=lambda case: case.name)
def test_a_pipeline_gives_what_the_undivided_network_gives(case: Case, meshes: dict[str, Mesh]) -> None:
    torch.set_num_threads(1)
    mesh = meshes["mpi" if len(case.sizes) % 2 else "gloo"]
    check_case(case, mesh, mesh.size)


@pytest.mark.mpi
@pytest.mark.six
@pytest.mark.ranks(3)
@pytest.mark.parametrize(("schedule", "preset"), [*((s, "small") for s in SCHEDULES), ("1f1b", "large")])
def test_presets_with_the_papers_balance(preset: str, schedule: str, meshes: dict[str, Mesh]) -> None:
    torch.set_num_threads(1)
    named = PRESETS[preset]
    unet = UNet(named.levels, named.convs_per_level, 3, 1, "same", named.norm, "nearest", 0.1, bands=2, classes=3)
    paper = None if schedule == "folded" else named.balance
    count = {"1f1b": 8, "gpipe": 3, "folded": 7}[schedule]
    case = Case(unet, schedule, "never", sizes(unet, count), paper)
    mesh = meshes["gloo"]
    # On six ranks also a pipeline of five, for the preset that is computed soonest.
    for stages in {mesh.size, 5 if mesh.size == 6 and preset == "small" else mesh.size}:
        check_case(case, mesh, stages)
