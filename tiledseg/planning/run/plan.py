"""The plan of a run: all that is decided before a rank starts, by one function, for every command.

It needs no torch. The free memory is handed to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tiledseg.architecture.network import Network
from tiledseg.errors import BudgetError, ConfigError, GeometryError, InputError
from tiledseg.geometry.halo import Footprint, minimum_halo, network_footprint
from tiledseg.geometry.sharing.decomposition import MeshShape, decompose
from tiledseg.geometry.sharing.layer_windows import layer_blocks
from tiledseg.geometry.tiling import Tiling, make_tiling
from tiledseg.planning.run.blocks import BlockPlan, BlockSettings, blocks_of, seen_whole
from tiledseg.planning.run.grid import (
    CROPS_BATCHED,
    CROPS_SIDE,
    MAP_HALOS,
    MAP_SIDE,
    check_tiles,
    choose_grid,
)
from tiledseg.planning.run.memory import OffloadPlan, memory_note, offload_by, plan_offload, plan_rebuilt, why_alone
from tiledseg.planning.run.pipeline import PipelinePlan, layer_times, plan_pipeline
from tiledseg.planning.run.question import Extent, RunQuestion
from tiledseg.planning.run.spread import (
    MicroBatchSize,
    Spread,
    check_statistics,
    choose_mesh,
    goes_together,
    idle_note,
    largest_input,
    measuring,
    micro_batch_size,
    norm_fault,
)
from tiledseg.planning.walk.cost_model import Prices, StepTime
from tiledseg.planning.walk.mode_cost import (
    ModeCost,
    check_blocks,
    choose_fusion,
    exchange_cost,
    fusion_word,
    layer_cost,
    read_cost,
)
from tiledseg.planning.walk.step_memory import fixed_memory, training_memory, weight_memory

if TYPE_CHECKING:
    from tiledseg.planning.walk.choice import MemoryChoice


@dataclass(frozen=True)
class RunPlan:
    """The decisions on a run. One rank computes them, and all ranks follow them.

    `tilings`: of the question's rasters, then of the transposed ones; with windows, the tilings of a step (see
    `WindowSteps`). `held_out`: of the rasters validated on, spread as `validation` says. `cost`: predicted of a
    training step on images like the largest. `seconds`: those of the cost; None without a machine, and for a step of
    tiles. `pipeline`, `micro_batch`: None without stages. `blocks`: None where tiles are computed whole. `rebuilt`: the
    tensors that are recomputed so that a step fits the memory, None where everything is kept. `offloaded`: the
    offloaded bytes, None without offload.
    """

    network: Network
    footprint: Footprint
    tilings: tuple[Tiling, ...]
    held_out: tuple[Tiling, ...]
    spread: Spread
    cost: ModeCost
    seconds: float | None
    warnings: tuple[str, ...]
    validation: Spread
    pipeline: PipelinePlan | None = None
    micro_batch: MicroBatchSize | None = None
    tiles_per_batch: int = 1
    blocks: BlockPlan | None = None
    rebuilt: MemoryChoice | None = None
    offloaded: OffloadPlan | None = None

    @property
    def memory(self) -> int:
        return self.cost.memory


def plan_run(question: RunQuestion) -> RunPlan:
    """Plan a run. Blocks that are allowed `if_needed` are planned where no plan of whole tiles fits the memory. Raises
    ConfigError or GeometryError for the first setting that cannot be."""
    if question.blocks is None or not question.blocks.if_needed:
        return _plan(question)
    whole, plan = replace(question, blocks=None), None
    if question.parallel.stages > 1:
        return _plan(whole)
    with suppress(BudgetError, GeometryError):
        plan = _plan(whole)
    if plan is None or plan.memory > question.memory:
        with suppress(InputError):  # the plan of whole tiles says what is wrong
            in_blocks = _plan(replace(question, blocks=replace(question.blocks, if_needed=False)))
            if in_blocks.memory <= question.memory:
                return in_blocks
    return plan or _plan(whole)


def _plan(question: RunQuestion) -> RunPlan:
    """Plan a run with whole tiles, or in blocks where the question has settings of them."""
    network, parallel, value, settings = question.network, question.parallel, question.value_bytes, question.blocks
    graph, bands, images, budget = question.graph, network.bands, question.images_per_step, question.memory
    footprint, batch = network_footprint(graph, question.halo, parallel.exact), 1
    if graph.is_untraced:
        cuts = {
            f"parallel.halo is {parallel.halo}": parallel.halo == "layer",
            f"parallel.stages is {parallel.stages}": parallel.stages > 1,
            "memory.blocks is given": settings is not None,
        }
        for key in (key for key, holds in cuts.items() if holds):
            raise ConfigError(f"{key}, but the module is not traced, and runs whole; leave {key.split()[0]} out")
    cut, held_out = _tilings(question, footprint)
    tilings = cut if question.validates_alone else (*cut, *held_out)
    if question.trains and goes_together(parallel, graph, images):
        batch = min(question.tiles_per_batch or 1, images)
    spread = choose_spread(question, tilings, batch)
    check_statistics(graph, bands, tilings, spread.mode, question.trains, question.keyed)
    validation = spread
    if question.validates_alone:  # by tiles dealt out, beside windows that are images
        dealt = {"parallel": replace(parallel, halo="read"), "windows": None, "trains": False}
        validating = replace(question, images_per_step=1, tiles_per_step=None, **dealt)  # type: ignore[arg-type]
        validation = choose_spread(validating, held_out)
        check_statistics(graph, bands, held_out, "read", False, question.keyed)
        _inexact(validating, held_out, footprint, validation, "of the validation: ")

    cost = step_cost(question, spread, cut, batch)
    needed = most = cost.memory
    if held_out:
        most = max(most, step_cost(question, validation, held_out, batch).memory)
    contexts = max(cut, key=len).contexts * images  # of a step's tiles
    if question.tiles_per_step:
        contexts = [max(tiling.context_max for tiling in cut)] * question.tiles_per_step
    idle = idle_note(spread, question.ranks, images, batch, question.trains)
    if idle and not parallel.idle_ranks:
        raise ConfigError(f"{idle}, or set parallel.idle_ranks true")
    inexact = _inexact(question, tilings, footprint, spread)

    blocks = rebuilt = offloaded = None
    tiles_per_batch = 1
    if settings is not None:
        if question.tiles_per_batch not in (None, 1):
            raise ConfigError(
                f"train.tiles_per_batch is {question.tiles_per_batch}, but memory.blocks computes a part of one tile "
                "at a time; leave it out"
            )
        together = None  # images of a rank that go through the network together
        if spread.together:  # whole images are dealt by size: no rank has more pixels than so many of the largest
            together = cost.images if spread.shares_images else -(-question.items_per_step // question.ranks)
        blocks = _blocks(question, settings, spread, tilings, together)
        if question.budgeted and blocks.memory > budget:
            raise BudgetError(
                f"memory.budget is {budget} bytes, but a training step in at most {blocks.shape[0]} x "
                f"{blocks.shape[1]} blocks a tile needs {blocks.memory}; use {blocks.remedy}, or a larger budget"
            )
        memory, memory_warning = blocks.memory, blocks.note(budget)
    else:
        tiles, further_bytes = question.tiles_per_batch or 1, 0
        if spread.together or not question.trains:
            tiles = 1
        if tiles > 1:
            alone = why_alone(graph, spread, question.precision == "fp64")
            if alone is not None:
                raise ConfigError(f"train.tiles_per_batch is {tiles}, but {alone}; or leave it out")
            tiles = min(tiles, len(contexts))
            tile = training_memory(graph, bands, largest_input(spread, graph, tilings), value)
            further_bytes = (tiles - 1) * (tile.activations + tile.backward)
        tiles_per_batch, memory = batch if spread.together else tiles, most + further_bytes
        if question.offload:
            offloaded = plan_offload(question, spread, largest_input(spread, graph, tilings), needed, tiles)
            memory = offloaded.memory
        elif question.trains:
            together = cost.images if spread.together else tiles
            rebuilt = plan_rebuilt(question, spread, cut, needed + further_bytes, together)
            if rebuilt is not None:
                memory, offloaded = rebuilt.peak, offload_by(rebuilt)
        if offloaded is not None:
            kept, staying = (size * tiles_per_batch for size in (offloaded.kept, offloaded.staying))
            offloaded = replace(offloaded, kept=kept, staying=staying)
        memory_warning = memory_note(question, spread, memory)

    slower = blocks or rebuilt
    if slower is not None:  # by computing once more, and waiting for a store
        again = slower.extra * (cost.time.forward + cost.time.backward)
        longer = cost.seconds + again * question.figures.taking_turns(cost.ranks)
        cost = replace(cost, seconds=longer, time=cost.time._replace(again=again))
    whole = question.trains and question.tiles_per_step is None and parallel.stages == 1
    known = question.figures.known or (question.machine is not None and not spread.together)
    seconds, notes = cost.seconds if whole and known else None, tuple(filter(None, (memory_warning, idle, inexact)))
    cost = replace(cost, memory=memory)
    plan = RunPlan(network, footprint, cut, held_out, spread, cost, seconds, notes, validation)
    plan = replace(plan, tiles_per_batch=tiles_per_batch, blocks=blocks, rebuilt=rebuilt, offloaded=offloaded)
    if parallel.stages == 1:
        return plan
    return _balanced(question, plan, micro_batch_size(spread, graph, tilings, contexts, images, value))


def _blocks(
    question: RunQuestion, settings: BlockSettings, spread: Spread, tilings: Sequence[Tiling], together: int | None
) -> BlockPlan:
    """Plan the blocks of images cut by `tilings`. `together`: images of a rank that go through the network together.
    Raises ConfigError where a rank has halos of whole tiles, or some layers only."""
    graph, conflict = question.graph, None
    if spread.shares_images and not spread.shares_layers:
        conflict = f"halo {spread.mode} a rank has halos of whole tiles; use parallel.halo layer or read"
    elif spread.overlap or spread.fusion > 1:
        word = "overlap true" if spread.overlap else f"fusion {fusion_word(spread.fusion)}"
        conflict = f"{word} tensors are computed whole; leave one of them out"
    elif spread.mesh.stages > 1:
        conflict = f"stages {spread.mesh.stages} no whole image passes through a rank; use parallel.stages 1"
    if passing := seen_whole(graph):
        what = f"memory.blocks is set, but '{passing}' takes products over the whole image, all of it at once"
        raise ConfigError(f"{what}; leave memory.blocks out, and spread the image over ranks by parallel.halo layer")
    if conflict is not None:
        raise ConfigError(f"memory.blocks is set, but with parallel.{conflict}, or leave memory.blocks out")
    context, shared = max((tiling.context_max for tiling in tilings), key=math.prod), None
    if spread.shares_layers:
        largest = max(tilings, key=lambda tiling: math.prod(tiling.raster))
        image = layer_blocks(largest, graph, (spread.mesh.rows, spread.mesh.cols))
        context, shared = image.whole.shape, (image.rows, image.cols)
    of_step = question.network.bands, context, question.value_bytes, question.memory, question.trains
    return blocks_of(settings, graph, *of_step, shared, together)


def _balanced(question: RunQuestion, plan: RunPlan, largest: MicroBatchSize) -> RunPlan:
    """Return the plan with the balance of its pipeline, and the cost of a step on its stages. Raises ConfigError where
    no stages fit the memory."""
    graph, bands, machine, mesh = question.graph, plan.network.bands, question.figures, plan.spread.mesh
    times = layer_times(machine, graph, bands, largest, question.ranks)
    limit = question.memory if question.trains else None
    rebuilds = question.trains and question.recompute == "auto" and not question.offload
    pipeline = plan_pipeline(question.parallel, graph, bands, largest, limit, times, rebuilds)
    rebuilt, turns = pipeline.rebuilt, machine.taking_turns(question.ranks)
    time = StepTime(*plan.cost.time[:2]).times(1 / mesh.stages)
    computing, again = sum(time), rebuilt.extra * sum(time) if rebuilt else 0.0
    # Stages have about equally many weights. Their ranks wait where they do not compute.
    prices = Prices(graph, bands, question.value_bytes, machine, mesh.ranks // mesh.stages)
    seconds = pipeline.seconds + sum(prices.step(StepTime(), 0, 0.0)) / mesh.stages
    time = time._replace(again=again, waiting=seconds - turns * computing)
    memory = rebuilt.peak if rebuilt else pipeline.memory
    cost = replace(plan.cost, memory=memory, ranks=mesh.ranks, seconds=seconds + turns * again, time=time)
    known = cost.seconds if machine.known and question.trains else None
    return replace(plan, pipeline=pipeline, micro_batch=largest, cost=cost, seconds=known, rebuilt=rebuilt)


def step_cost(question: RunQuestion, spread: Spread, tilings: Sequence[Tiling], batch: int = 1) -> ModeCost:
    """Predict a training step without stages on images like the largest of `tilings`. With stages each pipeline counts
    as one rank.

    `memory` is that of the tiling that needs most. It holds all images that go through the network together, in batches
    of `batch`.
    """
    mesh, images, value = spread.mesh, question.images_per_step, question.value_bytes
    of_network, ranks = (question.graph, question.network.bands), question.ranks // mesh.stages
    largest = max(tilings, key=lambda tiling: math.prod(tiling.raster))
    if spread.shares_images:
        images, ranks = min(images, batch * -(-images // (batch * mesh.replicas))), mesh.ranks // mesh.stages
    prices = Prices(*of_network, value, question.figures, ranks)
    if spread.shares_layers:
        cut = layer_blocks(largest, question.graph, (mesh.rows, mesh.cols), spread.fusion)
        cost = layer_cost(prices, cut, spread.fusion, images)
    elif spread.shares_images:
        cost = exchange_cost(prices, decompose(largest, (mesh.rows, mesh.cols)), images)
    else:
        tiles = question.tiles_per_batch if question.trains and not spread.together else 1
        cost = read_cost(prices, largest, images, tiles or 1)
    if spread.shares_images and spread.together:
        weights, copies = fixed_memory(*of_network, value), weight_memory(*of_network, value).copies
        further = (-(-images // batch) - 1) * copies  # each batch casts the weights anew
        return replace(cost, memory=images * cost.memory - (images - 1) * weights + further)
    others = {tiling.context_max for tiling in tilings if not spread.shares_layers}
    needed = [training_memory(*of_network, context, value).total for context in others]
    return replace(cost, memory=max([cost.memory, *needed]))


def choose_spread(question: RunQuestion, tilings: Sequence[Tiling], batch: int = 1) -> Spread:
    """Spread a run on rasters cut by `tilings`. `batch`: images that a replica runs at once, where images go through
    the network together.

    Raises ConfigError for a mesh of more ranks than the job, or than some image has tiles, and for a rank that would
    own nothing of some layer's output.
    """
    parallel, graph, bands, value = question.parallel, question.graph, question.network.bands, question.value_bytes
    ranks, stages, images = question.ranks, parallel.stages, question.images_per_step
    whole_tiles = question.blocks is None
    if ranks < stages:
        raise ConfigError(
            f"parallel.stages is {stages}, but the job has {ranks} ranks; start {stages} ranks or a multiple of them, "
            "or use fewer stages"
        )
    if parallel.halo != "layer" and whole_tiles:
        for tiling in tilings:
            check_tiles(tiling, graph, bands)
    if parallel.halo == "read":
        in_blocks = not whole_tiles and all(len(tiling) == 1 for tiling in tilings)
        together = goes_together(parallel, graph, question.items_per_step, in_blocks)
        return Spread(mesh=MeshShape(ranks // stages if stages > 1 else 1, 1, 1, stages), together=together)
    mesh = choose_mesh(parallel.mesh, tilings, ranks, -(-images // batch), stages)
    shape = mesh.rows, mesh.cols
    try:
        if parallel.halo != "layer":
            for tiling in tilings:
                decompose(tiling, shape)
            return Spread(parallel.halo, mesh)
        fusion = parallel.fusion or (None if whole_tiles else 1)
        if fusion is None:
            prices = Prices(graph, bands, value, question.figures, mesh.ranks_per_image)
            fusion = choose_fusion(prices, layer_blocks(tilings[0], graph, shape))
        for tiling in tilings:
            blocks = layer_blocks(tiling, graph, shape, fusion)
            if whole_tiles:
                check_blocks(graph, blocks.rows, blocks.cols, fusion, bands, value)
    except GeometryError as error:
        raise ConfigError(f"parallel.halo is {parallel.halo} on a mesh of {mesh}: {error}") from error
    return Spread(parallel.halo, mesh, fusion, parallel.overlap, goes_together(parallel, graph, images))


def _tilings(question: RunQuestion, footprint: Footprint) -> tuple[tuple[Tiling, ...], tuple[Tiling, ...]]:
    """Return the tilings of the rasters that are trained on or mapped, and of those held out."""
    cut, held_out = (
        tuple(make_tiling(extent.shape, run_grid(question, footprint, extent), footprint) for extent in extents)
        for extents in (() if question.windows else question.rasters, question.held_out)
    )
    if question.windows:
        cut = question.windows.tilings([extent.shape for extent in question.rasters], footprint)
    turned = (make_tiling(cut[k].raster[::-1], cut[k].grid[::-1], footprint) for k in question.turned)
    return (*cut, *turned), held_out


def run_grid(question: RunQuestion, footprint: Footprint, extent: Extent) -> tuple[int, int]:
    """Return the (rows, cols) of tiles of a raster: as set, as a tile store was cut, or by auto the fewest that fit.

    Auto leaves the image whole where a norm has to see all of it, and where the image is computed in blocks.
    """
    preset, parallel, graph = question.grid or extent.grid, question.parallel, question.graph
    if preset is not None:
        return preset
    halo, trains = ("read", False) if question.validates_alone else (parallel.halo, question.trains)
    if parallel.exact and halo != "layer" and measuring(graph, trains):
        return 1, 1
    if question.blocks is not None and halo != "layer":
        return 1, 1
    tiles = max(1, question.ranks // parallel.stages)
    on_cpu = question.figures.known and not (question.figures.has_devices or question.trains)
    if graph.is_untraced and footprint.unit > 1:  # tiles compute no crop twice on a rank, so small ones cost no more
        units = (2 * round(side / footprint.unit / 2) for side in extent.shape)  # tiles of two are whole
        most = max(2, (CROPS_SIDE if on_cpu else CROPS_BATCHED) // footprint.unit)
        wide = most * (question.figures.threads if on_cpu else 1)  # each thread has as many crops of a tile
        tiles = max(tiles, math.prod(math.ceil(count / most) for count, most in zip(units, (most, wide), strict=True)))
    elif on_cpu:
        most = max(MAP_SIDE, MAP_HALOS * max(footprint.before, footprint.after))
        tiles = max(tiles, math.prod(math.ceil(side / most) for side in extent.shape))
    bands, value = question.network.bands, question.value_bytes
    return choose_grid(extent.shape, graph, footprint, question.memory, value, tiles, bands)


def _inexact(
    question: RunQuestion, tilings: Sequence[Tiling], footprint: Footprint, spread: Spread, of: str = ""
) -> str | None:
    """Return a warning of a result that tiling changes; None where it changes nothing. Raises ConfigError for a norm
    that sees less than it has to, unless `parallel.exact` is false. `of`: first words of its message."""
    graph, windows, tiles = question.graph, question.windows, max(map(len, tilings), default=1)
    if windows:
        tiles = max(tiles, windows.parts([extent.shape for extent in question.rasters], footprint))
    images = 1 if spread.together else question.items_per_step
    fault = norm_fault(graph, spread.mode, tiles, images, question.trains, question.keyed)
    if fault and windows and windows.exact:
        shared = " with parallel.halo layer or memory.blocks" if measuring(graph, over=("batch",)) else ""
        fault = (
            "a norm over windows with halos would see a part of the image; use train.windows with halo "
            f"none{shared}, or norm none or pixel"
        )
    if fault and question.parallel.exact:
        raise ConfigError(f"{of}{fault}, or accept it with parallel.exact false")
    needed = max(minimum_halo(graph))
    if not fault and not windows and tiles > 1 and spread.mode != "layer" and footprint.before < needed:
        fault = f"the halo is {footprint.before} pixels, and the network needs {needed}; set tiling.halo to auto"
    return f"not exact: {fault}" if fault else None
