"""The greedy choice of what is kept, recomputed or offloaded, so that a training step fits a budget.

The choice drops tensors, those of least seconds per byte first, until all moments fit the budget; then it keeps again
what fits. Only bytes above the budget count. A tensor may change together with one that it is recomputed from, as a
concatenation with its skip. Peak and seconds come from the memory walk (`walk.items.price`). The distance to the best
choice is bounded by the moment at which dropping enough bytes takes most time, were tensors divisible.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

from tiledseg.geometry.graph import KEEP, OFFLOAD, REBUILD, WORDS, Graph, MemoryPolicy
from tiledseg.planning.walk.cost import ForwardWalk, tile_walk
from tiledseg.planning.walk.cost_model import ASSUMED, LEAST, STAYING, Machine, Store
from tiledseg.planning.walk.items import BACKWARD, Walk, Words, price
from tiledseg.planning.walk.mode_cost import Task, layer_ranks, settled
from tiledseg.planning.walk.step_memory import fixed_memory, network_walk

SLACK = 0.1  # one start drops too much: it aims below the budget, by this share of the way to the least peak
Change = tuple[tuple[int, str], ...]  # numbers of items, and their new words


class Outcome(NamedTuple):
    """A word for each item, and the further seconds of a step. `bytes`: the peak, or in a search that still changes
    words the bytes above the budget, summed over all moments."""

    words: Words
    seconds: float
    bytes: int


class Greedy:
    """The choices of a walk. `copies`: passes whose kept tensors are in memory at once, of which one runs backward."""

    def __init__(self, walk: Walk, copies: int = 1) -> None:
        self.walk, self.copies = walk, copies
        self.kept: Words = tuple(KEEP if item.used or not item.can_be(REBUILD) else REBUILD for item in walk.items)
        self.rebuilt: Words = tuple(REBUILD if item.can_be(REBUILD) else KEEP for item in walk.items)
        words = [[word for word in WORDS if item.can_be(word)] for item in walk.items]
        self.changes: list[Change] = [((index, word),) for index, here in enumerate(words) for word in here]
        self.changes += [
            ((index, word), (parent, other))
            for index, item in enumerate(walk.items)
            for parent in item.parents
            for word, other in product((KEEP, REBUILD), repeat=2)
            if word in words[index] and other in words[parent]
        ]

    def needs(self, words: Words, reserved: int = 0) -> tuple[float, list[int]]:
        """Return the seconds of a choice, and the bytes that each moment needs: `reserved` ones at least for offloaded
        tensors on their way."""
        cost, pairs = price(self.walk, words), zip(self.walk.items, words, strict=True)
        away = max([item.bytes for item, word in pairs if word == OFFLOAD], default=0)
        more = max(reserved, STAYING * away) + (self.copies - 1) * self.walk.kept(words)
        return cost.seconds, [need + more for need in cost.needs]

    def peak(self, words: Words) -> int:
        return max(self.needs(words)[1])

    @cached_property
    def leanest(self) -> Words:
        """The choice of least peak among those reached from all starts."""
        budget = max(self.walk.base)
        starts = self.kept, self.rebuilt, *self._offloading(budget)
        return min((self._improved(start, budget) for start in starts), key=self.peak)

    def choose(self, budget: int) -> Outcome | None:
        """Return the cheapest choice reached from several starts whose peak is at most `budget` bytes; None where there
        is none. A peak below that of `leanest` may be reached too, as its search aimed at another budget."""
        if self.peak(self.kept) <= budget:
            return self._outcome(self.kept)
        if budget < max(self.walk.base):
            return None
        lower = int(budget - SLACK * max(0, budget - self.peak(self.leanest)))
        starts = self.kept, self._improved(self.kept, lower), self.leanest
        ends = [self._improved(start, budget) for start in (*starts, *self._offloading(budget))]
        fitting = [self._outcome(words) for words in dict.fromkeys(ends) if self.peak(words) <= budget]
        return min(fitting, key=lambda each: each.seconds, default=None)

    def _outcome(self, words: Words) -> Outcome:
        seconds, needs = self.needs(words)
        return Outcome(words, seconds, max(needs))

    def _offloading(self, budget: int) -> list[Words]:
        """Return a start for each size of tensors that may be offloaded: it offloads no larger ones. Memory for tensors
        on their way is reserved from the beginning, as the first one offloaded frees less than it reserves."""
        items, starts = self.walk.items, []
        for most in sorted({item.bytes for item in items if item.can_be(OFFLOAD)}):
            changes = [c for c in self.changes if all(word != OFFLOAD or items[i].bytes <= most for i, word in c)]
            starts.append(self._improved(self.kept, budget, changes, STAYING * most))
        return starts

    def _improved(self, words: Words, budget: int, changes: Sequence[Change] | None = None, reserved: int = 0) -> Words:
        """Return the choice after all changes that help, the best first. The best change takes the least seconds per
        byte of excess, or the least seconds where all fits. Its score is computed anew only when it is first in line,
        as scores rarely become better."""
        every = self.changes if changes is None else changes

        def state_of(words: Words) -> Outcome:
            seconds, needs = self.needs(words, reserved)
            return Outcome(words, seconds, sum([need - budget for need in needs if need > budget]))

        state, helped = state_of(words), True
        waiting: list[tuple[float, Change]] = []
        while waiting or (helped and every):
            if not waiting:
                waiting, helped = [(-math.inf, change) for change in every], False
            _, change = heapq.heappop(waiting)
            new = dict(change)
            if any(state.words[index] == word for index, word in change):
                continue
            changed = tuple(new.get(index, word) for index, word in enumerate(state.words))
            after = state_of(changed)
            score = after.seconds - state.seconds
            if state.bytes and after.bytes < state.bytes:
                score /= state.bytes - after.bytes
            elif state.bytes or after.bytes or score >= -1e-12 * state.seconds:
                continue  # the change does not help
            if waiting and score > waiting[0][0]:
                heapq.heappush(waiting, (score, change))
                continue
            if state.bytes and not after.bytes:
                waiting = []  # scores have another meaning from here on
            for near in every:
                if any(index in new for index, _ in near):
                    heapq.heappush(waiting, (-math.inf, near))
            state, helped = after, True
        return state.words


@dataclass(frozen=True)
class MemoryChoice:
    """Bytes of a training step, weights and optimizer included: `kept` where everything is kept, `peak` by `policy`.

    `items`: recomputed tensors, by name, with their bytes; `away`: offloaded ones. `extra`: the seconds of both as a
    share of the step's.
    """

    policy: MemoryPolicy
    kept: int
    peak: int
    items: tuple[tuple[str, int], ...]
    extra: float
    away: tuple[tuple[str, int], ...] = ()

    @property
    def in_words(self) -> str:
        saved = (self.kept - self.peak) / 2**30
        away = f", {len(self.away)} leave for the store meanwhile" if self.away else ""
        return (
            f"{len(self.items)} tensors are computed once more in place of being kept{away}: {self.peak / 2**30:.4g} "
            f"GiB a step, {saved:.4g} GiB less, for about {100 * self.extra:.2g} % more time"
        )


@dataclass(frozen=True)
class StepChoices:
    """A training step on one context: its walk, and the `fixed` bytes, of weights for example.

    `complete`: micro-batches whose kept tensors are in memory at once, of which one runs backward.
    """

    walk: Walk
    fixed: int
    complete: int = 1

    @cached_property
    def greedy(self) -> Greedy:
        return Greedy(self.walk, self.complete)

    @cached_property
    def kept(self) -> int:
        """Bytes of a step that keeps everything."""
        return self.fixed + self.greedy.peak(self.greedy.kept)

    @cached_property
    def least(self) -> int:
        """The smallest budget, in bytes, that a choice surely fits."""
        return self.fixed + self.greedy.peak(self.greedy.leanest)

    def choose(self, budget: int) -> MemoryChoice | None:
        """Return the choice of at most `budget` bytes, None where none fits."""
        chosen = self.greedy.choose(budget - self.fixed)
        if chosen is None:
            return None
        pairs = list(zip(self.walk.items, chosen.words, strict=True))
        rebuilt = tuple((item.name, item.bytes) for item, word in pairs if word == REBUILD and item.used)
        away = tuple((item.name, item.bytes) for item, word in pairs if word == OFFLOAD)
        peak, extra = self.fixed + chosen.bytes, chosen.seconds / ((1 + BACKWARD) * self.walk.forward)
        return MemoryChoice(self.walk.policy(chosen.words), self.kept, peak, rebuilt, extra, away)

    def peak(self, policy: MemoryPolicy) -> int:
        """Return the bytes of a step by a policy."""
        return self.fixed + self.greedy.peak(self.walk.needed_words(policy))


def step_choices(
    graph: Graph,
    bands: int,
    context: tuple[int, int],
    value_bytes: int,
    store: Store | None = None,
    machine: Machine | None = None,
) -> StepChoices:
    """Return the choices of a step on a context of (height, width); tensors may be offloaded to `store`.
    `machine`: the rank's speed, the store's unless given. Raises GeometryError where this is no legal size."""
    walk = _walk_with_store(tile_walk(graph, bands, context, value_bytes), store, machine)
    return StepChoices(walk, fixed_memory(graph, bands, value_bytes))


def _walk_with_store(forward: ForwardWalk, store: Store | None, machine: Machine | None = None) -> Walk:
    """Return the items of a walk; large tensors that the backward pass uses may be offloaded to `store`, if any."""
    walk = network_walk(forward, machine or (store.machine if store else ASSUMED))
    may_leave = [store is not None and i.home is not None and i.used and i.bytes >= LEAST for i in walk.items]
    pairs = zip(walk.items, may_leave, strict=True)
    items = [replace(i, offload=store.waited(i.bytes, i.bytes)) if store and leaves else i for i, leaves in pairs]
    return replace(walk, items=tuple(items))


def block_choices(task: Task, fusion: int, overlap: bool, store: Store | None = None) -> list[StepChoices]:
    """Return the choices of each kind of rank that shares an image, layer by layer; tensors may be offloaded to
    `store`. With `overlap` a window is never whole in memory, so that tensors inside layers are kept.

    Raises GeometryError where a rank would own nothing of some tensor.
    """
    rows, cols = settled(task.graph, task.decomposition)
    fixed = fixed_memory(task.graph, task.bands, task.value_bytes)
    choices = []
    for forward, _ in layer_ranks(task.graph, rows, cols, fusion, task.bands, task.value_bytes):
        walk = _walk_with_store(forward, store)
        if overlap:
            items = [item if item.node is None else replace(item, rebuild=math.inf) for item in walk.items]
            walk = replace(walk, items=tuple(items))
        choices.append(StepChoices(walk, fixed + forward.besides))
    return choices
