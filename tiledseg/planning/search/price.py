"""The cost of settings: an estimate in a millisecond or so, and seconds and bytes of their plan in a tenth of a
second."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from tiledseg.errors import BudgetError, InputError
from tiledseg.geometry.halo import Footprint, network_footprint
from tiledseg.geometry.tiling import context_sizes
from tiledseg.planning.cost_model.machine import Machine
from tiledseg.planning.cost_model.prices import Prices
from tiledseg.planning.cost_model.step_time import NO_TIME, StepTime, sum_of
from tiledseg.planning.run.plan import RunPlan, plan_run
from tiledseg.planning.run.question import RunQuestion
from tiledseg.planning.search.space import Candidate
from tiledseg.planning.step.halo_traffic import SentBytes
from tiledseg.planning.walk.step_memory import fixed_memory, training_memory

MOST_OVER = 3  # times the memory: no recomputation saves more
MESSAGES = 4  # of a layer in mode `layer`, about: halos of some layers, to four sides, forward and backward
BLOCKS_MORE = 1.4  # times the time of a step: in blocks, about
MEMORY, INEXACT, IMPOSSIBLE, SLOWER = "memory", "not exact", "not possible", "slower"


@dataclass(frozen=True)
class Priced:
    """Settings with their plan: seconds of a step by the clock, the terms of the slowest rank, bytes of the rank that
    needs most, the `limit` in bytes, and the `ranks` that have work."""

    candidate: Candidate
    plan: RunPlan
    seconds: float
    time: StepTime
    memory: int
    ranks: int
    limit: int

    @property
    def in_words(self) -> str:
        fusion = self.candidate.fusion
        return replace(self.candidate, fusion=self.plan.spread.fusion if fusion is None else fusion).in_words


@dataclass(frozen=True)
class Discarded:
    """Settings that cannot be: `why` in one of the words above, and in a line; bytes `needed` where a plan says so."""

    candidate: Candidate
    why: str
    reason: str
    needed: int | None = None


class Pricing:
    """The costs of settings for one question, on its largest image; on an assumed machine where none is known."""

    def __init__(self, question: RunQuestion) -> None:
        self.machine = question.machine or Machine()
        self.question = replace(question, machine=self.machine)
        self.shape = max(question.rasters, key=lambda extent: extent.shape[0] * extent.shape[1]).shape
        self.graph, self.bands, self.width = question.graph, question.network.bands, question.value_bytes
        self.footprint: Footprint = network_footprint(self.graph, question.halo, question.parallel.exact)
        self.prices = Prices(self.graph, self.bands, self.width, self.machine, question.ranks)
        self.weights = fixed_memory(self.graph, self.bands, self.width)
        self.tile, self.nodes = cache(self.prices.tile), cache(self.prices.nodes)
        self.tile_bytes = cache(lambda size: training_memory(self.graph, self.bands, size, self.width).total)
        self.sizes = cache(self._sizes)

    def _sizes(self, grid: tuple[int, int]) -> tuple[Counter[int], Counter[int]]:
        """Return the contexts along each dim, and how many there are of each."""
        rows, cols = (Counter(context_sizes(self.shape[dim], grid[dim], self.footprint)) for dim in (0, 1))
        return rows, cols

    def largest(self, grid: tuple[int, int]) -> tuple[int, int]:
        rows, cols = self.sizes(grid)
        return max(rows), max(cols)

    def _owned(self, grid: tuple[int, int]) -> int:
        """Return the pixels of a core, on average."""
        return self.shape[0] * self.shape[1] // (grid[0] * grid[1])

    def too_large(self, candidate: Candidate) -> Discarded | None:
        """Return why a step surely does not fit; None where its plan has to say it."""
        question = self.question
        if candidate.stages > 1:
            needed = self.weights // candidate.stages
            reason = f"needs {needed} bytes a stage for its weights"
            return Discarded(candidate, MEMORY, reason) if needed > question.memory else None
        if candidate.halo == "layer" or candidate.blocks or question.store is not None:
            return None
        needed = self.tile_bytes(self.largest(candidate.grid))
        too_much = needed > MOST_OVER * question.memory
        return Discarded(candidate, MEMORY, f"needs {needed} bytes", needed) if too_much else None

    def nearest(self, discarded: Sequence[Discarded]) -> Discarded | None:
        """Return the settings that need least memory of those that do not fit, with what they need if all is
        recomputed that helps; None where no plan has said it."""
        known = [each for each in discarded if each.needed is not None]
        if not known:
            return None
        nearest = min(known, key=lambda each: each.needed or 0)
        try:
            plan_run(replace(nearest.candidate.question(self.question), budgeted=True, store=None))
        except BudgetError as error:
            return replace(nearest, needed=error.least or nearest.needed)
        except InputError:
            pass  # of another kind: it is said when the settings are given by hand
        return nearest

    def estimate(self, candidate: Candidate) -> float:
        """Return about the seconds of a step."""
        question = self.question
        if candidate.stages > 1:
            return self._staged(candidate)
        if candidate.mesh is None:
            largest = self.largest(candidate.grid)
            counts, area = self._counts(candidate.grid), largest[0] * largest[1]
            mean = sum(height * width * count for (height, width), count in counts.items()) / candidate.tiles / area
            turns = -(-candidate.tiles * question.images_per_step // question.ranks)
            time = self.tile(largest, self._owned(candidate.grid)).times(turns * mean if turns > 1 else 1.0)
        else:
            rows, cols = candidate.mesh
            replicas = max(1, question.ranks // (rows * cols))
            images = -(-question.images_per_step // min(question.images_per_step, replicas))
            context = self.largest(candidate.mesh if candidate.halo == "layer" else candidate.grid)
            time = self.tile(context, context[0] * context[1])
            if candidate.halo == "layer":  # a block's pixels, without a halo
                time = time.times(self.shape[0] * self.shape[1] / (rows * cols * context[0] * context[1]))
                messages = self.prices.messages(SentBytes(MESSAGES * len(self.graph), 0))
                time = time.plus(StepTime(messages=messages)).times(images)
            else:
                tiles = -(-candidate.grid[0] // rows) * -(-candidate.grid[1] // cols)
                time = time.times(images * tiles)
        seconds = self.prices.seconds(self.prices.step(time, 1, time.backward))
        return seconds * (BLOCKS_MORE if candidate.blocks else 1.0)

    def _staged(self, candidate: Candidate) -> float:
        """Return the estimate of a pipeline: one micro-batch through all layers, the others at the pace of the slowest
        stage."""
        again = candidate.recompute == "always"
        layers = [time.step + again * time.forward for time in self.nodes(self.largest(candidate.grid))]
        pipelines = self.question.ranks // candidate.stages
        passes = -(-candidate.tiles * self.question.images_per_step // pipelines)
        micro_batches = min(candidate.micro_batches or passes, passes)
        pace = max(sum(layers) / candidate.stages, *layers)
        flush = sum(layers) + (micro_batches - 1) * pace
        return -(-passes // micro_batches) * flush * self.machine.taking_turns(self.question.ranks)

    def _counts(self, grid: tuple[int, int]) -> dict[tuple[int, int], int]:
        rows, cols = self.sizes(grid)
        return {(height, width): rows[height] * cols[width] for height, width in itertools.product(rows, cols)}

    def dealt(self, grid: tuple[int, int], ranks: int | None = None) -> StepTime:
        """Return a step of mode `read` on the busiest rank: tiles go to ranks as `train` deals them, longest first."""
        ranks, counts = ranks or self.question.ranks, self._counts(grid)
        loads: list[tuple[int, int, list[tuple[int, int]]]] = [(0, rank, []) for rank in range(ranks)]
        for shape in sorted(counts, key=lambda shape: (-shape[0] * shape[1], shape)):
            for _ in range(self.question.images_per_step * counts[shape]):
                area, rank, tiles = loads[0]
                heapq.heapreplace(loads, (area + shape[0] * shape[1], rank, [*tiles, shape]))
        busiest = max(loads, key=lambda load: (load[0], -load[1]))[2]
        times = {shape: self.tile(shape, self._owned(grid)) for shape in busiest}
        return self.prices.step(sum_of(times[shape] for shape in busiest), 1, times[busiest[-1]].backward)

    def price(self, candidate: Candidate) -> Priced | Discarded:
        """Return the cost by the plan of a run with these settings."""
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
            reason = f"needs {plan.memory} bytes, but {self.question.memory} are available"
            return Discarded(candidate, MEMORY, reason, plan.memory)
        return self._priced(candidate, plan, time, plan.memory)

    def _priced(self, candidate: Candidate, plan: RunPlan, time: StepTime, memory: int) -> Priced:
        tiles = candidate.tiles * self.question.images_per_step
        dealt = candidate.mesh is None and candidate.stages == 1
        ranks = min(self.question.ranks, tiles) if dealt else plan.spread.mesh.ranks
        return Priced(candidate, plan, self.prices.seconds(time), time, memory, ranks, self.question.memory)

    def _priced_stages(self, candidate: Candidate, plan: RunPlan) -> Priced:
        """Return the cost of a pipeline: what its ranks do not compute, they wait. The plan's seconds do not include
        recomputation."""
        assert plan.pipeline is not None, "a plan of stages has a pipeline"
        assert plan.seconds is not None, "stages are priced on known machines only"
        from tiledseg.planning.run.pipeline import pipeline_bytes

        share = self.dealt(candidate.grid, self.question.ranks // candidate.stages).times(1 / candidate.stages)
        busy = NO_TIME._replace(forward=share.forward, backward=share.backward)
        waiting = plan.seconds - self.prices.seconds(busy)
        if plan.rebuilt is None:
            parallel = candidate.question(self.question).parallel
            memory = pipeline_bytes(parallel, self.graph, self.bands, plan.micro_batch, plan.pipeline.balance)
            return self._priced(candidate, plan, busy._replace(waiting=waiting), memory)
        again = plan.rebuilt.extra * (busy.forward + busy.backward)
        return self._priced(candidate, plan, busy._replace(waiting=waiting, again=again), plan.rebuilt.peak)
