"""The best settings for a run: of all in the space those whose predicted step takes least.

Settings are looked at in the order of what they take at least, until that is more than what the best few take. So the
answer is that of looking at all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from tiledseg.config.checks import shown
from tiledseg.errors import ConfigError, InputError
from tiledseg.geometry.halo import network_footprint
from tiledseg.planning.cost_model.machine import Machine
from tiledseg.planning.run.memory.blocks import BlocksAsked
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
) -> Searched:
    """For a run that trains, a step of whole images, on images like the question's largest. `host`: ranks of one host,
    which pipelines do not leave. Without `prune` all settings are looked at. `free`: those that are searched, the
    others are as the question has them. `tick` is called for each plan that is made: it takes a tenth of a second, or
    some, where memory is short.

    Raises ConfigError where none can be, with what is lacking.
    """
    pricing = pricing_of(question)
    asked = pricing.question
    space = Space(asked, pricing.footprint, pricing.shape, host, asked.is_profiled, free)
    return _Search(space, pricing, best, prune, tick).run()


def pricing_of(question: RunQuestion) -> Pricing:
    """Of settings for a run on images like the question's largest; on an assumed machine where none is known."""
    machine = question.machine or Machine()
    question = replace(question, machine=machine)
    largest = max(question.rasters, key=lambda extent: extent.shape[0] * extent.shape[1]).shape
    footprint = network_footprint(question.graph, question.halo, question.parallel.exact)
    return Pricing(question, footprint, largest, machine)


class _Search:
    def __init__(self, space: Space, pricing: Pricing, best: int, prune: bool, tick: Callable[[], None]) -> None:
        self.space, self.pricing, self.best, self.prune, self.tick = space, pricing, best, prune, tick
        self.found: list[Priced] = []
        self.discarded: list[Discarded] = []

    def run(self) -> Searched:
        candidates = list(self.space.candidates())
        if not candidates:
            raise _no_candidates(self.space)
        waiting = sorted(self._possible(candidates), key=lambda each: each[0])
        slower = []
        for guess, candidate in waiting:
            if self.prune and guess > _limit(self.found, self.best):
                slower.append((guess, candidate))
            else:
                self._price(candidate)
        if "fusion" in self.space.free:
            self._fuse()
        if not self.found:
            raise ConfigError(_nothing(self.pricing, self.discarded))
        kind = min(self.found, key=_seconds).candidate.kind
        for guess, candidate in slower:
            others = [each for each in self.found if each.candidate.kind != kind]
            if candidate.kind == kind or guess > _limit(others, 1):
                self.discarded.append(Discarded(candidate, SLOWER, f"takes {guess:.4g} s a step at least"))
            else:
                self._price(candidate)
        return self._answer(kind, len(candidates))

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

    def _price(self, candidate: Candidate) -> None:
        self.tick()
        priced = self.pricing.price(candidate)
        if isinstance(priced, Discarded):
            self.discarded.append(priced)
        else:
            self.found.append(priced)

    def _fuse(self) -> None:
        """Prices the best settings that share layers with their best fusion, where that is not a thin halo each."""
        ordered = sorted(self.found, key=_seconds)[: self.best]
        for each in [each for each in ordered if each.candidate.kind == "layer"][:FUSED]:
            fused = self.pricing.price(replace(each.candidate, fusion=None))
            if isinstance(fused, Priced) and fused.plan.spread.fusion != 1:
                self.found.append(replace(fused, candidate=replace(fused.candidate, fusion=fused.plan.spread.fusion)))

    def _answer(self, kind: str, candidates: int) -> Searched:
        ordered = sorted(self.found, key=_seconds)
        best = ordered[: self.best]
        other = next((each for each in ordered if each.candidate.kind != kind), None)
        counts = Counter(each.why for each in self.discarded)
        counts[SLOWER] += len(ordered) - len(best)
        examples = {each.why: each for each in reversed(self.discarded)}
        return Searched(tuple(best), other, candidates, dict(+counts), examples)


def _seconds(priced: Priced) -> float:
    return priced.seconds


def _limit(found: Sequence[Priced], best: int) -> float:
    """Seconds of the last of the best few; of fewer there is no limit."""
    return sorted(map(_seconds, found))[best - 1] if len(found) >= best else math.inf


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
