"""What settings take: a guess from below in a millisecond or ten, and what their plan says, in a tenth of a second."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

from tiledseg.config.words import chunk_ranks
from tiledseg.errors import BudgetError, InputError
from tiledseg.geometry.halo import Footprint
from tiledseg.geometry.tiling import context_sizes
from tiledseg.planning.cost_model.machine import Machine
from tiledseg.planning.cost_model.prices import Prices
from tiledseg.planning.cost_model.step_time import NO_TIME, StepTime, sum_of
from tiledseg.planning.run.plan import RunPlan, plan_run, plan_unbalanced
from tiledseg.planning.run.question import RunQuestion
from tiledseg.planning.search.candidate import Candidate
from tiledseg.planning.search.folded_bound import least_folded_flush
from tiledseg.planning.search.pipeline_bound import least_flush
from tiledseg.planning.walk.step_memory import fixed_memory, training_memory

REBUILDS = 3
"""A step of more times the memory is not looked at: nothing that is computed once more saves so much."""
MEMORY, INEXACT, IMPOSSIBLE, SLOWER = "memory", "not exact", "not possible", "slower"


@dataclass(frozen=True)
class Priced:
    """Settings with their plan: seconds of a step by the clock, where they go on the rank that takes longest, and
    bytes of the rank that needs most, of at most `limit`; the `ranks` that have work."""

    candidate: Candidate
    plan: RunPlan
    seconds: float
    time: StepTime
    memory: int
    ranks: int
    limit: int

    @property
    def in_words(self) -> str:
        fusion = self.plan.spread.fusion
        return (
            replace(self.candidate, fusion=fusion).in_words
            if self.candidate.fusion is None
            else self.candidate.in_words
        )


@dataclass(frozen=True)
class Discarded:
    """Settings that cannot be: `why` in one of the words above, and in a line; bytes `needed`, where a plan says
    them."""

    candidate: Candidate
    why: str
    reason: str
    needed: int | None = None


@dataclass
class Pricing:
    """Of settings for one question, on images of `shape`; what is worked out for one serves others."""

    question: RunQuestion
    footprint: Footprint
    shape: tuple[int, int]
    machine: Machine
    _tiles: dict[tuple[int, int], tuple[StepTime, StepTime]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        question = self.question
        self.graph, self.bands, self.width = question.graph, question.network.bands, question.value_bytes
        self.prices = Prices(self.graph, self.bands, self.width, self.machine, question.ranks)
        self.weights = fixed_memory(self.graph, self.bands, self.width)
        self.tile, self.nodes = cache(self.prices.tile), cache(self.prices.nodes)
        self.sizes = cache(self._sizes)
        self.tile_bytes = cache(lambda size: training_memory(self.graph, self.bands, size, self.width).total)

    def _sizes(self, grid: tuple[int, int]) -> tuple[Counter[int], Counter[int]]:
        """Contexts along each dim, and how many there are of each."""
        rows, cols = (Counter(context_sizes(self.shape[dim], grid[dim], self.footprint)) for dim in (0, 1))
        return rows, cols

    def largest(self, grid: tuple[int, int]) -> tuple[int, int]:
        rows, cols = self.sizes(grid)
        return max(rows), max(cols)

    def owned(self, grid: tuple[int, int]) -> int:
        """Pixels of a core, on average."""
        return self.shape[0] * self.shape[1] // (grid[0] * grid[1])

    def too_large(self, candidate: Candidate) -> Discarded | None:
        """Where a step could not fit, whatever is computed once more; None where that is for its plan to say."""
        if candidate.stages > 1:
            needed = self.weights // candidate.stages
            reason = f"needs {needed} bytes a stage for its weights"
            return Discarded(candidate, MEMORY, reason) if needed > self.question.memory else None
        if candidate.halo == "layer":
            return None
        needed = self.tile_bytes(self.largest(candidate.grid))
        too_much = needed > REBUILDS * self.question.memory and not candidate.blocks and self.question.store is None
        return Discarded(candidate, MEMORY, f"needs {needed} bytes", needed) if too_much else None

    def nearest(self, discarded: Sequence[Discarded]) -> Discarded | None:
        """What needs the least memory of all that does not fit, and how much where all is computed once more that
        helps, and nothing leaves, which takes several times longer to ask; None where no plan has said."""
        known = [(each.needed, place) for place, each in enumerate(discarded) if each.needed is not None]
        if not known:
            return None
        found = discarded[min(known)[1]]
        try:
            plan_run(replace(found.candidate.question(self.question), budgeted=True, store=None))
        except BudgetError as error:
            return replace(found, needed=error.least or found.needed)
        except InputError:
            pass  # of another kind: it is said when the settings are given by hand
        return found

    def guess(self, candidate: Candidate) -> float:
        """Seconds of a step that it takes at least, or nearly so."""
        if candidate.stages > 1:
            return self._staged(candidate)
        if candidate.blocks:
            return self._in_blocks(candidate)
        if candidate.mesh is None:
            every, longest = self.tiles(candidate.grid)
            even = every.times(self.question.images_per_step / self.question.ranks)
            return self.prices.seconds(self._step(max(even, longest, key=lambda time: time.seconds)))
        rows, cols = candidate.mesh
        images = -(-self.question.images_per_step // min(self.question.images_per_step, self._replicas(rows * cols)))
        if candidate.halo == "layer":
            context = self.largest(candidate.mesh)
            share = self.shape[0] * self.shape[1] / (rows * cols) / (context[0] * context[1])
            return self.prices.seconds(self._step(self.tile(context, context[0] * context[1]).times(images * share)))
        tiles = -(-candidate.grid[0] // rows) * -(-candidate.grid[1] // cols)
        largest = self.largest(candidate.grid)
        return self.prices.seconds(self._step(self.tile(largest, largest[0] * largest[1]).times(images * tiles)))

    def _in_blocks(self, candidate: Candidate) -> float:
        """A block that is the whole has no halo of its own; so it is longer by no more than any."""
        whole = self.guess(replace(candidate, blocks=False))
        every, _ = self.tiles((1, 1))
        once = (every.forward + every.backward) * self.question.images_per_step / self.question.ranks
        return whole + self._least_more * once * self.machine.taking_turns(self.question.ranks)

    @cached_property
    def _least_more(self) -> float:
        """By which a step in blocks is longer at least, as a share of its computing."""
        from tiledseg.planning.memory.segment_time import more_time
        from tiledseg.planning.memory.store import ASSUMED_STORE

        assert self.question.blocks is not None, "there are none to guess else"
        store = self.question.blocks.store or ASSUMED_STORE
        asked = self.graph, self.bands, self.largest((1, 1)), (1, 1), self.width
        return more_time(*asked, store, self.question.blocks.in_file)

    def _replicas(self, ranks: int) -> int:
        return max(1, self.question.ranks // ranks)

    def _staged(self, candidate: Candidate) -> float:
        """Whatever the balance; folded, of an even one, as chunks of both ends may make up for each other."""
        stages, layers, micro_batches = candidate.stages, self._layers(candidate), self._micro_batches(candidate)
        folds = len(chunk_ranks(candidate.schedule, stages)) > stages
        flush = 0.0 if folds else least_flush(layers, stages, micro_batches)
        return self._flushes(candidate, flush)

    def bounded(self, candidate: Candidate) -> tuple[float, tuple[int, ...]] | None:
        """Of a folded pipeline, for which the guess is far too low: seconds of a step that it takes at least, and the
        balance that would take these, were there no messages; None for all else, and where a balance is given."""
        folds = len(chunk_ranks(candidate.schedule, candidate.stages)) > candidate.stages
        if not folds or self.question.parallel.balance is not None:
            return None
        asked = self._layers(candidate), self._stage_skips, candidate.stages, self._micro_batches(candidate)
        found = least_folded_flush(*asked)
        return found and (self._flushes(candidate, found[0]), found[1])

    @cached_property
    def _stage_skips(self) -> tuple[tuple[int, int], ...]:
        return tuple((tensor - 1, reader) for tensor, reader in self.graph.skips)

    def _layers(self, candidate: Candidate) -> list[float]:
        """What each layer of a pipeline takes for one micro-batch."""
        again = candidate.recompute == "always"
        return [time.step + again * time.forward for time in self.nodes(self.largest(candidate.grid))]

    def _passes(self, candidate: Candidate) -> int:
        """Micro-batches of a pipeline in a step."""
        return -(-candidate.tiles * self.question.images_per_step // (self.question.ranks // candidate.stages))

    def _micro_batches(self, candidate: Candidate) -> int:
        """The same between two flushes."""
        passes = self._passes(candidate)
        return min(candidate.micro_batches or passes, passes)

    def _flushes(self, candidate: Candidate, flush: float) -> float:
        """Seconds of a step whose flushes take so long each, or as long as an even balance keeps the ranks busy."""
        micro_batches = self._micro_batches(candidate)
        even = micro_batches * sum(self._layers(candidate)) / candidate.stages
        turns = self.machine.taking_turns(self.question.ranks)
        return -(-self._passes(candidate) // micro_batches) * max(flush, even, turns * even)

    def surely_fits(self, candidate: Candidate, balance: tuple[int, ...]) -> bool:
        """Whether a pipeline has a plan for certain, without a look for the best: all but its balance can be, and this
        one fits the memory, or one of those that cut in front of layers with multiply-adds."""
        from tiledseg.planning.run.pipeline import balanced_pipeline, pipeline_bytes

        asked = candidate.question(self.question)
        try:
            largest = plan_unbalanced(asked).micro_batch
            if pipeline_bytes(asked.parallel, self.graph, self.bands, largest, balance) > asked.memory:
                balanced_pipeline(asked.parallel, self.graph, self.bands, largest, asked.memory, None)
        except InputError:
            return False
        return True

    def _step(self, time: StepTime) -> StepTime:
        return self.prices.step(time, 1, time.backward)

    def tiles(self, grid: tuple[int, int]) -> tuple[StepTime, StepTime]:
        """About what all tiles of an image take, one after the other, by their pixels; and the largest of them."""
        if grid not in self._tiles:
            counts, largest = self._counts(grid), self.largest(grid)
            time, area = self.tile(largest, self.owned(grid)), largest[0] * largest[1]
            every = sum(height * width * count for (height, width), count in counts.items())
            self._tiles[grid] = time.times(every / area), time
        return self._tiles[grid]

    def _counts(self, grid: tuple[int, int]) -> dict[tuple[int, int], int]:
        rows, cols = self.sizes(grid)
        return {(height, width): rows[height] * cols[width] for height, width in itertools.product(rows, cols)}

    def dealt(self, grid: tuple[int, int], ranks: int | None = None) -> StepTime:
        """A step of mode `read`: its tiles go to the ranks by their size, longest first, as `train` deals them."""
        ranks, counts = ranks or self.question.ranks, self._counts(grid)
        order = sorted(counts, key=lambda shape: (-shape[0] * shape[1], shape))
        tiles = [k for k, shape in enumerate(order) for _ in range(self.question.images_per_step * counts[shape])]
        areas = [shape[0] * shape[1] for shape in order]
        share = Counter({0: 1}) if len(tiles) <= ranks else _busiest(tiles, areas, ranks)
        times = {k: self.tile(order[k], self.owned(grid)) for k in share}
        longest = sum_of(times[k].times(count) for k, count in share.items())
        return self.prices.step(longest, 1, times[max(share)].backward)

    def price(self, candidate: Candidate) -> Priced | Discarded:
        """By the plan of a run with these settings."""
        try:
            plan = plan_run(candidate.question(self.question))
        except InputError as error:
            why = MEMORY if candidate.stages > 1 and " bytes" in str(error) else IMPOSSIBLE
            return Discarded(candidate, why, str(error))
        if candidate.stages > 1:
            return self._priced_stages(candidate, plan)
        time = self.dealt(candidate.grid) if candidate.mesh is None else plan.cost.time
        short = plan.blocks or plan.rebuilt
        time = time._replace(again=short.extra * (time.forward + time.backward) if short else 0.0)
        if plan.memory > self.question.memory:
            reason = f"needs {plan.memory} bytes, but {self.question.memory} are to be had"
            return Discarded(candidate, MEMORY, reason, plan.memory)
        return self._priced(candidate, plan, self.prices.seconds(time), time, plan.memory)

    def _priced(self, candidate: Candidate, plan: RunPlan, seconds: float, time: StepTime, memory: int) -> Priced:
        tiles = candidate.tiles * self.question.images_per_step
        dealt = candidate.mesh is None and candidate.stages == 1
        ranks = min(self.question.ranks, tiles) if dealt else plan.spread.mesh.ranks
        return Priced(candidate, plan, seconds, time, memory, ranks, self.question.memory)

    def _priced_stages(self, candidate: Candidate, plan: RunPlan) -> Priced | Discarded:
        assert plan.pipeline is not None, "a plan of stages has a pipeline"
        assert plan.seconds is not None, "stages are looked at on known machines only"
        from tiledseg.planning.run.pipeline import pipeline_bytes

        share = self.dealt(candidate.grid, self.question.ranks // candidate.stages).times(1 / candidate.stages)
        busy = NO_TIME._replace(forward=share.forward, backward=share.backward)
        waiting = plan.seconds - self.prices.seconds(busy)
        if plan.rebuilt is None:
            parallel = candidate.question(self.question).parallel
            memory = pipeline_bytes(parallel, self.graph, self.bands, plan.micro_batch, plan.pipeline.balance)
        else:  # the plan's seconds are without what is computed once more
            memory, again = plan.rebuilt.peak, plan.rebuilt.extra * (busy.forward + busy.backward)
            busy = busy._replace(again=again)
        time = busy._replace(waiting=waiting)
        return self._priced(candidate, plan, self.prices.seconds(time), time, memory)


def _busiest(tiles: list[int], areas: list[int], ranks: int) -> Counter[int]:
    """What the rank with the most pixels has, of tiles dealt longest first: how many of each kind."""
    loads = [(0, rank) for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for kind in tiles:
        load, rank = loads[0]
        shares[rank].append(kind)
        heapq.heapreplace(loads, (load + areas[kind], rank))
    return Counter(shares[max(loads, key=lambda one: (one[0], -one[1]))[1]])
