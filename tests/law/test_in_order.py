"""The law where communication keeps the order in which it was posted, as on NCCL: whole steps of every kind of split.

Two optimizer steps over several images and a validation, in float64, against one rank: every communicator that training
has is used. Buckets of gradients are small, so that there are many sums to go astray. A hang fails within a minute,
with what every rank was at (`tests/comm/in_order.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import pytest
import torch

from tests.comm.in_order import Order, in_order
from tests.law.cases import IGNORED, KEY, ArrayReader, Case
from tests.law.test_halo_modes import difference, one_rank
from tiledseg.architecture.unet import UNet
from tiledseg.comm.mesh import Mesh
from tiledseg.config.run import ParallelConfig
from tiledseg.config.words import SCHEDULES
from tiledseg.execution.agreement import agree_on_buffers, check_agreement, own_state
from tiledseg.execution.parallel_run import ParallelRun
from tiledseg.execution.passes.part_passes import read_ahead
from tiledseg.planning.run.parallelism import parallelism
from tiledseg.planning.run.pipeline import PipelinePlan, micro_batch_size, plan_pipeline
from tiledseg.planning.run.spread import Spread, choose_spread
from tiledseg.raster.labels.label_map import LabelMap
from tiledseg.raster.samples.dataset import Dataset
from tiledseg.raster.samples.sampling import TileReference
from tiledseg.raster.statistics import Normalization
from tiledseg.training.steps.step import Stepper, StepRules
from tiledseg.training.validation import validate

STEPS = 2


@dataclass(frozen=True)
class Strip(Case):
    """A raster of few pixels."""

    @property
    def raster(self) -> tuple[int, int]:
        unit = self.footprint.alignment
        return 6 * unit + 1, 3 * unit + 3


@dataclass(frozen=True)
class Split:
    """A network, how the ranks share its steps, and the images of a step."""

    ranks: tuple[int, ...]
    parallel: ParallelConfig
    norm: str = "none"
    images: int = 1
    upsampling: str = "transposed"
    blocks: tuple[int, int] | None = None

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def name(self) -> str:
        p = self.parallel
        mesh = "" if p.mesh == "auto" else "-" + "x".join(map(str, p.mesh))
        stages = f"-{p.stages}-{p.schedule}" if p.stages > 1 else ""
        extra = f"{'-overlap' * p.overlap}{f'-fusion-{p.fusion}' * (p.fusion != 1)}"
        extra += "-blocks" * (self.blocks is not None)
        return f"{p.halo}{mesh}{stages}{extra}-{self.norm}-images-{self.images}"

    @property
    def case(self) -> Strip:
        return Strip(UNet(3, 1, 3, 4, "same", self.norm, self.upsampling, 0.1, bands=2, classes=3), (6, 3))


class Whole(Split):
    """One tile an image."""

    @property
    def case(self) -> Strip:
        return replace(super().case, grid=(1, 1))


def dataset(case: Case, images: int, dtype: str = "float64") -> Dataset:
    """Each image of its own noise."""
    draw = np.random.default_rng(5)
    shape = case.raster
    return Dataset(
        [ArrayReader(draw.normal(size=(case.unet.bands, *shape))) for _ in range(images)],
        [ArrayReader(draw.integers(0, case.unet.classes, (1, *shape)).astype(np.uint8)) for _ in range(images)],
        [case.tiling()] * images,
        LabelMap.from_config(case.unet.classes, IGNORED),
        Normalization.identity(case.unet.bands),
        dtype,
    )


def plans(split: Split, ranks: int) -> tuple[Spread, PipelinePlan | None]:
    layers, case = split.case.unet.graph(), split.case
    tilings = [case.tiling()] * split.images
    given = ranks, split.images, case.unet.bands, 8, None, split.blocks is None
    halo = choose_spread(parallelism(split.parallel), layers, tilings, *given)
    largest = micro_batch_size(halo, layers, tilings, len(tilings[0]) * split.images, split.images, 8)
    return halo, plan_pipeline(parallelism(split.parallel), layers, case.unet.bands, largest, None)


@dataclass
class Run:
    """What a run gave on this rank."""

    losses: list[float | None]
    validation: dict = field(default_factory=dict)
    state: dict[str, torch.Tensor] = field(default_factory=dict)


def train(split: Split, mesh: Mesh) -> Run:
    """The steps as the trainer makes them, with everything that communicates."""
    case = split.case
    network = case.network().train()
    data = dataset(case, split.images)
    halo, pipeline = plans(split, mesh.size)
    run = ParallelRun.open(halo, network, mesh, "fp64", pipeline, split.blocks)
    passes = run.over(data.tilings)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.002)
    stepper = Stepper(optimizer, mesh, passes, run.axes, StepRules(IGNORED, KEY.seed, 0.5))
    parts = passes.mode.share([TileReference(i, t) for i in range(split.images) for t in range(len(data.tilings[i]))])
    found = Run([])
    for step in range(STEPS):
        samples = read_ahead(passes, data, parts, 0, 1)
        found.losses.append(stepper.run(step, samples, parts, stop=False).loss)
        agree_on_buffers(network, run.axes.weights, passes.mode.speaks(parts))
    check_agreement(network, mesh, run.axes.weights)
    found.validation = validate(network, data, mesh, run.over(data.tilings), case.unet.classes, IGNORED, 1, 1).line()
    stepper.close()
    run.close()
    found.state = {name: tensor.clone() for name, tensor in own_state(network).items()}
    return found


@lru_cache(maxsize=2)
def alone(split: Split) -> Run:
    """The undivided images, on one rank; the same for all orders."""
    together = split.norm == "batch" and split.images > 1
    parallel = ParallelConfig(halo="layer", mesh=[1, 1]) if together else ParallelConfig()
    whole = Whole(split.ranks, parallel, split.norm, split.images, split.upsampling)
    return train(whole, one_rank())


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("tiledseg.gradients.BUCKET_BYTES", 600)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def staged(halo: str, schedule: str, mesh: list[int] | str = "auto", stages: int = 2) -> ParallelConfig:
    return ParallelConfig(halo=halo, mesh=mesh, stages=stages, schedule=schedule, balance="modelled")


def layered(mesh: list[int] | str = "auto", **more: object) -> ParallelConfig:
    return ParallelConfig(halo="layer", mesh=mesh, **more)  # type: ignore[arg-type]


SPLITS = [
    Split((2, 4), ParallelConfig(), images=2),
    Split((2, 3), ParallelConfig(halo="exchange"), images=2),
    Split((4, 6), ParallelConfig(halo="exchange", mesh=[2, 1]), images=3),
    Split((2, 3, 4), layered()),
    Split((2, 3), layered(), "batch", upsampling="bilinear"),
    Split((2, 4), layered(overlap=True), "instance", 2),
    Split((3, 4), layered(fusion=3), "group"),
    Split((4, 6), layered([2, 1]), "instance", 3),
    Split((2, 3, 4), layered([2, 1]), "instance", 3, blocks=(2, 2)),
    Split((3, 4), layered([2, 1]), "batch", 3, blocks=(2, 1)),
    Whole((2, 3), ParallelConfig(), "batch", 2, blocks=(2, 2)),
    *(Split((2, 3, 4), staged("read", schedule)) for schedule in SCHEDULES),
    *(Split((3, 6), staged("read", schedule, stages=3), images=2) for schedule in SCHEDULES),
    Split((4,), staged("exchange", "1f1b", [2, 1]), images=2),
    *(Split((4,), staged("layer", schedule, [2, 1]), "instance", 3) for schedule in SCHEDULES),
    *(Split((6,), staged("layer", schedule, [2, 1], 3), "instance", 4) for schedule in SCHEDULES),
    pytest.param(Split((9,), staged("layer", "1f1b", [2, 1]), "instance", 3), marks=pytest.mark.nine),
]


@pytest.mark.mpi(min_size=2)
@pytest.mark.six
@pytest.mark.parametrize("order", Order, ids=lambda order: order.name)  # the inner loop: one reference serves them all
@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.name)
def test_whole_steps_are_those_of_one_rank(split: Split, order: Order, meshes: dict[str, Mesh]) -> None:
    real = meshes["gloo"]
    if real.size not in split.ranks:
        pytest.skip(f"not for {real.size} ranks")
    with in_order(real, order, turns=order is Order.ANY) as mesh:
        found = train(split, mesh)
        parts = mesh.communicator.gather_objects(found.state)
    expected = real.on_root(lambda: alone(split))
    assert found.losses == pytest.approx(expected.losses, rel=1e-11)
    assert found.validation["loss"] == pytest.approx(expected.validation["loss"], rel=1e-11)
    together = {name: tensor for part in parts for name, tensor in part.items()}
    assert difference(together, expected.state) < 1e-11
