"""The plan of a run: all that is decided before a rank starts, by one function, for every command.

Training with its validation, prediction and `plan` ask it. It needs no torch: what only a device can tell, the memory
that is free and the times of layers and messages, it is given. Who runs a plan decides nothing any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from tiledseg.architecture.foreign import ForeignNetwork
from tiledseg.architecture.network import Network
from tiledseg.errors import ConfigError, GeometryError
from tiledseg.geometry.graph import Graph, one_of_equals
from tiledseg.geometry.halo import Footprint, network_footprint
from tiledseg.geometry.memory_policy import named_policy
from tiledseg.geometry.memory_words import USUAL_LOSS, LossBytes
from tiledseg.geometry.tiling import Tiling, make_tiling
from tiledseg.planning.machine import Machine
from tiledseg.planning.mode_cost import ModeCost, Task
from tiledseg.planning.run.batch import BatchCase, bytes_of_tile, choose_batch
from tiledseg.planning.run.blocks import BlockPlan, BlocksAsked, choose_blocks
from tiledseg.planning.run.cost import memory_note, once_a_step, step_cost, step_task
from tiledseg.planning.run.grid import choose_grid
from tiledseg.planning.run.memory import Needed, check_budget, choose_memory, memory_choices
from tiledseg.planning.run.mesh import choose_mesh
from tiledseg.planning.run.norms import check_statistics, exact_modes, norm_fault, of_steps
from tiledseg.planning.run.offloading import OffloadPlan, offload_by, plan_offload
from tiledseg.planning.run.parallelism import Parallelism
from tiledseg.planning.run.pipeline import (
    Measured,
    MicroBatchSize,
    PipelinePlan,
    micro_batch_size,
    modelled,
    plan_pipeline,
    rebuilt_pipeline,
)
from tiledseg.planning.run.quick_grid import quickest_grid
from tiledseg.planning.run.spread import Spread, choose_spread, goes_together, idle_note, read_spread
from tiledseg.planning.run.windows import Windows
from tiledseg.planning.step_memory import fixed_memory
from tiledseg.records import dataclass
from tiledseg.widths import ACTIVATION_BYTES

if TYPE_CHECKING:
    from tiledseg.planning.memory.choice import MemoryChoice
    from tiledseg.planning.memory.store import Store


class Extent(NamedTuple):
    """A raster to cut: its (height, width) in pixels, and, of a tile store, the grid that it was cut by."""

    shape: tuple[int, int]
    grid: tuple[int, int] | None = None


@dataclass(frozen=True)
class RunQuestion:
    """What a run is to do, and on what.

    `rasters` are trained on or mapped, `held_out` ones validated on; `memory`: bytes that each of `ranks` may use.
    `grid` and `halo` (pixels) as asked for, None for auto. A step has `tiles_per_step` tiles, or all tiles of
    `images_per_step` images; a map is one step on one image. `machine`: what a rank reaches, None where nobody knows.
    `frozen`: the nodes whose weights are not trained; `still_norms`: running statistics are constants in training too.
    `recompute`: what is computed once more in place of keeping it: auto (what `memory` demands), none, compact (what is
    nearly free), or all.
    `tiles_per_batch`: tiles of one shape that run at once (or images, where a norm over a step has all of these go
    together), None for one, in fp64 as many as fit and pay: batches of at most `batch_pixels` pixels do, which only a
    device can tell.
    `windows`: what is trained on in place of the rasters' tiles; as so many tiles a step where they are exact, else as
    images. `loss`: what it needs beyond the network's usual one. `blocks`: tiles are computed in blocks, one after the
    other. `offload`: what autograd keeps leaves memory; `store`: where tensors may leave for as `memory` demands.
    `turned`: the rasters that are also shown with rows for columns. `budgeted`: the user has said what `memory` may be:
    a step that does not fit is refused.
    """

    network: Network
    rasters: tuple[Extent, ...]
    ranks: int
    memory: int
    parallel: Parallelism = field(default_factory=Parallelism)
    precision: str = "fp32"
    held_out: tuple[Extent, ...] = ()
    grid: tuple[int, int] | None = None
    halo: int | None = None
    trains: bool = True
    tiles_per_step: int | None = None
    images_per_step: int = 1
    machine: Machine | None = None
    frozen: frozenset[str] = frozenset()
    still_norms: bool = False
    recompute: str = "auto"
    tiles_per_batch: int | None = None
    batch_pixels: int = 0
    windows: Windows | None = None
    blocks: BlocksAsked | None = None
    offload: bool = False
    store: Store | None = None
    turned: tuple[int, ...] = ()
    budgeted: bool = False
    loss: LossBytes = USUAL_LOSS

    @property
    def validates_alone(self) -> bool:
        """Whether validation is spread by itself: windows that are images say nothing of how rasters are to be."""
        return self.windows is not None and not self.windows.exact

    @property
    def graph(self) -> Graph:
        graph = self.network.graph().with_frozen(self.frozen).with_loss(self.loss)
        graph = graph.with_still_statistics() if self.still_norms else graph
        if self.recomputes:
            graph = graph.with_memory(named_policy(graph, self.network.bands, self.recompute))
        return one_of_equals(graph)

    @property
    def recomputes(self) -> bool:
        """Whether the user has said what is computed once more."""
        return self.trains and self.recompute in ("compact", "all")

    @property
    def keyed(self) -> bool:
        """Whether keys of the configuration say what the network consists of, and not its author's code."""
        return not isinstance(self.network, ForeignNetwork)

    @property
    def value_bytes(self) -> int:
        return ACTIVATION_BYTES[self.precision]

    @property
    def waits_for_times(self) -> bool:
        """Whether the balance is to follow from times that are measured: see `balanced`."""
        return self.trains and self.parallel.stages > 1 and self.parallel.timed

    @property
    def is_profiled(self) -> bool:
        """Whether more is known of the machine than three figures."""
        return self.machine is not None and self.machine.profile is not None

    @property
    def has_seconds(self) -> bool:
        """Whether the time of a step can be said: on a known machine, of whole images, without stages."""
        whole = self.trains and self.tiles_per_step is None
        return whole and self.parallel.stages == 1 and self.machine is not None


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
    network, parallel, value = question.network, question.parallel, question.value_bytes
    images, speed = question.images_per_step, question.machine or Machine()
    graph = question.graph
    footprint = network_footprint(graph, question.halo, parallel.exact)
    cut, held_out = _cut(question, footprint)
    tilings = cut if question.validates_alone else (*cut, *held_out)
    batch, in_blocks = _images_at_once(question, graph), question.blocks is not None
    asked = question.ranks, images, network.bands, value, speed, not in_blocks, batch
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
    blocks, rebuilt = _blocks(question, spread, graph, tilings), None
    tiles = 1 if spread.together else _tiles_asked(question, spread, largest, in_step)
    offloaded = _offloaded(question, spread, graph, largest, costs[0].memory, tiles)
    if question.trains and blocks is None and offloaded is None:
        each = partial(bytes_of_tile, graph, network.bands, largest.pixels, value)
        task = step_task(mesh, graph, cut, network.bands, value, images, batch)
        rebuilt = _rebuilt(question, spread, task, cut, costs[0].memory, tiles, each)
        offloaded = offload_by(rebuilt)
    tiles_per_batch, memory = batch if spread.together else tiles, max(cost.memory for cost in costs)
    if blocks is not None:
        tiles_per_batch, memory = 1, blocks.memory
    elif rebuilt is not None:
        memory = rebuilt.peak
    elif offloaded is not None:
        memory = offloaded.memory
    elif not spread.together:
        tiles_per_batch, memory = _batch(question, spread, largest, in_step, memory)
    cost = replace(costs[0], memory=memory)
    notes = (
        _memory_note(question, spread, cost.memory, blocks),
        idle_note(spread, question.ranks, images, batch),
        _inexact(question, graph, tilings, footprint, spread),
    )
    warnings = tuple(filter(None, notes))
    seconds = cost.seconds if question.has_seconds and (question.is_profiled or not spread.together) else None
    decided = network, footprint, cut, held_out, spread, largest, cost, seconds, None, warnings, validation
    plan = RunPlan(*decided, tiles_per_batch, blocks, rebuilt, offloaded and offloaded.of_batch(tiles_per_batch))
    waits = question.waits_for_times and not question.is_profiled
    return plan if waits else balanced(question, plan)


def balanced(question: RunQuestion, plan: RunPlan, measured: Measured | None = None) -> RunPlan:
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
    if question.machine is None or question.machine.profile is None or halo == "layer":
        return fewest
    asked = extent.shape, footprint, graph, bands, value, question.machine, pipelines, question.trains
    return quickest_grid(fewest, *asked)


def _images_at_once(question: RunQuestion, graph: Graph) -> int:
    """Of a step whose images go through the network together; 1 where they do not."""
    images = question.images_per_step
    if not question.trains or not goes_together(question.parallel, graph, images):
        return 1
    return min(question.tiles_per_batch or 1, images)


def _tiles_asked(question: RunQuestion, spread: Spread, largest: MicroBatchSize, in_step: int) -> int:
    """Tiles that are to run at once; 1 where nobody has said it, or nothing is trained."""
    if not question.trains or question.tiles_per_batch in (None, 1) or question.blocks is not None:
        return 1
    case = BatchCase(question.tiles_per_batch, in_step, 1, 0, 0, False)
    return choose_batch(case, question.graph, spread, largest.pixels, lambda: 1)


def _batch(question: RunQuestion, spread: Spread, largest: MicroBatchSize, in_step: int, step: int) -> tuple[int, int]:
    """Tiles that run at once, and the bytes of a step with so many; `step`: those of one."""
    if not question.trains:
        return 1, step
    own = largest.count if spread.shares_images else -(-in_step // question.ranks)
    wide = question.precision == "fp64"
    paying = question.batch_pixels if wide else 0
    case = BatchCase(question.tiles_per_batch, in_step, own, paying, question.memory - step, wide)
    graph = question.graph
    further = partial(bytes_of_tile, graph, question.network.bands, largest.pixels, question.value_bytes)
    batch = choose_batch(case, graph, spread, largest.pixels, further)
    return batch, step if batch == 1 else step + (batch - 1) * further()


def _blocks(question: RunQuestion, spread: Spread, graph: Graph, tilings: Sequence[Tiling]) -> BlockPlan | None:
    """Raises ConfigError where tiles cannot be computed in blocks, or are to run several at once."""
    asked = question.blocks
    if asked is None:
        return None
    if question.tiles_per_batch not in (None, 1):
        raise ConfigError(
            f"train.tiles_per_batch is {question.tiles_per_batch}, but with memory.blocks one tile alone is too much "
            "at once; leave it out"
        )
    bands, value = question.network.bands, question.value_bytes
    return choose_blocks(asked, spread, graph, bands, tilings, value, question.memory, question.trains)


def _rebuilt(
    question: RunQuestion,
    spread: Spread,
    task: Task,
    tilings: Sequence[Tiling],
    needed: int,
    tiles: int,
    each: Callable[[], int],
) -> MemoryChoice | None:
    """What is computed once more so that a step of so many `tiles` at once fits, of which one needs `needed` bytes, and
    `each` of the others less; None where the user has said it."""
    if spread.mesh.stages > 1:
        if question.store is not None:
            raise ConfigError(
                f"memory.offload is auto, but parallel.stages is {spread.mesh.stages}, where nothing but what is "
                "computed once more is chosen; leave offload out, or give all"
            )
        return None  # as each stage needs it: see `balanced`
    needed += (tiles - 1) * each() if tiles > 1 else 0
    if question.recompute != "auto":
        if question.budgeted:
            check_budget(question.recompute, needed, question.memory)
        return None
    fixed = fixed_memory(task.graph, task.bands, task.value_bytes)
    sizes = Needed(needed, fixed, task.images if spread.together else tiles)
    steps = partial(memory_choices, spread, task, tilings, question.store)
    room = fixed + (question.memory - fixed) // tiles
    finer = partial(_finer, question, spread, task, tilings, room)
    return choose_memory(spread, steps, sizes, question.memory, question.budgeted, finer)


def _finer(
    question: RunQuestion, spread: Spread, task: Task, tilings: Sequence[Tiling], room: int
) -> tuple[int, int] | None:
    """The coarsest grid of the largest raster whose tiles fit so many bytes with everything kept; None where tiles are
    not what a rank computes alone, or none fits."""
    whole = question.parallel.exact and spread.mode not in exact_modes(task.graph, tiles=2)
    if spread.shares_images or question.windows or whole:
        return None
    largest = max(tilings, key=lambda tiling: tiling.raster[0] * tiling.raster[1])
    try:
        return choose_grid(largest.raster, task.graph, largest.footprint, room, task.value_bytes, 1, task.bands)
    except GeometryError:
        return None


def _offloaded(
    question: RunQuestion, spread: Spread, graph: Graph, largest: MicroBatchSize, needed: int, tiles: int
) -> OffloadPlan | None:
    """What stays in memory of a step that needs so many bytes a tile with everything kept; None where all does."""
    if not question.offload:
        return None
    budget = question.memory if question.budgeted else None
    return plan_offload(spread, graph, question.network.bands, largest, needed, budget, tiles)


def _memory_note(question: RunQuestion, spread: Spread, needed: int, blocks: BlockPlan | None) -> str | None:
    if blocks is not None:
        return blocks.note(question.memory)
    told = question.trains and question.parallel.stages == 1
    return memory_note(spread, needed, question.memory, question.windows is not None) if told else None


def _inexact(
    question: RunQuestion, graph: Graph, tilings: Sequence[Tiling], footprint: Footprint, spread: Spread
) -> str | None:
    """What tiling would change: a ConfigError, or a warning where `parallel.exact` is false."""
    at_once = 1 if spread.together else max(question.images_per_step, question.tiles_per_step or 1)
    tiles = max(map(len, tilings))
    if question.windows:
        tiles = max(tiles, question.windows.parts([extent.shape for extent in question.rasters], footprint))
    fault = norm_fault(graph, spread.mode, tiles, at_once, question.trains, question.keyed)
    if fault and question.windows and question.windows.exact:
        fault = "a norm over windows with halos would see a part of the image; use train.window_halo none" + (
            " with parallel.halo layer, or norm none or pixel" if of_steps(graph) else ", or norm none or pixel"
        )
    if fault and question.parallel.exact:
        raise ConfigError(f"{fault}, or accept it with parallel.exact false")
    return f"not exact: {fault}" if fault else None
