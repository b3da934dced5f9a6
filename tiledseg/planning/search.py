"""The search for the best settings of a run: grids and meshes that keep the ranks busy, compared over all modes.

All candidates are sorted by an estimate. The dozen of least estimate that fit are planned, and the fastest plan wins.
The best of each kind is planned first, so that an estimate that is off for one kind does not hide it.

The images of a step decide the result, and are not searched. Grids are nearly square. Mode `read` has grids of 1 to 8
tiles a rank, and coarser and finer ones for the memory. In modes `exchange` and `layer` a rank owns a block of one tile
or of 2 x 2; a mesh is tried for each number of rounds that the images of a step can take. Pipelines have 2, 3 or 4
stages, or as many as a host has ranks. Modes `read` and `layer` are also tried in blocks, where these are allowed. A
grid that the user gives is kept, even where it is none of these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

from tiledseg.config.checks import shown
from tiledseg.config.words import SCHEDULES
from tiledseg.errors import ConfigError, InputError
from tiledseg.geometry.halo import Footprint, network_footprint
from tiledseg.geometry.tiling import context_sizes, finest_grid
from tiledseg.planning.run.grid import near_squares
from tiledseg.planning.run.plan import RunPlan, plan_run
from tiledseg.planning.run.question import RunQuestion
from tiledseg.planning.run.spread import Parallelism, measuring, norm_fault
from tiledseg.planning.walk.cost_model import Prices
from tiledseg.planning.walk.mode_cost import fusion_word, mode_words
from tiledseg.planning.walk.step_memory import fixed_memory, training_memory
from tiledseg.units import size

BEST, PLANNED, MOST_PLANNED = 5, 12, 24  # settings shown; plans that fit and are compared; plans made, once one fits
TILES_A_RANK, MESHES = (1, 2, 3, 4, 6, 8), 3  # tiles a rank in mode `read`; meshes for each number of ranks an image
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64)
MOST_TILES_TRIED, MOST_PASSES = 2**13, 256  # tiles of an image; micro-batches of a pipeline in a step, each simulated
TERMS = {
    "forward": "computing forward",
    "backward": "computing backward",
    "reading": "reading",
    "update": "sums of gradients and the optimizer",
    "again": "computing once more, and the store",
    "messages": "messages",
    "all_reduce": "the all-reduce",
    "waiting": "waiting in the pipeline",
}
_MOST_OVER = 3  # times the memory that a step may need before tensors are recomputed: no choice saves more
_MESSAGES = 4  # about the messages a layer in mode `layer`: some layers send halos to four sides, forward and backward
_BLOCKS_MORE = 1.4  # about the time of a step in blocks, by that of a step on whole tiles
Grid = tuple[int, int]


@dataclass(frozen=True)
class Candidate:
    """Settings of a run. `parallel`: its mesh is None in mode `read`. `blocks`: the fewest that fit."""

    parallel: Parallelism
    grid: Grid
    blocks: bool = False

    @property
    def tiles(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def kind(self) -> str:
        if self.parallel.stages > 1:
            return f"{self.parallel.stages} stages, {self.parallel.schedule}"
        return self.parallel.halo + ", in blocks" * self.blocks

    @property
    def in_words(self) -> str:
        parallel, cut = self.parallel, f"grid {self.grid[0]} x {self.grid[1]}"
        if parallel.mesh is None:
            again = f", recompute {parallel.recompute[0]}" if parallel.recompute[0] != "never" else ""
            flush = f", {parallel.micro_batches} micro-batches a flush" if parallel.micro_batches else ""
            return f"{self.kind}{again}{flush}, {cut}"
        mode = mode_words(parallel.halo, fusion_word(parallel.fusion or 1)) + ", in blocks" * self.blocks
        cut = f", {cut}" if self.grid != parallel.mesh else ""
        return f"{mode}, mesh {parallel.mesh[0]} x {parallel.mesh[1]}{cut}"

    def question(self, question: RunQuestion) -> RunQuestion:
        """Return the question with these settings."""
        blocks = replace(question.blocks, if_needed=False) if question.blocks and self.blocks else None
        store = question.store if self.parallel.stages == 1 and not self.blocks else None  # stages choose nothing of it
        return replace(question, parallel=self.parallel, grid=self.grid, blocks=blocks, store=store)

    def keys(self, plan: RunPlan) -> dict[str, Any]:
        """Return the keys of the group `parallel` by which a run of the plan differs from the defaults."""
        parallel, keys = self.parallel, dict[str, Any]()
        if parallel.mesh is not None:
            keys = {"halo": parallel.halo, "mesh": list(parallel.mesh)}
            if plan.spread.shares_layers and plan.spread.fusion != 1:
                keys["fusion"] = fusion_word(plan.spread.fusion)
        if plan.pipeline is not None:
            keys |= {"stages": parallel.stages, "balance": list(plan.pipeline.balance), "schedule": parallel.schedule}
            keys |= {"recompute": parallel.recompute[0]} if parallel.recompute[0] != "never" else {}
            keys |= {"micro_batches": parallel.micro_batches} if parallel.micro_batches else {}
        return keys


class Priced(NamedTuple):
    """Settings with their plan."""

    candidate: Candidate
    plan: RunPlan


class Discarded(NamedTuple):
    """Settings that cannot be, with the reason in a line; bytes `needed` where they are known."""

    candidate: Candidate
    reason: str
    needed: int | None = None


class Searched(NamedTuple):
    """The best settings, best first; `other`: the best of another kind than the winner's, None where none was planned.
    `candidates`: how many settings there are."""

    best: tuple[Priced, ...]
    other: Priced | None
    candidates: int

    @property
    def winner(self) -> Priced:
        return self.best[0]

    @property
    def reason(self) -> str:
        """One line: the winner beside the best of another kind, else beside the second."""
        winner, other = self.winner, self.other or (self.best[1] if len(self.best) > 1 else None)
        if other is None:
            return f"nothing but {winner.candidate.in_words} can be"
        less = f"{round(100 * (1 - winner.plan.cost.seconds / other.plan.cost.seconds)) or 'under 1'} % less"
        return f"{winner.candidate.in_words} takes {less} time than {other.candidate.in_words}"


def candidates(
    question: RunQuestion, footprint: Footprint, host: int, halo: str | None = None, stages: int | None = None
) -> list[Candidate]:
    """List the settings to compare, also those that the memory or a norm forbids. `host`: ranks of a host. `halo`,
    `stages`: the only mode and number of stages; None for all."""
    finest, space = finest_grid(question.shape, footprint), list[Candidate]()
    if stages in (None, 1):
        if halo in (None, "read"):
            space += [Candidate(Parallelism(), grid) for grid in _read_grids(question, finest, question.ranks)]
        alone = halo is not None or (question.images_per_step > 1 and bool(measuring(question.graph, over=("batch",))))
        space += [each for each in _shared(question, finest, alone) if halo in (None, each.parallel.halo)]
    in_blocks = [replace(each, blocks=True) for each in space if question.blocks and each.parallel.halo != "exchange"]
    if halo in (None, "read"):
        most = min(host, len(question.graph) // 2)
        for number in sorted(n for n in {2, 3, 4, host} if 1 < n <= most and stages in (None, n)):
            space += _staged(question, finest, number)
    return [*space, *in_blocks]


def _read_grids(question: RunQuestion, finest: Grid, ranks: int) -> list[Grid]:
    """List the grids of mode `read`."""
    if question.grid:
        return [question.grid]
    (height, width), images = question.shape, question.images_per_step
    busy = {grid for per in TILES_A_RANK for grid in near_squares((height, width), finest, per * ranks // images, 2)}
    squares = {(rows, min(finest[1], max(1, round(rows * width / height)))) for rows in ROWS if rows <= finest[0]}
    return sorted(grid for grid in busy | squares if math.prod(grid) <= MOST_TILES_TRIED)


def _shared(question: RunQuestion, finest: Grid, alone: bool) -> Iterator[Candidate]:
    """Yield the candidates of modes `exchange` and `layer`. `alone`: a mesh of one rank is worth a try, as with a norm
    over all images of a step."""
    images, most = question.images_per_step, math.prod(question.grid or (MOST_TILES_TRIED, 1))
    counts = {min(question.ranks // -(-images // rounds), most) for rounds in range(1, images + 1)}
    for mesh in sorted({mesh for n in counts for mesh in near_squares(question.shape, finest, n, MESHES)}):
        grids = [question.grid] if question.grid else [mesh, (2 * mesh[0], 2 * mesh[1])]
        for grid in grids if alone or mesh != (1, 1) else ():
            if all(ranks <= tiles <= limit for ranks, tiles, limit in zip(mesh, grid, finest, strict=True)):
                yield Candidate(Parallelism(halo="exchange", mesh=mesh), grid)
                if grid == grids[0]:
                    yield Candidate(Parallelism(halo="layer", mesh=mesh, fusion=None), grid)


def _staged(question: RunQuestion, finest: Grid, stages: int) -> Iterator[Candidate]:
    """Yield the candidates of pipelines, in mode `read`."""
    pipelines = question.ranks // stages
    for grid in _read_grids(question, finest, pipelines) if pipelines else ():
        passes = -(-math.prod(grid) * question.images_per_step // pipelines)
        if passes > MOST_PASSES and not question.grid:
            continue
        flushes = (4 * stages, None) if passes > 4 * stages else (None,)
        for schedule, word, flush in product(SCHEDULES, ("never", "always"), flushes):
            again = (word,) * stages
            yield Candidate(Parallelism(stages=stages, schedule=schedule, micro_batches=flush, recompute=again), grid)


def estimate(question: RunQuestion, prices: Prices, footprint: Footprint, candidate: Candidate) -> float | Discarded:
    """Estimate the seconds of a step on the largest image, or return why a candidate surely cannot be: a norm would
    see something else, or a step is by far too large.

    The contexts of the busiest rank or pipeline take their time one after the other, in mode `layer` with their
    messages, but no halo. In a pipeline one micro-batch passes through all layers, the others follow at the pace of the
    slowest stage.
    """
    parallel, mesh, graph, machine = candidate.parallel, candidate.parallel.mesh, question.graph, prices.machine
    images, ranks, stages, layers = question.images_per_step, question.ranks, parallel.stages, parallel.halo == "layer"
    together = layers or (candidate.blocks and candidate.tiles == 1)  # all images go through the network at once
    items = 1 if together else images
    fault = norm_fault(graph, parallel.halo, candidate.tiles, items, question.trains, question.keyed)
    if fault:
        return Discarded(candidate, fault)
    grid = mesh if mesh and layers else candidate.grid
    (height, rows), (width, cols) = (
        context_sizes(side, parts, footprint) for side, parts in zip(question.shape, grid, strict=True)
    )
    if stages > 1:
        needed = fixed_memory(graph, prices.bands, prices.width) // stages
        if needed > question.memory:
            return Discarded(candidate, f"needs {size(needed)} for its weights")
    elif not (layers or candidate.blocks or question.store):
        needed = training_memory(graph, prices.bands, (height, width), prices.width).total
        if needed > _MOST_OVER * question.memory:
            return Discarded(candidate, f"needs {size(needed)}", needed)
    if mesh is None:
        turns = -(-candidate.tiles * images // (ranks // stages))
    else:
        turns = -(-images // max(1, min(images, ranks // math.prod(mesh))))
        turns *= math.prod(-(-tiles // parts) for tiles, parts in zip(grid, mesh, strict=True))
    if stages > 1:
        again = parallel.recompute[0] == "always"
        each = [(1 + again) * f + b for f, b in prices.nodes((height, width))]
        flush = min(parallel.micro_batches or turns, turns)
        pace = max(sum(each) / stages, *each)
        return -(-turns // flush) * (sum(each) + (flush - 1) * pace) * machine.taking_turns(ranks)
    owned = math.prod(question.shape) // math.prod(grid)
    pixels = owned if layers else rows * cols / math.prod(grid) if turns > 1 else height * width
    messages = machine.message_seconds([0] * (_MESSAGES * len(graph)), ranks) if layers else 0.0
    time = prices.tile((height, width), owned).times(pixels / (height * width))
    time = time._replace(messages=messages).times(turns)
    return prices.seconds(prices.step(time, 1, time.backward)) * (_BLOCKS_MORE if candidate.blocks else 1)


def price(question: RunQuestion, candidate: Candidate) -> Priced | Discarded:
    """Plan a run with these settings; return its price, or why it cannot be."""
    try:
        plan = plan_run(candidate.question(question))
    except InputError as error:
        return Discarded(candidate, str(error))
    if plan.memory > question.memory:
        return Discarded(candidate, f"needs {size(plan.memory)} of {size(question.memory)}", plan.memory)
    return Priced(replace(candidate, parallel=replace(candidate.parallel, fusion=plan.spread.fusion)), plan)


def search(question: RunQuestion, host: int, halo: str | None = None, stages: int | None = None) -> Searched:
    """Return the best settings for training in steps of whole images, by the largest image of the question.

    `host`: ranks of a host, which no pipeline leaves. `halo`, `stages`: the only mode and number of stages to search;
    None for all. Raises ConfigError where no settings can be, with the bytes that are lacking.
    """
    footprint = network_footprint(question.graph, question.halo)
    prices = Prices(question.graph, question.network.bands, question.value_bytes, question.figures, question.ranks)
    priced, discarded, guesses = list[Priced](), list[Discarded](), dict[Candidate, float]()
    space = dict.fromkeys(candidates(question, footprint, host, halo, stages))
    if not space:
        plan_run(replace(question, parallel=Parallelism(halo=halo or "read", fusion=None)))  # may refuse the grid
        raise ConfigError(
            f"no mesh or pipeline of {question.ranks} ranks suits parallel.halo {halo} and tiling.grid "
            f"{shown(question.grid)}; give another --grid, other --gpus, or no --halo"
        )
    for each in space:
        guess = estimate(question, prices, footprint, each)
        if isinstance(guess, Discarded):
            discarded.append(guess)
        else:
            guesses[each] = guess
    ordered = sorted(guesses, key=guesses.__getitem__)
    kinds = {(each.parallel.halo, each.blocks, each.parallel.stages > 1): each for each in reversed(ordered)}
    first = sorted(kinds.values(), key=ordered.index)
    for place, candidate in enumerate(dict.fromkeys((*first, *ordered))):
        if len(priced) >= PLANNED or (priced and place >= MOST_PLANNED):
            break
        result = price(question, candidate)
        if isinstance(result, Priced):
            priced.append(result)
        else:
            discarded.append(result)
    if not priced:
        nearest = min(discarded, key=lambda each: math.inf if each.needed is None else each.needed)
        lacks = "" if nearest.needed is None else f", {size(nearest.needed - question.memory)} more"
        raise ConfigError(
            f"none of {len(discarded)} settings for {question.ranks} ranks of {size(question.memory)} can be; the "
            f"nearest, {nearest.candidate.in_words}: {nearest.reason}{lacks}; use memory.blocks with memory.store, a "
            f"folder on a local disk, more memory or ranks, or a smaller model{question.or_bf16}"
        )
    priced.sort(key=lambda each: each.plan.cost.seconds)
    other = next((each for each in priced if each.candidate.kind != priced[0].candidate.kind), None)
    return Searched(tuple(priced[:BEST]), other, len(space))
