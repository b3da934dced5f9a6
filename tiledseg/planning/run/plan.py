"""The plan of a run: all that is decided before a rank starts, by one function, for every command.

Training with its validation, prediction and `plan` ask it. It needs no torch: what only a device can tell, the memory
that is free and the times of layers and messages, it is given. Who runs a plan decides nothing any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tiledseg.architecture.network import Network
from tiledseg.errors import BudgetError, ConfigError, GeometryError, InputError
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.halo import Footprint, network_footprint
from tiledseg.geometry.sharing.decomposition import decompose
from tiledseg.geometry.sharing.mesh_shape import MeshShape
from tiledseg.geometry.tiling import Tiling, make_tiling
from tiledseg.planning.cost_model.machine import Machine
from tiledseg.planning.cost_model.prices import Prices
from tiledseg.planning.cost_model.step_time import NO_TIME
from tiledseg.planning.modes.mode_cost import ModeCost, Task, mode_cost
from tiledseg.planning.run.blocks import BlockPlan, BlocksAsked
from tiledseg.planning.run.fit import Fitting, images_at_once
from tiledseg.planning.run.grids.grid import choose_grid
from tiledseg.planning.run.grids.quick_grid import quickest_grid
from tiledseg.planning.run.memory import OffloadPlan
from tiledseg.planning.run.norms import check_statistics, exact_modes, norm_fault, of_steps
from tiledseg.planning.run.pipeline import (
    MeasuredTimes,
    MicroBatchSize,
    PipelinePlan,
    micro_batch_size,
    modelled,
    plan_pipeline,
    rebuilt_pipeline,
)
from tiledseg.planning.run.question import Extent, RunQuestion
from tiledseg.planning.run.spread import Spread, choose_mesh, choose_spread, idle_note, read_spread
from tiledseg.planning.walk.step_memory import copies_memory, fixed_memory, training_memory

if TYPE_CHECKING:
    from tiledseg.planning.memory.choice import MemoryChoice

_FINER = 2, 3, 4, 6, 8  # times the tiles along each dim
_RANKS = 2, 4, 8  # times the ranks that there are


@dataclass(frozen=True)
class RunPlan:
    """What a run does, the same on all ranks: a value that one of them computes.

    `tilings` of the question's rasters, then of those that are turned too, rows for columns; `held_out` of those
    validated on. `cost`: predicted of a training step without stages, its `memory` that of the rank that needs most.
    `seconds`: of a step on the largest rasters, None where `has_seconds` is not so, or where images go through the
    network together; with stages, see `PipelinePlan`. `pipeline`: None without stages, and until the times are known
    that it waits for. Of windows `tilings` are what a step computes (see `Windows.tilings`), and `validation` is how
    the rasters held out are spread. `blocks`: None where tiles are computed whole. `rebuilt`: what is computed
    once more in the backward pass so that a step fits the memory, None where everything is kept. `offloaded`: how much
    of it stays in memory, None where all does.
    """

    network: Network
    footprint: Footprint
    tilings: tuple[Tiling, ...]
    held_out: tuple[Tiling, ...]
    spread: Spread
    micro_batch: MicroBatchSize
    cost: ModeCost
    seconds: float | None
    pipeline: PipelinePlan | None
    warnings: tuple[str, ...]
    validation: Spread
    tiles_per_batch: int = 1
    blocks: BlockPlan | None = None
    rebuilt: MemoryChoice | None = None
    offloaded: OffloadPlan | None = None

    @property
    def memory(self) -> int:
        return self.cost.memory


def plan_run(question: RunQuestion) -> RunPlan:
    """The plan of a run. Raises ConfigError or GeometryError for the first thing that cannot be."""
    if question.blocks is None or not question.blocks.if_needed:
        return _plan(question)
    whole = replace(question, blocks=None)
    return _plan(whole) if question.parallel.stages > 1 else _whole_or_in_blocks(question, whole)


def _whole_or_in_blocks(question: RunQuestion, whole: RunQuestion) -> RunPlan:
    """Plan blocks where no plan of `whole` tiles fits. Raises BudgetError or GeometryError where nothing does."""
    plan, refused = None, None
    try:
        plan = _plan(whole)
    except (BudgetError, GeometryError) as error:
        refused = error
    if plan is not None and plan.memory <= question.memory:
        return plan
    assert question.blocks is not None, "blocks are set"
    try:
        in_blocks = _plan(replace(question, blocks=replace(question.blocks, if_needed=False)))
    except InputError:
        in_blocks = None
    if in_blocks is not None and in_blocks.blocks is not None and in_blocks.memory <= question.memory:
        return in_blocks
    if refused is not None:
        raise refused
    assert plan is not None, "a plan, or an error"
    return plan


@contextmanager
def naming_a_remedy(question: RunQuestion) -> Iterator[None]:
    """Add a setting that fits to a budget that is refused within, unless the error names a grid that does."""
    try:
        yield
    except BudgetError as refused:
        fits = None if refused.names_grid else setting_that_fits(question, question.memory)
        if fits is None:
            raise
        error = BudgetError(f"{refused}. By the plan this budget fits {fits}")
        error.least = refused.least
        raise error from None


def setting_that_fits(question: RunQuestion, memory: int) -> str | None:
    """Return the first of some settings, in words, under which a step takes at most `memory` bytes by its plan. None of
    them changes the result."""
    parallel = replace(question.parallel, timed=False)
    base = replace(question, memory=memory, budgeted=False, parallel=parallel)
    return next((words for words, each in _other_settings(base) if _fits(each)), None)


def _fits(question: RunQuestion) -> bool:
    try:
        return plan_run(question).memory <= question.memory or question.parallel.stages > 1
    except InputError:
        return False


def _other_settings(base: RunQuestion) -> Iterator[tuple[str, RunQuestion]]:
    """Yield settings and their questions: finer grids, or more ranks for an image that ranks share; then recomputation
    of whole stages, or blocks in a file."""
    parallel = base.parallel
    if base.grid is not None and base.windows is None and parallel.halo != "layer":
        for times in _FINER:
            rows, cols = base.grid[0] * times, base.grid[1] * times
            yield f"tiling.grid [{rows},{cols}]", replace(base, grid=(rows, cols))
    if parallel.halo == "layer" and parallel.mesh is None:
        for times in _RANKS:
            yield f"{base.ranks * times} ranks", replace(base, ranks=base.ranks * times)
    if parallel.stages > 1:
        always = replace(parallel, recompute=("always",) * parallel.stages)
        yield "parallel.recompute always", replace(base, parallel=always)
    elif not (base.blocks and base.blocks.in_file):
        blocks = BlocksAsked(None, in_file=True)
        yield "memory.blocks auto with memory.store", replace(base, blocks=blocks, offload=False)


def _plan(question: RunQuestion) -> RunPlan:
    """With tiles whole, or in blocks."""
    plan = plan_unbalanced(question)
    waits = question.waits_for_times and not question.is_profiled
    return plan if waits else balanced(question, plan)


def plan_unbalanced(question: RunQuestion) -> RunPlan:
    """The same but for the balance of a pipeline. Raises as `plan_run` does for all else."""
    network, parallel, value = question.network, question.parallel, question.value_bytes
    images, speed = question.images_per_step, question.machine or Machine()
    graph = question.graph
    footprint = network_footprint(graph, question.halo, parallel.exact)
    cut, held_out = _cut(question, footprint)
    tilings = cut if question.validates_alone else (*cut, *held_out)
    batch, in_blocks = images_at_once(question, graph), question.blocks is not None
    in_step = question.items_per_step if parallel.halo == "read" else images
    asked = question.ranks, in_step, network.bands, value, speed, not in_blocks, batch
    spread = choose_spread(parallel, graph, tilings, *asked)
    check_statistics(graph, network.bands, tilings, spread.mode, question.trains, question.keyed)
    mesh = spread.mesh
    if not spread.shares_images:  # tiles are dealt out: to each rank about as many as a block of the image has
        mesh = choose_mesh(parallel.mesh, tilings, question.ranks, images, parallel.stages)
    validation = _validation(question, graph, held_out, spread)
    costs = [step_cost(spread, mesh, graph, cut, network.bands, value, images, speed, batch)]
    if held_out:
        alone = choose_mesh(None, held_out, question.ranks, 1, parallel.stages) if question.validates_alone else mesh
        costs.append(step_cost(validation, alone, graph, held_out, network.bands, value, images, speed, batch))
    in_step = question.tiles_per_step or max(map(len, cut)) * images
    largest = micro_batch_size(spread, graph, tilings, in_step, images, value)
    task = step_task(mesh, graph, cut, network.bands, value, images, batch)
    fitting = Fitting(question, spread, task, cut, tilings, largest, in_step, batch)
    fit = fitting.fit(costs[0].memory, max(cost.memory for cost in costs))
    cost = replace(costs[0], memory=fit.memory)
    idle = idle_note(spread, question.ranks, images, batch, question.trains)
    if idle and not parallel.idle_ranks:
        raise ConfigError(f"{idle}, or set parallel.idle_ranks true")
    notes = (
        fitting.note(fit),
        idle,
        _inexact(question, graph, tilings, footprint, spread),
    )
    warnings = tuple(filter(None, notes))
    seconds = cost.seconds if question.has_seconds and (question.is_profiled or not spread.together) else None
    decided = network, footprint, cut, held_out, spread, largest, cost, seconds, None, warnings, validation
    return RunPlan(*decided, fit.tiles, fit.blocks, fit.rebuilt, fit.offloaded)


def balanced(question: RunQuestion, plan: RunPlan, measured: MeasuredTimes | None = None) -> RunPlan:
    """The plan with the balance of its pipeline, by times that were `measured`, else by what is known of the machine,
    else by multiply-adds."""
    network, graph, machine = plan.network, question.graph, question.machine
    known = machine if question.trains and question.parallel.stages > 1 and question.is_profiled else None
    if measured is None and known:
        measured = modelled(known, graph, network.bands, plan.micro_batch, question.ranks)
    limit, rebuilt = question.memory if question.trains else None, plan.rebuilt
    asked = question.parallel, graph, network.bands, plan.micro_batch
    try:
        pipeline = plan_pipeline(*asked, limit, measured)
    except ConfigError:
        may_rebuild = question.recompute == "auto" and not question.offload
        found = rebuilt_pipeline(*asked, limit, measured) if limit and may_rebuild else None
        if found is None:
            raise
        pipeline, rebuilt = found
    if pipeline is None:
        return plan
    once = once_a_step(graph, network.bands, question.value_bytes, known, plan.spread.mesh) if known else 0.0
    seconds = None if pipeline.seconds is None else pipeline.seconds + once
    return replace(plan, pipeline=pipeline, seconds=seconds, rebuilt=rebuilt)


def step_cost(
    spread: Spread,
    mesh: MeshShape,
    graph: Graph,
    tilings: Sequence[Tiling],
    bands: int,
    value_bytes: int,
    images_per_step: int,
    machine: Machine,
    batch: int = 1,
) -> ModeCost:
    """Predict a training step without stages on `images_per_step` images like the largest of `tilings`, over `mesh`.

    `memory` is of the tiling that needs most, and of as many images as go through the network together, `batch` of them
    at once.
    """
    task = step_task(mesh, graph, tilings, bands, value_bytes, images_per_step, batch)
    largest, images = task.decomposition.tiling, task.images
    cost = mode_cost(task, machine, spread.mode, spread.fusion)
    if spread.together:
        weights, copies = fixed_memory(graph, bands, value_bytes), copies_memory(graph, bands, value_bytes)
        further = (-(-images // batch) - 1) * copies  # each batch has a use of the weights of its own
        return replace(cost, memory=images * cost.memory - (images - 1) * weights + further)
    others = {tiling.context_max for tiling in tilings if not spread.shares_layers} - {largest.context_max}
    needed = [training_memory(graph, bands, context, value_bytes).total for context in others]
    return replace(cost, memory=max([cost.memory, *needed]))


def once_a_step(graph: Graph, bands: int, value_bytes: int, machine: Machine, mesh: MeshShape) -> float:
    """Return the seconds after the passes of a pipeline, whose stages hold about as many weights each."""
    prices = Prices(graph, bands, value_bytes, machine, mesh.ranks // mesh.stages)
    return prices.step(NO_TIME, 0, 0.0).seconds / mesh.stages


def step_task(
    mesh: MeshShape,
    graph: Graph,
    tilings: Sequence[Tiling],
    bands: int,
    value_bytes: int,
    images_per_step: int,
    batch: int = 1,
) -> Task:
    """Return the step on the largest of `tilings`."""
    largest = max(tilings, key=lambda tiling: tiling.raster[0] * tiling.raster[1])
    images = min(images_per_step, batch * -(-images_per_step // (batch * mesh.replicas)))
    return Task(graph, bands, decompose(largest, (mesh.rows, mesh.cols)), value_bytes, images, mesh.replicas)


def _cut(question: RunQuestion, footprint: Footprint) -> tuple[tuple[Tiling, ...], tuple[Tiling, ...]]:
    """The tilings of what is trained on, and of what is held out."""
    cut, held_out = (
        tuple(make_tiling(extent.shape, run_grid(question, footprint, extent), footprint) for extent in extents)
        for extents in (() if question.windows else question.rasters, question.held_out)
    )
    if question.windows:
        cut = question.windows.tilings([extent.shape for extent in question.rasters], footprint)
    turned = (make_tiling(cut[k].raster[::-1], cut[k].grid[::-1], footprint) for k in question.turned)
    return (*cut, *turned), held_out


def _validation(question: RunQuestion, graph: Graph, held_out: Sequence[Tiling], spread: Spread) -> Spread:
    """How rasters held out are spread: as the training is, or, beside windows that are images, tiles dealt out. Raises
    ConfigError where a norm would see less than its image then."""
    if not question.validates_alone:
        return spread
    bands, tiles = question.network.bands, max(map(len, held_out), default=1)
    found = read_spread(question.parallel, graph, held_out, question.ranks, bands, question.blocks is None)
    check_statistics(graph, bands, held_out, found.mode, False, question.keyed)
    fault = norm_fault(graph, found.mode, tiles, 1, False, question.keyed)
    if fault and question.parallel.exact:
        raise ConfigError(f"of the validation: {fault}, or accept it with parallel.exact false")
    return found


def run_grid(question: RunQuestion, footprint: Footprint, extent: Extent) -> tuple[int, int]:
    """Rows and columns of tiles of a raster: as asked for, as the raster has been cut, or auto: the fewest that fit, or
    on a machine with a profile those that it is quickest with.

    Auto leaves the image whole where a norm would see less of it than it must, and where blocks take its place.
    """
    given, parallel = question.grid or extent.grid, question.parallel
    if given is not None:
        return given
    graph = question.graph
    halo, trains = ("read", False) if question.validates_alone else (parallel.halo, question.trains)
    if parallel.exact and halo not in exact_modes(graph, tiles=2, trains=trains):
        return 1, 1
    pipelines = max(1, question.ranks // parallel.stages)
    if question.blocks is not None and halo != "layer":
        return 1, 1
    bands, value = question.network.bands, question.value_bytes
    fewest = choose_grid(extent.shape, graph, footprint, question.memory, value, pipelines, bands)
    if question.machine is None or not question.machine.known or halo == "layer":
        return fewest
    asked = extent.shape, footprint, graph, bands, value, question.machine, pipelines, question.trains
    return quickest_grid(fewest, *asked)


def _inexact(
    question: RunQuestion, graph: Graph, tilings: Sequence[Tiling], footprint: Footprint, spread: Spread
) -> str | None:
    """What tiling would change: a ConfigError, or a warning where `parallel.exact` is false."""
    at_once = 1 if spread.together else question.items_per_step
    tiles = max(map(len, tilings))
    if question.windows:
        tiles = max(tiles, question.windows.parts([extent.shape for extent in question.rasters], footprint))
    fault = norm_fault(graph, spread.mode, tiles, at_once, question.trains, question.keyed)
    if fault and question.windows and question.windows.exact:
        fault = "a norm over windows with halos would see a part of the image; use train.window_halo none" + (
            " with parallel.halo layer or memory.blocks, or norm none or pixel"
            if of_steps(graph)
            else ", or norm none or pixel"
        )
    if fault and question.parallel.exact:
        raise ConfigError(f"{fault}, or accept it with parallel.exact false")
    return f"not exact: {fault}" if fault else None
