"""The search for the best settings of a run: grids and meshes that keep the ranks busy, compared over all modes.

All candidates are sorted by an estimate. The dozen of least estimate that fit are planned, and the fastest plan wins.
The best of each kind is planned first, so that an estimate that is off for one kind does not hide it.

The images of a step decide the result, and are not searched. Grids are nearly square. Mode `read` has grids of 1 to 8
tiles a rank, and coarser and finer ones for the memory. In modes `exchange` and `layer` a rank owns a block of one tile
or of 2 x 2; a mesh is tried for each number of rounds that the images of a step can take. Pipelines have 2, 3 or 4
stages, or as many as a host has ranks. Modes `read` and `layer` are also tried in blocks, where these are allowed. A
setting that the user gives is kept, even where it is none of these.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, NamedTuple

from tiledseg.config.checks import shown
from tiledseg.config.words import SCHEDULES, chunk_ranks
from tiledseg.errors import ConfigError, InputError
from tiledseg.geometry.halo import Footprint, network_footprint
from tiledseg.geometry.tiling import context_sizes, finest_grid
from tiledseg.planning.run.grid import near_squares
from tiledseg.planning.run.plan import RunPlan, plan_run
from tiledseg.planning.run.question import RunQuestion
from tiledseg.planning.run.spread import Parallelism, norm_fault, of_steps
from tiledseg.planning.walk.cost_model import Prices
from tiledseg.planning.walk.mode_cost import fusion_word, mode_words
from tiledseg.planning.walk.rank_steps import SentBytes
from tiledseg.planning.walk.step_memory import fixed_memory, training_memory
from tiledseg.units import size

BEST, PLANNED, MOST_PLANNED = 5, 12, 24  # settings shown; plans that fit and are compared; plans made, once one fits
TILES_A_RANK, MESHES = (1, 2, 3, 4, 6, 8), 3  # tiles a rank in mode `read`; meshes for each number of ranks an image
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64)
MOST_TILES_TRIED, MOST_PASSES = 2**13, 256  # tiles of an image; micro-batches of a pipeline in a step, each simulated
FREE = frozenset(("halo", "mesh", "fusion", "stages", "schedule", "micro_batches", "recompute"))
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
PLAIN = Parallelism()


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


def candidates(question: RunQuestion, footprint: Footprint, host: int, free: Collection[str]) -> list[Candidate]:
    """List the settings to compare, also those that the memory or a norm forbids. `host`: ranks of a host. `free`: the
    settings that are searched. The others are the question's own; a mesh and a fusion that it leaves open stay
    open."""
    settings, finest = question.parallel, finest_grid(question.shape, footprint)
    one_rank = {"stages": 1, "schedule": "1f1b", "micro_batches": None, "recompute": ("never",)}
    plain = replace(settings, halo="read", mesh=None, fusion=1, **one_rank)  # type: ignore[arg-type]  # names of its fields
    fusion = None if "fusion" in free else settings.fusion
    whole = [Candidate(plain, grid) for grid in _read_grids(question, finest, question.ranks)]
    whole += _shared(question, finest, replace(plain, fusion=fusion), free)
    layers = fusion in (None, 1) and not settings.overlap
    modes = ("read", *["layer"] * layers) if question.blocks else ()  # in which a rank may compute its part in blocks
    in_blocks = [replace(each, blocks=True) for each in whole if each.parallel.halo in modes]
    staged = _staged(question, finest, plain, host, free) if question.figures.known else ()
    kept, space = FREE - {*free, "recompute"}, list[Candidate]()
    for each in dict.fromkeys((*whole, *staged, *in_blocks)):  # settings that are not free stay as they are
        own = each.parallel
        fits = settings.balance is None or len(settings.balance) == len(chunk_ranks(own.schedule, own.stages))
        fits = fits and ("recompute" in free or set(settings.recompute) == set(own.recompute))
        if fits and all(getattr(settings, key) in (None, getattr(own, key)) for key in kept):
            space.append(each)
    return space


def _read_grids(question: RunQuestion, finest: Grid, ranks: int) -> list[Grid]:
    """List the grids of mode `read`."""
    if question.grid:
        return [question.grid]
    (height, width), images = question.shape, question.images_per_step
    busy = {grid for per in TILES_A_RANK for grid in near_squares((height, width), finest, per * ranks // images, 2)}
    squares = {(rows, min(finest[1], max(1, round(rows * width / height)))) for rows in ROWS if rows <= finest[0]}
    return sorted(grid for grid in busy | squares if math.prod(grid) <= MOST_TILES_TRIED)


def _shared(question: RunQuestion, finest: Grid, plain: Parallelism, free: Collection[str]) -> Iterator[Candidate]:
    """Yield the candidates of modes `exchange` and `layer`."""
    together = question.images_per_step > 1 and bool(of_steps(question.graph))
    for mesh in _meshes(question, finest, free):
        if mesh == (1, 1) and "halo" in free and not together:
            continue  # nobody to share an image with
        grids = [question.grid] if question.grid else [mesh, (2 * mesh[0], 2 * mesh[1])]
        for grid in grids:
            if all(ranks <= tiles <= most for ranks, tiles, most in zip(mesh, grid, finest, strict=True)):
                yield Candidate(replace(plain, halo="exchange", mesh=mesh, fusion=1), grid)
                if grid == grids[0]:
                    yield Candidate(replace(plain, halo="layer", mesh=mesh), grid)


def _meshes(question: RunQuestion, finest: Grid, free: Collection[str]) -> list[Grid]:
    """List the meshes of ranks that share an image."""
    images, ranks, set_mesh = question.images_per_step, question.ranks, question.parallel.mesh
    if set_mesh and "mesh" not in free:
        return [set_mesh] if math.prod(set_mesh) <= ranks else []
    most = math.prod(question.grid or (MOST_TILES_TRIED, 1))
    replicas = {-(-images // rounds) for rounds in range(1, images + 1)}
    counts = {min(ranks // number, most) for number in replicas}
    return sorted({mesh for n in counts for mesh in near_squares(question.shape, finest, n, MESHES)})


def _staged(
    question: RunQuestion, finest: Grid, plain: Parallelism, host: int, free: Collection[str]
) -> Iterator[Candidate]:
    """Yield the candidates of pipelines, in mode `read`."""
    settings, most = question.parallel, min(host, len(question.graph) // 2)
    schedules = SCHEDULES if "schedule" in free else (settings.schedule,)
    words = ("never", "always") if "recompute" in free else settings.recompute[:1]
    for stages in sorted({n for n in (2, 3, 4, host) if n <= most}) if "stages" in free else [settings.stages]:
        pipelines = question.ranks // stages
        for grid in _read_grids(question, finest, pipelines) if stages > 1 and pipelines else ():
            passes = -(-math.prod(grid) * question.images_per_step // pipelines)
            if passes > MOST_PASSES and not question.grid:
                continue
            several = {None, 4 * stages if passes > 4 * stages else None}
            flushes = several if "micro_batches" in free else {settings.micro_batches}
            for schedule, word, flush in product(schedules, words, sorted(flushes, key=str)):
                pipeline = {"stages": stages, "schedule": schedule, "recompute": (word,) * stages}
                yield Candidate(replace(plain, **pipeline, micro_batches=flush), grid)  # type: ignore[arg-type]


class Estimates:
    """Quick estimates of settings for one question, on its largest image."""

    def __init__(self, question: RunQuestion) -> None:
        self.question, self.graph = question, question.graph
        self.shape, self.bands, width = question.shape, question.network.bands, question.value_bytes
        self.footprint = network_footprint(self.graph, question.halo, question.parallel.exact)
        self.prices = Prices(self.graph, self.bands, width, question.figures, question.ranks)
        self._weights = fixed_memory(self.graph, self.bands, width)
        self._tile, self._nodes = cache(self.prices.tile), cache(self.prices.nodes)

    def _contexts(self, grid: tuple[int, int]) -> tuple[tuple[int, int], float]:
        """Return the largest context of a grid, and the pixels of a context, on average."""
        sides = zip(self.shape, grid, strict=True)
        (height, rows), (width, cols) = (context_sizes(side, parts, self.footprint) for side, parts in sides)
        return (height, width), rows * cols / math.prod(grid)

    def refusal(self, candidate: Candidate) -> Discarded | None:
        """Return why a candidate surely cannot be: a norm would see something else, or a step is by far too large."""
        question, parallel, memory = self.question, candidate.parallel, self.question.memory
        layers, needed, most, what = parallel.halo == "layer", 0, _MOST_OVER * memory, ""
        together = parallel.stages == 1 and (layers or (candidate.blocks and candidate.tiles == 1))
        images = 1 if together else question.images_per_step
        fault = norm_fault(self.graph, parallel.halo, candidate.tiles, images, question.trains, question.keyed)
        if fault and parallel.exact:
            return Discarded(candidate, fault)
        if parallel.stages > 1:
            needed, most, what = self._weights // parallel.stages, memory, " for its weights"
        elif not (layers or candidate.blocks or question.store):
            context, width = self._contexts(candidate.grid)[0], self.question.value_bytes
            needed = training_memory(self.graph, self.bands, context, width).total
        return Discarded(candidate, f"needs {size(needed)}{what}", None if what else needed) if needed > most else None

    def estimate(self, candidate: Candidate) -> float:
        """Estimate the seconds of a step: the contexts of the busiest rank or pipeline one after the other, in mode
        `layer` with their messages, but no halo. In a pipeline one micro-batch passes through all layers, the others
        follow at the pace of the slowest stage."""
        parallel, prices, ranks = candidate.parallel, self.prices, self.question.ranks
        images, mesh, grid, layers = self.question.images_per_step, parallel.mesh, candidate.grid, False
        turns = -(-candidate.tiles * images // (ranks // parallel.stages))
        if mesh is not None:
            layers = parallel.halo == "layer"
            grid = mesh if layers else grid
            turns = -(-images // max(1, min(images, ranks // math.prod(mesh))))
            turns *= math.prod(-(-tiles // parts) for tiles, parts in zip(grid, mesh, strict=True))
        (height, width), mean = self._contexts(grid)
        if parallel.stages > 1:
            again = parallel.recompute[0] == "always"
            each = [(1 + again) * f + b for f, b in self._nodes((height, width))]
            flush = min(parallel.micro_batches or turns, turns)
            pace = max(sum(each) / parallel.stages, *each)
            return -(-turns // flush) * (sum(each) + (flush - 1) * pace) * prices.machine.taking_turns(ranks)
        owned = math.prod(self.shape) // math.prod(grid)
        share = (owned if layers else mean if turns > 1 else height * width) / (height * width)
        messages = prices.machine.message_seconds(SentBytes(_MESSAGES * len(self.graph)), ranks) if layers else 0.0
        time = self._tile((height, width), owned).times(share)._replace(messages=messages).times(turns)
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


def search(question: RunQuestion, host: int, free: Collection[str] = FREE) -> Searched:
    """Return the best settings for training in steps of whole images, by the largest image of the question.

    `host`: ranks of a host, which no pipeline leaves. `free`: settings that are searched; the others are the question's
    own.

    Raises ConfigError where no settings can be, with the bytes that are lacking.
    """
    question = replace(question, machine=question.figures)
    estimates = Estimates(question)
    space = candidates(question, estimates.footprint, host, free)
    if not space:
        plan_run(question)  # which may refuse the given settings
        given = {name: getattr(question.parallel, name) for name in sorted(FREE - set(free))}
        fixed = [f"parallel.{name} {shown(value)}" for name, value in given.items() if value != getattr(PLAIN, name)]
        raise ConfigError(
            f"no search combines {', '.join(fixed) or 'what is given'} for {question.ranks} ranks: pipelines need "
            "parallel.halo read with one word of recompute for all stages; leave one of them out"
        )
    refusals, priced = {each: estimates.refusal(each) for each in space}, list[Priced]()
    discarded = [refusal for refusal in refusals.values() if refusal]
    ordered = sorted((each for each in space if not refusals[each]), key=estimates.estimate)
    kinds = {(each.parallel.halo, each.blocks, each.parallel.stages > 1): each for each in reversed(ordered)}
    first = sorted(kinds.values(), key=ordered.index)
    for place, candidate in enumerate(dict.fromkeys((*first, *ordered))):
        if len(priced) >= PLANNED or (priced and place >= MOST_PLANNED):
            break
        result = price(question, candidate)
        priced += [result] if isinstance(result, Priced) else []
        discarded += [result] if isinstance(result, Discarded) else []
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
