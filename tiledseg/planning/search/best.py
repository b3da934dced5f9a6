"""The best settings for a run: of all in the space those whose predicted step takes least.

Settings are looked at in the order of what they take at least, until that is more than what the best few take. So the
answer is that of looking at all. What they take at least is first a quick guess, then, of a folded pipeline whose guess
is low enough, a bound that takes longer to find.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from tiledseg.config.checks import shown
from tiledseg.errors import ConfigError, InputError
from tiledseg.geometry.halo import network_footprint
from tiledseg.planning.cost_model.machine import Machine
from tiledseg.planning.run.blocks import BlocksAsked
from tiledseg.planning.run.parallelism import Parallelism
from tiledseg.planning.run.plan import plan_run
from tiledseg.planning.run.question import RunQuestion
from tiledseg.planning.search.candidate import Candidate
from tiledseg.planning.search.price import INEXACT, SLOWER, Discarded, Priced, Pricing
from tiledseg.planning.search.space import FREE, Space

BEST = 5
FUSED = 1  # of the best settings with layers shared: the best fusion takes a while to find
_BLOCKS = 2, 4, 8, 16  # along a side, that are tried where nothing fits
SLACK = 0.98
"""Of a guess: a block of a layer computes its halo besides, but at the rate of another size."""


@dataclass(frozen=True)
class Searched:
    """The best settings, best first; `other`: the best of another kind than the winner's, None where there is none.
    `candidates`: how many were in the space; `discarded`: how many of them are not among the best, by why; `examples`:
    one for each why."""

    best: tuple[Priced, ...]
    other: Priced | None
    candidates: int
    discarded: dict[str, int]
    examples: dict[str, Discarded]

    @property
    def winner(self) -> Priced:
        return self.best[0]

    @property
    def runner_up(self) -> Priced | None:
        """What the winner is to be compared with: the best of another kind, else the second."""
        return self.other or (self.best[1] if len(self.best) > 1 else None)


def search(
    question: RunQuestion,
    host: int,
    best: int = BEST,
    prune: bool = True,
    free: Collection[str] = FREE,
    tick: Callable[[], None] = lambda: None,
    compared: bool = True,
) -> Searched:
    """For a run that trains, a step of whole images, on images like the question's largest. `host`: ranks of one host,
    which pipelines do not leave. Without `prune` all settings are looked at. `free`: those that are searched, the
    others are as the question has them. Unless `compared` the best of another kind is not looked for. `tick` is called
    for each plan that is made: it takes a tenth of a second, or some, where memory is short.

    Raises ConfigError where none can be, with what is lacking.
    """
    pricing = pricing_of(question)
    asked = pricing.question
    space = Space(asked, pricing.footprint, pricing.shape, host, asked.is_profiled, free)
    return _Search(space, pricing, best, prune, tick).run(compared)


def pricing_of(question: RunQuestion) -> Pricing:
    """Of settings for a run on images like the question's largest; on an assumed machine where none is known."""
    machine = question.machine or Machine()
    question = replace(question, machine=machine)
    largest = max(question.rasters, key=lambda extent: extent.shape[0] * extent.shape[1]).shape
    footprint = network_footprint(question.graph, question.halo, question.parallel.exact)
    return Pricing(question, footprint, largest, machine)


@dataclass(frozen=True, order=True)
class _Waiting:
    """Settings that may be priced, in the order in which they are looked at: by what they take at least, then by their
    `place` among all in the order of their guesses. `balance`: of a pipeline whose `bound` is more than its guess."""

    bound: float
    place: int
    guess: float = field(compare=False)
    candidate: Candidate = field(compare=False)
    balance: tuple[int, ...] | None = field(default=None, compare=False)
    is_bounded: bool = field(default=False, compare=False)


class _Search:
    def __init__(self, space: Space, pricing: Pricing, best: int, prune: bool, tick: Callable[[], None]) -> None:
        self.space, self.pricing, self.best, self.prune, self.tick = space, pricing, best, prune, tick
        self.discarded: list[Discarded] = []
        self.priced: dict[int, Priced | Discarded] = {}  # by their places; in the end also those that are slower
        self.surpassed: set[int] = set()  # places of those that fit, and are slower by their bound

    @property
    def found(self) -> list[Priced]:
        return [each for _, each in sorted(self.priced.items()) if isinstance(each, Priced)]

    def run(self, compared: bool) -> Searched:
        candidates = list(self.space.candidates())
        if not candidates:
            raise _no_candidates(self.space)
        possible = sorted(self._possible(candidates), key=lambda each: each[0])
        waiting = [_Waiting(guess, place, guess, each) for place, (guess, each) in enumerate(possible)]
        waiting = self._look(waiting, [], self.best)
        if "fusion" in self.space.free:
            self._fuse(len(possible))
        if not self.found:
            raise ConfigError(_nothing(self.pricing, self._refused()))
        kind = min(self.found, key=_seconds).candidate.kind
        if compared:
            others = [each for each in self.found if each.candidate.kind != kind]
            self._look([each for each in waiting if each.candidate.kind != kind], others, 1)
        known = self.surpassed | self.priced.keys()
        for each in [each for each in waiting if each.place not in known]:
            reason = f"takes {each.guess:.4g} s a step at least"
            self.priced[each.place] = Discarded(each.candidate, SLOWER, reason)
        return self._answer(kind, len(candidates))

    def _look(self, waiting: Sequence[_Waiting], found: Sequence[Priced], best: int) -> list[_Waiting]:
        """Prices what may be among the `best` of all and those `found` before; what is left. Of that each whose guess
        is not more than what they take is known to fit the memory, or is priced."""
        heap, seconds = list(waiting), sorted(map(_seconds, found))[:best]
        heapq.heapify(heap)
        while heap and not (self.prune and heap[0].bound > _limit(seconds, best)):
            each = heapq.heappop(heap)
            if self.prune and not each.is_bounded:
                heapq.heappush(heap, self._bounded(each))
            else:
                priced = self._price(each)
                seconds = sorted([*seconds, *priced])[:best]
        for each in heap:
            if each.guess <= _limit(seconds, best) and each.place not in self.surpassed:
                self._surpass(each)
        return [each for each in heap if each.place not in self.priced]

    def _bounded(self, each: _Waiting) -> _Waiting:
        """With the bound that takes longer to find."""
        found = self.pricing.bounded(each.candidate)
        if found is None:
            return replace(each, is_bounded=True)
        return replace(each, bound=max(each.guess, SLACK * found[0]), balance=found[1], is_bounded=True)

    def _surpass(self, each: _Waiting) -> None:
        """Of what is slower by its bound: whether it fits the memory is all that is left to say of it."""
        if each.balance is not None and self.pricing.surely_fits(each.candidate, each.balance):
            self.tick()
            self.surpassed.add(each.place)
        else:
            self._price(each)

    def _possible(self, candidates: Sequence[Candidate]) -> list[tuple[float, Candidate]]:
        """What may fit and is exact, with what it takes at least."""
        found = []
        for candidate in candidates:
            fault = self.space.fault(candidate) if self.space.question.parallel.exact else None
            size = None if fault else self.pricing.too_large(candidate)
            if fault:
                self.discarded.append(Discarded(candidate, INEXACT, fault))
            elif size:
                self.discarded.append(size)
            else:
                found.append((SLACK * self.pricing.guess(candidate), candidate))
        return found

    def _price(self, each: _Waiting) -> list[float]:
        """Its seconds, or nothing where it cannot be."""
        self.tick()
        self.surpassed.discard(each.place)
        found = self.priced[each.place] = self.pricing.price(each.candidate)
        return [found.seconds] if isinstance(found, Priced) else []

    def _refused(self) -> list[Discarded]:
        """What cannot be, in the order of guesses."""
        return [*self.discarded, *(each for _, each in sorted(self.priced.items()) if isinstance(each, Discarded))]

    def _fuse(self, place: int) -> None:
        """Prices the best settings that share layers with their best fusion, where that is not a thin halo each."""
        ordered = sorted(self.found, key=_seconds)[: self.best]
        for each in [each for each in ordered if each.candidate.kind == "layer"][:FUSED]:
            fused = self.pricing.price(replace(each.candidate, fusion=None))
            if isinstance(fused, Priced) and fused.plan.spread.fusion != 1:
                candidate = replace(fused.candidate, fusion=fused.plan.spread.fusion)
                self.priced[place] = replace(fused, candidate=candidate)

    def _answer(self, kind: str, candidates: int) -> Searched:
        ordered = sorted(self.found, key=_seconds)
        best = ordered[: self.best]
        other = next((each for each in ordered if each.candidate.kind != kind), None)
        refused = self._refused()
        counts = Counter(each.why for each in refused)
        counts[SLOWER] += len(ordered) - len(best) + len(self.surpassed)
        examples = {each.why: each for each in reversed(refused)}
        return Searched(tuple(best), other, candidates, dict(+counts), examples)


def _seconds(priced: Priced) -> float:
    return priced.seconds


def _limit(seconds: Sequence[float], best: int) -> float:
    """Seconds of the last of the best few, which are sorted; of fewer there is no limit."""
    return seconds[best - 1] if len(seconds) >= best else math.inf


def _no_candidates(space: Space) -> InputError:
    """Why what is given leaves nothing to look at: what the plan refuses of it, else that no search combines it."""
    try:
        plan_run(space.question)
    except InputError as error:
        return error
    asked = space.question.parallel
    given = [
        f"parallel.{name} {shown(getattr(asked, name))}"
        for name in sorted(FREE - set(space.free))
        if getattr(asked, name) != getattr(Parallelism(), name)
    ]
    return ConfigError(
        f"no search combines {', '.join(given) or 'what is given'} for {space.question.ranks} ranks: pipelines are "
        "looked at in parallel.halo read, with one word of recompute for all stages; leave one of them out, or "
        "parallel.auto"
    )


def _nothing(pricing: Pricing, discarded: Sequence[Discarded]) -> str:
    """Why there is nothing to choose, with what comes nearest to the memory and what it lacks."""
    question, counts = pricing.question, Counter(each.why for each in discarded)
    why = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    nearest = pricing.nearest(discarded)
    example = f"; {discarded[-1].candidate.in_words}: {discarded[-1].reason}"
    if nearest is not None and nearest.needed is not None:
        lacks = nearest.needed - question.memory
        example = f"; the nearest, {nearest.candidate.in_words}, needs {nearest.needed}, {lacks} bytes more"
    return (
        f"none of {len(discarded)} settings for {question.ranks} ranks of {question.memory} bytes can be ({why}"
        f"{example}); use {_blocks_that_fit(question)}more memory or ranks, a smaller model, or a lower precision"
    )


def _blocks_that_fit(question: RunQuestion) -> str:
    """What to say of blocks in a file, where a search was to look at none: nothing where they do not fit either."""
    if question.blocks is not None and question.blocks.in_file:
        return ""
    alone = replace(question, parallel=Parallelism(), grid=(1, 1))
    for side in _BLOCKS:
        try:
            plan = plan_run(replace(alone, blocks=BlocksAsked((side, side), in_file=True)))
        except InputError:
            return ""
        if plan.memory <= question.memory:
            taken = f"{plan.memory} bytes with {side} x {side} of them"
            return f"memory.blocks with memory.store, a folder on a local disk ({taken}), "
    return ""
