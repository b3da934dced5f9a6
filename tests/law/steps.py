"""Training steps on rasters in memory, as the trainer makes them; and by torch alone on the whole images.

`Steps` says what is learned, and how ranks share it. Whatever they share, losses, gradients, weights, buffers and the
loss of a validation are those of `by_torch`, or, for losses without a formula and images of several sizes, those of
the same steps on whole images by one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.law.cases import IGNORED, KEY, ArrayReader, Case, as_batch, difference, one_rank
from tests.models.test_rebuild import policies
from tiledseg.comm.mesh import Mesh
from tiledseg.config.run import OptimizerConfig, ParallelConfig
from tiledseg.execution.agreement import agree_on_buffers, check_agreement, own_state
from tiledseg.execution.carrying import INPUT_DTYPES, PARAMETER_DTYPES
from tiledseg.execution.parallel_run import ParallelRun
from tiledseg.execution.part_passes import read_ahead
from tiledseg.geometry.tiling import Tiling, make_tiling
from tiledseg.memory.mover import HOST
from tiledseg.models.dropout import set_dropout_key
from tiledseg.models.frozen import factor_of, freeze
from tiledseg.models.layers.block import tile_places
from tiledseg.models.network import GraphNetwork
from tiledseg.planning.run.blocks import BlockSettings
from tiledseg.planning.run.pipeline import PipelinePlan, plan_pipeline
from tiledseg.planning.run.plan import choose_spread
from tiledseg.planning.run.question import RunQuestion
from tiledseg.planning.run.spread import Spread, micro_batch_size, parallelism
from tiledseg.raster.labels.label_map import LabelMap
from tiledseg.raster.samples.dataset import Dataset
from tiledseg.raster.samples.sampling import TileReference
from tiledseg.raster.statistics import Normalization
from tiledseg.training.objective import Objective, PixelTerm
from tiledseg.training.optimizer import build_optimizer, parameter_groups
from tiledseg.training.step import Stepper
from tiledseg.training.validation import validate

Formula = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of scores (P, K) and classes (P,) of valid pixels


@dataclass(frozen=True, eq=False)
class Steps:
    """A network and its images, how it learns, and how ranks share the work.

    `images`: of each step, by number. `units`: rows and columns of each image in the network's alignment, where images
    have several sizes; the fourth has no valid label. `factors`: of the rate, by patterns of weights' names.
    """

    case: Case
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    images: tuple[tuple[int, ...], ...] = ((0,), (0,))
    units: tuple[tuple[int, int], ...] = ()
    update: str = "sgd"
    factors: Mapping[str, float] = field(default_factory=dict)
    objective: Objective | None = None
    formula: Formula | None = None
    precision: str = "fp64"
    batch: int = 1
    blocks: tuple[int, int] | None = None
    store: str = HOST
    policy: str = ""
    compiles: bool = False

    def tilings(self, grid: tuple[int, int]) -> list[Tiling]:
        count = 1 + max(image for step in self.images for image in step)
        unit = self.case.footprint.alignment
        sizes = [(rows * unit + 1, cols * unit + 3) for rows, cols in self.units] or [self.case.raster] * count
        return [make_tiling(size, grid, self.case.footprint) for size in sizes]

    def dataset(self, grid: tuple[int, int]) -> Dataset:
        """Each image of its own noise; a tenth of the labels ignored."""
        draw, network, tilings = np.random.default_rng(5), self.case.unet, self.tilings(grid)
        images = [draw.normal(1.0, 2.0, (network.bands, *tiling.raster)) for tiling in tilings]
        labels = [draw.integers(0, network.classes, (1, *tiling.raster)).astype(np.uint8) for tiling in tilings]
        for number, own_HW in enumerate(labels):
            own_HW[draw.random(own_HW.shape) < (1.0 if self.units and number == 3 else 0.1)] = IGNORED
        readers = [[ArrayReader(pixels) for pixels in each] for each in (images, labels)]
        label_map, as_is = LabelMap.from_config(network.classes, IGNORED), Normalization.identity(network.bands)
        found = Dataset(*readers, tilings, label_map, as_is, INPUT_DTYPES[self.precision])
        found.margin = self.objective.margin if self.objective else 0
        return found

    def network(self) -> GraphNetwork:
        network = freeze(self.case.network(PARAMETER_DTYPES[self.precision]), self.factors)
        return network.follow(policies(network.graph)[self.policy]) if self.policy else network

    def optimizer(self, network: GraphNetwork) -> torch.optim.Optimizer:
        rate, decay = (0.01, 0.1) if self.update == "adamw" else (0.05, 0.0)
        update = OptimizerConfig(name=self.update, lr=rate, weight_decay=decay, lr_factors=dict(self.factors))
        return build_optimizer(parameter_groups(network.parameters_by_node(), update), update)

    def whole(self) -> Steps:
        """The same steps of whole images, for one rank; together where a norm sees several."""
        together = self.case.unet.norm == "batch" and any(len(step) > 1 for step in self.images)
        parallel = ParallelConfig(halo="layer", mesh=[1, 1]) if together else ParallelConfig()
        case = replace(self.case, grid=(1, 1))
        return replace(self, case=case, parallel=parallel, batch=1, blocks=None, policy="", compiles=False)


@dataclass
class Run:
    """The figures of steps; of stages, those of this rank."""

    losses: list[float | None]
    validation: float
    gradients: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]


def plans(steps: Steps, ranks: int) -> tuple[Spread, PipelinePlan | None]:
    asked, graph, bands = parallelism(steps.parallel), steps.case.unet.graph(), steps.case.unet.bands
    tilings, images = steps.tilings(steps.case.grid), max(map(len, steps.images))
    blocks = None if steps.blocks is None else BlockSettings(steps.blocks)
    given = {"precision": "fp64", "images_per_step": images, "blocks": blocks}
    spread = choose_spread(RunQuestion(steps.case.unet, (), ranks, 2**60, asked, **given), tilings)
    largest = micro_batch_size(spread, graph, tilings, tilings[0].contexts * images, images, 8)
    return spread, plan_pipeline(asked, graph, bands, largest, None) if asked.stages > 1 else None


def train(steps: Steps, mesh: Mesh) -> Run:
    """Steps as the trainer makes them, with all that communicates. Collective."""
    network, data = steps.network().train(), steps.dataset(steps.case.grid)
    spread, pipeline = plans(steps, mesh.size)
    run = ParallelRun(spread, network, mesh, steps.precision, pipeline, steps.blocks, steps.store, steps.compiles)
    passes, optimizer = run.over(data.tilings, steps.batch), steps.optimizer(network)
    objective = steps.objective or Objective((PixelTerm(IGNORED),))
    stepper, losses = Stepper(optimizer, mesh, passes, run.axes, objective, KEY.seed), []
    for number, images in enumerate(steps.images):
        parts = passes.mode.share([TileReference(i, t) for i in images for t in range(len(data.tilings[i]))])
        again = [part for _ in range(stepper.rounds(parts)) for part in parts]
        losses.append(stepper.run(number, read_ahead(passes, data, again, 0), parts, stop=False)[0]["loss"])
        agree_on_buffers(network, run.axes.weights, passes.mode.speaks(parts))
    check_agreement(network, mesh, run.axes.weights)
    frozen = [p for p in network.parameters() if not p.requires_grad]
    assert all(p.grad is None and p not in optimizer.state for p in frozen)
    gradients = {n: p.grad.clone() for n, p in network.named_parameters() if p.grad is not None and not p.is_meta}
    data.margin = 0
    findings = validate(network, data, mesh, run.over(data.tilings), 1)
    stepper.close()
    run.close()
    return Run(losses, findings.line()["loss"], gradients, {n: t.clone() for n, t in own_state(network).items()})


def by_torch(steps: Steps) -> Run:
    """Whole images stacked to a batch, torch's own batch norm, loss and optimizer."""
    network, data = steps.case.network().train(), steps.dataset((1, 1))
    network.layers.update({name: _native(module) for name, module in network.layers.items()})
    for name, parameter in network.parameters_by_node():
        parameter.requires_grad = factor_of(name, steps.factors) != 0
    trained = [p for p in network.parameters() if p.requires_grad]
    sgd = steps.update == "sgd"
    optimizer = (
        torch.optim.SGD(trained, 0.05, momentum=0.9) if sgd else torch.optim.AdamW(trained, 0.01, weight_decay=0.1)
    )
    samples = [data.load(image, tiling.tiles[0]) for image, tiling in enumerate(data.tilings)]

    def loss(images: tuple[int, ...], formula: Formula = functional.cross_entropy) -> torch.Tensor:
        x_BCHW = torch.stack([torch.from_numpy(samples[image].x_CHW) for image in images])
        y_P = torch.stack([torch.from_numpy(samples[image].y_HW) for image in images]).long().flatten()
        rows, cols = samples[0].tile.core_in_output.slices
        scores_PK = network(x_BCHW)[:, :, rows, cols].permute(0, 2, 3, 1).reshape(len(y_P), -1)
        return formula(scores_PK[y_P != IGNORED], y_P[y_P != IGNORED])

    losses: list[float | None] = []
    for number, images in enumerate(steps.images):
        set_dropout_key(network, *(replace(KEY, step=number, image=image) for image in images))
        optimizer.zero_grad()
        found = loss(images, steps.formula or functional.cross_entropy)
        found.backward()
        optimizer.step()
        losses.append(found.item())
    gradients = {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    network.eval()
    with torch.no_grad():
        validation = loss(tuple(range(len(samples)))).item()
    return Run(losses, validation, gradients, state)


def _native(module: nn.Module) -> nn.Module:
    """torch's own batch norm in the place of the project's; in evaluation for ever where its statistics stand still."""
    if not isinstance(module, nn.BatchNorm2d):
        return module
    norm = nn.BatchNorm2d(module.num_features, momentum=module.momentum).double()
    norm.load_state_dict(module.state_dict())
    if not module.training:
        norm.eval().train = lambda mode=True: norm  # type: ignore[method-assign, assignment]
    return norm


def tiled_logits(case: Case, precision: str = "fp64", grid: tuple[int, int] | None = None) -> torch.Tensor:
    """The logits of the first image from its tiles, of the case's grid unless given."""
    network = case.network(PARAMETER_DTYPES[precision]).train()
    dataset = Steps(case, precision=precision).dataset(grid or case.grid)
    set_dropout_key(network, KEY)
    logits_KHW = torch.zeros(case.unet.classes, *case.raster, dtype=PARAMETER_DTYPES[precision])
    with torch.no_grad():
        for tile in dataset.tilings[0].tiles:
            places = tile_places(network.graph, dataset.tilings[0].whole, tile.context)
            output_BKHW = network(as_batch(dataset.load(0, tile).x_CHW), places)
            logits_KHW[(slice(None), *tile.core.slices)] = output_BKHW[(0, slice(None), *tile.core_in_output.slices)]
    return logits_KHW


def by_one_rank(steps: Steps) -> Run:
    """The same steps of whole images."""
    return train(steps.whole(), one_rank())


@lru_cache(maxsize=2)
def expected(steps: Steps) -> Run:
    """Return the steps by torch where that can be; the tests of one `steps` follow each other."""
    if steps.units or (steps.objective is not None and steps.formula is None):
        return by_one_rank(steps)
    return by_torch(steps)


def gathered(run: Run, mesh: Mesh) -> Run:
    """The gradients and weights of all stages together, on every rank. Collective."""
    parts = mesh.communicator.gather_objects((run.gradients, run.state))
    gradients, state = ({n: t for part in parts for n, t in part[number].items()} for number in (0, 1))
    return replace(run, gradients=gradients, state=state)


def check(steps: Steps, mesh: Mesh, reference: Callable[[Steps], Run] = expected, bound: float = 1e-11) -> None:
    """Ranks get what is expected. Collective."""
    torch.set_num_threads(1)
    found = gathered(train(steps, mesh), mesh)
    wanted = mesh.on_root(lambda: reference(steps))
    assert found.losses == pytest.approx(wanted.losses, rel=bound)
    assert found.validation == pytest.approx(wanted.validation, rel=bound)
    assert difference(found.gradients, wanted.gradients) < bound
    assert difference(found.state, wanted.state) < bound
    assert difference(steps.network().state_dict(), wanted.state) > 1e-5, "weights have moved"


def check_same_bits(found: Run, wanted: Run) -> None:
    assert (found.losses, found.validation) == (wanted.losses, wanted.validation)
    for own, other in ((found.gradients, wanted.gradients), (found.state, wanted.state)):
        assert [name for name in other if not torch.equal(own[name], other[name])] == []
