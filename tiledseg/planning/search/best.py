"""The best settings for a run, and for the same run on more ranks.

All candidates are sorted by an estimate. The dozen of least estimate that fit are planned, the best of each kind first,
so that an estimate that is off for one kind does not hide it. The winner is the best of those that were planned; it is
not proven to be the best of all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from tiledseg.config.checks import shown
from tiledseg.errors import ConfigError, InputError
from tiledseg.geometry.halo import network_footprint
from tiledseg.geometry.tiling import context_sizes
from tiledseg.planning.cost_model.machine import Machine
from tiledseg.planning.cost_model.prices import Prices, StepTime
from tiledseg.planning.run.norms import norm_fault
from tiledseg.planning.run.pipeline import pipeline_bytes
from tiledseg.planning.run.plan import RunPlan, plan_run
from tiledseg.planning.run.question import RunQuestion
from tiledseg.planning.run.spread import Parallelism
from tiledseg.planning.search.candidates import FREE, Candidate, candidates, largest_shape
from tiledseg.planning.step.halo_traffic import SentBytes
from tiledseg.planning.walk.step_memory import fixed_memory, training_memory

BEST = 5
PLANNED = 12  # settings that fit, whose plans are compared
MOST_PLANNED = 24  # plans, once one fits
MEMORY, INEXACT, IMPOSSIBLE, SLOWER = "memory", "not exact", "not possible", "slower"
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
_MOST_OVER = 3  # times the memory: no recomputation saves more
_MESSAGES = 4  # of a layer in mode `layer`, about: halos of some layers, to four sides, forward and backward
_BLOCKS_MORE = 1.4  # times the time of a step: in blocks, about
_LEAST = 0.02  # of the difference of both: terms that make up less of it are not named


class Priced(NamedTuple):
    """Settings with their plan: seconds of a step by the clock, their terms on the slowest rank, bytes of the rank that
    needs most, the `limit` in bytes, and the `ranks` that have work."""

    candidate: Candidate
    plan: RunPlan
    seconds: float
    time: StepTime
    memory: int
    ranks: int
    limit: int


class Discarded(NamedTuple):
    """Settings that cannot be: `why` in one of the words above, and in a line; bytes `needed` where they are known."""

    candidate: Candidate
    why: str
    reason: str
    needed: int | None = None


@dataclass(frozen=True)
class Searched:
    """The best settings, best first; `other`: the best of another kind than the winner's, None where none was planned.
    `candidates`: how many there are; `discarded`: how many are not among the best, by why; `examples`: one for each
    why."""

    best: tuple[Priced, ...]
    other: Priced | None
    candidates: int
    discarded: dict[str, int]
    examples: dict[str, Discarded]

    @property
    def winner(self) -> Priced:
        return self.best[0]

    @property
    def reason(self) -> str:
        """One line: the winner beside the best of another kind, else beside the second."""
        other = self.other or (self.best[1] if len(self.best) > 1 else None)
        return explained(self.winner, other) if other else f"nothing but {self.winner.candidate.in_words} can be"


class Pricing:
    """The costs of settings for one question, on its largest image; on an assumed machine where none is known."""

    def __init__(self, question: RunQuestion) -> None:
        machine = question.machine or Machine()
        self.question, self.graph = replace(question, machine=machine), question.graph
        self.shape, self.bands, width = largest_shape(question), question.network.bands, question.value_bytes
        self.footprint = network_footprint(self.graph, question.halo, question.parallel.exact)
        self.prices = Prices(self.graph, self.bands, width, machine, question.ranks)
        self._weights = fixed_memory(self.graph, self.bands, width)
        self._tile_bytes = cache(lambda size: training_memory(self.graph, self.bands, size, width).total)
        self._tile, self._nodes = cache(self.prices.tile), cache(self.prices.nodes)

    def _contexts(self, grid: tuple[int, int]) -> tuple[tuple[int, int], float]:
        """Return the largest context of a grid, and the pixels of a context, on average."""
        rows, cols = (context_sizes(self.shape[dim], grid[dim], self.footprint) for dim in (0, 1))
        return (max(rows), max(cols)), sum(rows) * sum(cols) / math.prod(grid)

    def refusal(self, candidate: Candidate) -> Discarded | None:
        """Return why a candidate surely cannot be: a norm would see something else, or a step is by far too large."""
        question, parallel, memory = self.question, candidate.parallel, self.question.memory
        layers, needed = parallel.halo == "layer", 0
        together = parallel.stages == 1 and (layers or (candidate.blocks and candidate.tiles == 1))
        images = 1 if together else question.images_per_step
        fault = norm_fault(self.graph, parallel.halo, candidate.tiles, images, question.trains, question.keyed)
        if fault and parallel.exact:
            return Discarded(candidate, INEXACT, fault)
        if parallel.stages > 1:
            needed = self._weights // parallel.stages
            return Discarded(candidate, MEMORY, f"needs {needed} bytes for its weights") if needed > memory else None
        if not (layers or candidate.blocks or question.store):
            needed = self._tile_bytes(self._contexts(candidate.grid)[0])
        return Discarded(candidate, MEMORY, f"needs {needed} bytes", needed) if needed > _MOST_OVER * memory else None

    def passes(self, candidate: Candidate) -> StepTime:
        """Estimate the passes of the busiest rank, or pipeline: its contexts one after the other, and in mode `layer`
        their messages, but no halo."""
        ranks, images, mesh = self.question.ranks, self.question.images_per_step, candidate.parallel.mesh
        grid, layers = candidate.grid, candidate.parallel.halo == "layer"
        turns = -(-candidate.tiles * images // (ranks // candidate.parallel.stages))
        if mesh is not None:
            grid = mesh if layers else grid
            turns = -(-images // max(1, min(images, ranks // math.prod(mesh))))
            turns *= math.prod(-(-tiles // parts) for tiles, parts in zip(grid, mesh, strict=True))
        (height, width), mean = self._contexts(grid)
        owned = math.prod(self.shape) // math.prod(grid)
        share = (owned if layers else mean if turns > 1 else height * width) / (height * width)
        messages = self.prices.machine.message_seconds(SentBytes(_MESSAGES * len(self.graph)), ranks) if layers else 0.0
        return self._tile((height, width), owned).times(share)._replace(messages=messages).times(turns)

    def estimate(self, candidate: Candidate) -> float:
        """Return about the seconds of a step. A pipeline takes its first micro-batch through all layers, the others at
        the pace of the slowest stage."""
        parallel, ranks, time = candidate.parallel, self.question.ranks, self.passes(candidate)
        if parallel.stages > 1:
            again = parallel.recompute[0] == "always"
            layers = [(1 + again) * f + b for f, b in self._nodes(self._contexts(candidate.grid)[0])]
            passes = -(-candidate.tiles * self.question.images_per_step // (ranks // parallel.stages))
            flush = min(parallel.micro_batches or passes, passes)
            pace = max(sum(layers) / parallel.stages, *layers)
            seconds = -(-passes // flush) * (sum(layers) + (flush - 1) * pace)
            return seconds * self.prices.machine.taking_turns(ranks)
        return self.prices.seconds(self.prices.step(time, 1, time.backward)) * (_BLOCKS_MORE if candidate.blocks else 1)

    def price(self, candidate: Candidate) -> Priced | Discarded:
        """Return the cost by the plan of a run with these settings."""
        question, parallel, step = candidate.question(self.question), candidate.parallel, self.passes(candidate)
        try:
            plan = plan_run(question)
        except InputError as error:
            why = MEMORY if parallel.stages > 1 and " bytes" in str(error) else IMPOSSIBLE
            return Discarded(candidate, why, str(error))
        memory, waiting, ranks = plan.memory, 0.0, plan.spread.mesh.ranks
        if parallel.stages > 1:  # the ranks wait where they do not compute; the plan's seconds recompute nothing
            assert plan.pipeline, "a plan of stages has a pipeline"
            assert plan.seconds is not None, "stages are searched on known machines only"
            time = StepTime(step.forward / parallel.stages, step.backward / parallel.stages)
            waiting = plan.seconds - self.prices.seconds(time)
            of_pipeline = parallel, self.graph, self.bands, plan.micro_batch, plan.pipeline.balance
            memory = plan.rebuilt.peak if plan.rebuilt else pipeline_bytes(*of_pipeline)
        elif parallel.mesh is None:
            time = self.prices.step(step, 1, step.backward / max(1, candidate.tiles // question.ranks))
            ranks = min(question.ranks, candidate.tiles * question.images_per_step)
        else:
            time = plan.cost.time
        if memory > question.memory:
            reason = f"needs {memory} bytes, but {question.memory} are available"
            return Discarded(candidate, MEMORY, reason, memory)
        short = plan.blocks or plan.rebuilt
        again = short.extra * (time.forward + time.backward) if short else 0.0
        time = time._replace(again=again, waiting=waiting)
        planned = replace(candidate, parallel=replace(parallel, fusion=plan.spread.fusion))
        return Priced(planned, plan, self.prices.seconds(time), time, memory, ranks, question.memory)


def search(
    question: RunQuestion,
    host: int,
    best: int = BEST,
    free: Collection[str] = FREE,
    tick: Callable[[], None] = lambda: None,
) -> Searched:
    """Return the best settings for a run that trains, a step of whole images, on images like the question's largest.

    `host`: ranks of one host, which pipelines do not leave. `free`: settings that are searched; the others are as the
    question has them. `tick` is called for each plan, which takes a tenth of a second, or some where memory is short.

    Raises ConfigError where none can be, with what is lacking.
    """
    pricing = Pricing(question)
    space = candidates(pricing.question, pricing.footprint, host, free)
    if not space:
        raise _no_candidates(question, free)
    refusals = {candidate: pricing.refusal(candidate) for candidate in space}
    discarded, priced = [each for each in refusals.values() if each], list[Priced]()
    ordered = sorted((each for each, refusal in refusals.items() if not refusal), key=pricing.estimate)
    first: dict[tuple[str, bool, bool], Candidate] = {}
    for each in ordered:
        first.setdefault((each.parallel.halo, each.blocks, each.parallel.stages > 1), each)
    for place, candidate in enumerate(dict.fromkeys((*first.values(), *ordered))):
        if len(priced) >= PLANNED or (priced and place >= MOST_PLANNED):
            discarded.append(Discarded(candidate, SLOWER, "is slower by an estimate"))
            continue
        tick()
        result = pricing.price(candidate)
        if isinstance(result, Priced):
            priced.append(result)
        else:
            discarded.append(result)
    if not priced:
        raise ConfigError(_nothing(question, discarded))
    priced.sort(key=lambda each: each.seconds)
    other = next((each for each in priced if each.candidate.kind != priced[0].candidate.kind), None)
    counts = Counter(each.why for each in discarded)
    counts[SLOWER] += max(0, len(priced) - best)
    examples = {each.why: each for each in reversed(discarded)}
    return Searched(tuple(priced[:best]), other, len(space), dict(+counts), examples)


def differences(one: StepTime, other: StepTime) -> list[tuple[str, float]]:
    """Return the terms in words with the seconds that `one` takes more of each, the largest difference first."""
    terms = [(TERMS[name], mine - theirs) for name, mine, theirs in zip(TERMS, one, other, strict=True)]
    return sorted(((name, more) for name, more in terms if more), key=lambda each: -abs(each[1]))


def explained(winner: Priced, other: Priced) -> str:
    """Return one line with both, and the terms that make the difference."""
    apart = other.seconds - winner.seconds
    terms = [
        f"{'+' if more > 0 else '-'}{1000 * abs(more):.4g} ms of {name}"
        for name, more in differences(winner.time, other.time)
        if abs(more) >= _LEAST * max(apart, 1e-9)
    ]
    less = f"{100 * apart / other.seconds:.2g} % less than"
    return (
        f"{winner.candidate.in_words} takes {1000 * winner.seconds:.4g} ms a step, {less} {other.candidate.in_words} "
        f"({1000 * other.seconds:.4g} ms): {', '.join(terms[:4]) or 'no term differs'}"
    )


def _no_candidates(question: RunQuestion, free: Collection[str]) -> InputError:
    """Return why the given settings leave nothing to search: what their plan refuses, else that no search combines
    them."""
    try:
        plan_run(question)
    except InputError as error:
        return error
    given = {name: getattr(question.parallel, name) for name in sorted(FREE - set(free))}
    fixed = [
        f"parallel.{name} {shown(value)}" for name, value in given.items() if value != getattr(Parallelism(), name)
    ]
    return ConfigError(
        f"no search combines {', '.join(fixed) or 'what is given'} for {question.ranks} ranks: pipelines need "
        "parallel.halo read with one word of recompute for all stages; leave one of them out, or parallel.auto"
    )


def _nothing(question: RunQuestion, discarded: Sequence[Discarded]) -> str:
    """Return why there is nothing to choose, with the settings nearest to the memory and what they lack."""
    why = ", ".join(f"{count} {word}" for word, count in Counter(each.why for each in discarded).most_common())
    nearest = min(discarded, key=lambda each: math.inf if each.needed is None else each.needed)
    example = f"; {nearest.candidate.in_words}: {nearest.reason}"
    if nearest.needed is not None:
        lacks = nearest.needed - question.memory
        example = f"; the nearest, {nearest.candidate.in_words}, needs {nearest.needed}, {lacks} bytes more"
    return (
        f"none of {len(discarded)} settings for {question.ranks} ranks of {question.memory} bytes can be ({why}"
        f"{example}); use memory.blocks with memory.store, a folder on a local disk, more memory or ranks, a smaller "
        "model, or a lower precision"
    )


class Point(NamedTuple):
    """A number of ranks: images of a step, its settings, `efficiency` per rank (1: as on the first number), and the
    term that takes most of the loss; None where nothing is lost."""

    ranks: int
    images: int
    priced: Priced
    efficiency: float
    limit: str | None


def scaling(question: RunQuestion, numbers: Sequence[int], host: int, most: int) -> dict[str, list[Point]]:
    """Return a strong and a weak scaling study over numbers of ranks, both in the mode that is best on the first: an
    efficiency compares a mode with itself. Strong: the step keeps its images, so the result stays the same, and each
    number has its best settings. Weak: the images of a step grow with the ranks, up to `most`, and the settings of an
    image stay those of the first number."""
    first = search(replace(question, ranks=numbers[0]), host).winner
    mode = {name: getattr(first.candidate.parallel, name) for name in ("halo", "stages")}
    alike, free = replace(question, parallel=replace(question.parallel, **mode)), FREE - set(mode)
    strong = [(numbers[0], question.images_per_step, first)]
    for ranks in numbers[1:]:
        winner = search(replace(alike, ranks=ranks), host, free=free).winner
        strong.append((ranks, question.images_per_step, winner))
    weak = strong[:1]
    for ranks in numbers[1:]:
        images = question.images_per_step * ranks // numbers[0]
        if images > most:
            break
        result = Pricing(replace(question, ranks=ranks, images_per_step=images)).price(first.candidate)
        if isinstance(result, Discarded):
            raise ConfigError(f"{first.candidate.in_words} on {ranks} ranks: {result.reason}")
        weak.append((ranks, images, result))
    return {name: [_point(rows[0], *row) for row in rows] for name, rows in (("strong", strong), ("weak", weak))}


def _point(first: tuple[int, int, Priced], ranks: int, images: int, priced: Priced) -> Point:
    """Return a point, whose ranks would have `times` less work each than on the first number, were none lost."""
    times, start = ranks / first[0] * first[1] / images, first[2]
    lost = {name: mine - one / times for name, mine, one in zip(TERMS, priced.time, start.time, strict=True)}
    most, idle = max(lost, key=lambda name: lost[name]), 1 - priced.ranks / ranks
    limit = TERMS[most] if lost[most] > 0.001 * priced.seconds else None
    if limit and most in ("forward", "backward"):
        limit = f"{100 * idle:.2g} % of the ranks idle" if idle > 0.05 else "computing: halos, uneven shares"
    return Point(ranks, images, priced, start.seconds / times / priced.seconds, limit)


def parse_range(text: str) -> tuple[int, ...]:
    """Parse 'A:B' into the GPU counts A, 2A, 4A, ..., B. Raises ConfigError for anything else."""
    words = text.split(":")
    if len(words) != 2 or not all(word.isascii() and word.isdigit() and len(word) < 8 for word in words):
        raise ConfigError(f"--scaling is '{text}'; give the fewest and the most GPUs, 64:1536 say")
    first, last = map(int, words)
    if not 1 <= first < last <= 1_000_000:
        raise ConfigError(f"--scaling is '{text}'; give two numbers that rise, from 1 to 1000000")
    return (*(first << power for power in range(20) if first << power < last), last)
