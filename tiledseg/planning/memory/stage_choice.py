"""What becomes of each tensor on the stages of a pipeline, so that each fits a budget.

A stage keeps several micro-batches, as many as its schedule has in flight, and one of them goes backward. So two sums
are bounded: what is kept of a micro-batch, and the walked peak. How the budget is shared between them is tried at
`SHARES`; for each, the choice is that of one walk, whose last moment has what may be kept as its room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tiledseg.geometry.memory_policy import homes
from tiledseg.geometry.memory_words import KEEP, MemoryPolicy
from tiledseg.pipeline.balance import cuts
from tiledseg.pipeline.schedule import kept_of, most_in_flight
from tiledseg.planning.memory.choice import LevelChoice, MemoryChoice, StepChoices
from tiledseg.planning.memory.leaving import choose
from tiledseg.planning.stages.staged_pipeline import PipelineCase
from tiledseg.planning.walk.items import price

SHARES = 6


@dataclass(frozen=True)
class ChunkChoices:
    """A chunk's walk of one micro-batch, of which it keeps `complete` at once, and its bytes besides: weights, and the
    inputs of micro-batches that are computed once more as a whole."""

    step: StepChoices
    complete: int

    def total(self, choice: MemoryChoice) -> int:
        """Bytes by a choice, of which `peak` is one micro-batch's."""
        return choice.peak + (self.complete - 1) * self._kept(choice.policy)

    @property
    def all_kept(self) -> MemoryChoice:
        found = self.step.choose(self.step.kept, quick=True)
        assert found is not None, "all that is kept fits itself"
        return found

    def choose(self, budget: int) -> MemoryChoice | None:
        """The cheapest of at most `budget` bytes; None where none was found."""
        if self.complete == 1:
            return self.step.choose(budget)
        low, high = self.step.fixed + max(self.step.walk.base), min(self.step.kept, budget)
        peaks = [low + (high - low) * share // SHARES for share in range(1, SHARES + 1)]
        found = [each for peak in peaks if (each := self._at(peak, budget)) is not None]
        return min(found, key=lambda each: each.extra, default=None)

    def _at(self, peak: int, budget: int) -> MemoryChoice | None:
        """With a walked peak of at most so many bytes, and as much kept as the others may."""
        found, fixed = self.step.found, self.step.fixed
        kept = (budget - peak) // (self.complete - 1)
        more = peak - fixed - (kept - found.walk.rebuilding[-1])
        base = *found.walk.base[:-1], max(found.walk.base[-1], more)
        walk = replace(found.walk, base=base)
        chosen = choose(walk, peak - fixed, quick=True)
        if chosen is None:
            return None
        return self.step.told(replace(chosen, peak=price(found.walk, chosen.choices).peak))

    def _kept(self, policy: MemoryPolicy) -> int:
        return self.step.found.kept(self.step.found.lying(policy))


def choose_stages(case: PipelineCase, balance: Sequence[int], budget: int) -> MemoryChoice | None:
    """One choice for all stages of a balance, each of at most `budget` bytes; None where a stage has none. A rank of
    several chunks shares its budget among them as they need it."""
    runs, needed = cuts(balance), case.rank_bytes(balance)
    chosen = []
    for chunk, run in enumerate(runs):
        rank, choices = case.ranks[chunk], _chunk(case, run, chunk)
        own = case.memory()(*run, chunk)
        fits = needed[rank] <= budget
        found = choices.all_kept if fits else choices.choose(own * budget // needed[rank])
        if found is None:
            return None
        chosen.append((rank, choices, found))
    totals = [sum(c.total(f) for r, c, f in chosen if r == rank) for rank in range(case.stages)]
    if max(totals) > budget:
        return None
    return replace(_joined(case, runs, [found for *_, found in chosen]), kept=max(needed), peak=max(totals))


def _chunk(case: PipelineCase, run: tuple[int, int], chunk: int) -> ChunkChoices:
    held = most_in_flight(case.schedule, case.stages, case.micro_batches)
    complete, inputs = kept_of(case.schedule, held[chunk], case.modes[case.ranks[chunk]])
    memory = case.prices.memory(*run)
    fixed = memory.weights + memory.gradients + memory.optimizer + inputs * memory.inputs
    return ChunkChoices(StepChoices(case.prices.walk(*run), fixed), max(1, complete))


def _joined(case: PipelineCase, runs: Sequence[tuple[int, int]], found: Sequence[MemoryChoice]) -> MemoryChoice:
    """A tensor goes by the word of the chunk that makes it; in others it is kept. `extra`: of the stage that takes most
    more time."""
    graph = case.prices.graph
    tensors, inside = [KEEP] * len(graph.names), [KEEP] * len(graph)
    for (first, stop), each in zip(runs, found, strict=True):
        inside[first:stop] = each.policy.inside[first:stop]
        tensors[first + 1 : stop + 1] = each.policy.tensors[first + 1 : stop + 1]
    place = homes(graph)
    chunk_of = [chunk for chunk, (first, stop) in enumerate(runs) for _ in range(first, stop)]
    crossing = {place[k + 1] for k in range(len(graph)) if chunk_of[k] != chunk_of[max(0, place[k + 1] - 1)]}
    words = tuple(KEEP if home in crossing else tensors[home] for home in place)
    items = tuple(pair for each in found for pair in each.items)
    extra, gap = max(each.extra for each in found), max(each.gap for each in found)
    return MemoryChoice(MemoryPolicy(words, tuple(inside)), 0, 0, _levels(found), items, extra, gap)


def _levels(found: Sequence[MemoryChoice]) -> tuple[LevelChoice, ...]:
    """A part of the network may be spread over stages."""
    levels: dict[str, LevelChoice] = {}
    for level in (level for each in found for level in each.levels):
        before = levels.get(level.name, LevelChoice(level.name, 0, 0, 0.0))
        sizes = before.kept + level.kept, before.rebuilt + level.rebuilt, max(before.extra, level.extra)
        levels[level.name] = LevelChoice(level.name, *sizes)
    return tuple(levels.values())
