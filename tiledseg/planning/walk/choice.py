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

from tiledseg.geometry.graph import KEEP, OFFLOAD, REBUILD, WORDS, Graph, MemoryPolicy
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.planning.walk.cost import ForwardWalk, tile_walk
from tiledseg.planning.walk.cost_model import ASSUMED, LEAST, STAYING, Machine, Store
from tiledseg.planning.walk.items import BACKWARD, Walk, Words, price
from tiledseg.planning.walk.mode_cost import layer_ranks
from tiledseg.planning.walk.step_memory import fixed_memory, network_walk

SLACK = 0.1  # one start drops too much: it aims below the budget, by this share of the way to the least peak
Change = tuple[tuple[int, str], ...]  # numbers of items, and their new words


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
    """The choices of a training step on one context: its walk, and the `fixed` bytes, of weights for example.

    `complete`: micro-batches whose kept tensors are in memory at once, of which one runs backward. Budgets are bytes of
    the whole step.
    """

    walk: Walk
    fixed: int = 0
    complete: int = 1

    @cached_property
    def keeping(self) -> Words:
        """The words that keep everything that the backward pass reads."""
        return tuple(KEEP if item.used or not item.can_be(REBUILD) else REBUILD for item in self.walk.items)

    @cached_property
    def changes(self) -> list[Change]:
        """All changes of a word, and of two words where an item is recomputed from another one."""
        words = [[word for word in WORDS if item.can_be(word)] for item in self.walk.items]
        return [((index, word),) for index, here in enumerate(words) for word in here] + [
            ((index, word), (parent, other))
            for index, item in enumerate(self.walk.items)
            for parent in item.parents
            for word, other in product((KEEP, REBUILD), repeat=2)
            if word in words[index] and other in words[parent]
        ]

    def needs(self, words: Words, reserved: int = 0) -> tuple[float, list[int]]:
        """Return the seconds of a choice, and the bytes that each moment needs besides `fixed` ones: `reserved` ones at
        least for offloaded tensors on their way."""
        cost, pairs = price(self.walk, words), zip(self.walk.items, words, strict=True)
        away = max([item.bytes for item, word in pairs if word == OFFLOAD], default=0)
        more = max(reserved, STAYING * away) + (self.complete - 1) * self.walk.kept(words)
        return cost.seconds, [need + more for need in cost.needs]

    def bytes_by(self, words: Words) -> int:
        """Return the bytes of a step by a word for each item."""
        return self.fixed + max(self.needs(words)[1])

    def peak(self, policy: MemoryPolicy) -> int:
        """Return the bytes of a step by a policy."""
        return self.bytes_by(self.walk.needed_words(policy))

    @cached_property
    def kept(self) -> int:
        """Bytes of a step that keeps everything."""
        return self.bytes_by(self.keeping)

    @cached_property
    def leanest(self) -> Words:
        """The choice of least peak among those reached from all starts."""
        budget = max(self.walk.base)
        rebuilt = tuple(REBUILD if item.can_be(REBUILD) else KEEP for item in self.walk.items)
        starts = self.keeping, rebuilt, *self._offloading(budget)
        return min((self._improved(start, budget) for start in starts), key=self.bytes_by)

    @cached_property
    def least(self) -> int:
        """The smallest budget, in bytes, that a choice surely fits."""
        return self.bytes_by(self.leanest)

    def choose(self, budget: int) -> MemoryChoice | None:
        """Return the cheapest choice reached from several starts whose peak is at most `budget` bytes; None where there
        is none. A peak below that of `leanest` may be reached too, as its search aimed at another budget."""
        room, ends = budget - self.fixed, [self.keeping]
        if self.kept > budget:
            if room < max(self.walk.base):
                return None
            lower = int(room - SLACK * max(0, budget - self.least))
            starts = self.keeping, self._improved(self.keeping, lower), self.leanest, *self._offloading(room)
            ends = [self._improved(start, room) for start in starts]
        fitting = {words: self.needs(words)[0] for words in ends if self.bytes_by(words) <= budget}
        if not fitting:
            return None
        words = min(fitting, key=fitting.__getitem__)
        pairs = list(zip(self.walk.items, words, strict=True))
        rebuilt = tuple((item.name, item.bytes) for item, word in pairs if word == REBUILD and item.used)
        away = tuple((item.name, item.bytes) for item, word in pairs if word == OFFLOAD)
        extra = fitting[words] / ((1 + BACKWARD) * self.walk.forward)
        return MemoryChoice(self.walk.policy(words), self.kept, self.bytes_by(words), rebuilt, extra, away)

    def _offloading(self, room: int) -> list[Words]:
        """Return a start for each size of tensors that may be offloaded: it offloads no larger ones. Memory for tensors
        on their way is reserved from the beginning, as the first one offloaded frees less than it reserves."""
        items, starts = self.walk.items, []
        for most in sorted({item.bytes for item in items if item.can_be(OFFLOAD)}):
            changes = [c for c in self.changes if all(word != OFFLOAD or items[i].bytes <= most for i, word in c)]
            starts.append(self._improved(self.keeping, room, changes, STAYING * most))
        return starts

    def _improved(self, words: Words, room: int, changes: Sequence[Change] | None = None, reserved: int = 0) -> Words:
        """Return the choice after all changes that help, the best first. The best change takes the least seconds per
        byte of excess, or the least seconds where all fits. Its score is computed anew only when it is first in line,
        as scores rarely become better."""
        every = self.changes if changes is None else changes

        def state_of(words: Words) -> tuple[float, int]:
            """Return the seconds of a choice, and its bytes above `room`, summed over all moments."""
            seconds, needs = self.needs(words, reserved)
            return seconds, sum([need - room for need in needs if need > room])

        (seconds, excess), helped = state_of(words), True
        waiting: list[tuple[float, Change]] = []
        while waiting or (helped and every):
            if not waiting:
                waiting, helped = [(-math.inf, change) for change in every], False
            _, change = heapq.heappop(waiting)
            new = dict(change)
            if any(words[index] == word for index, word in change):
                continue
            changed = tuple(new.get(index, word) for index, word in enumerate(words))
            after = state_of(changed)
            score = after[0] - seconds
            if excess and after[1] < excess:
                score /= excess - after[1]
            elif excess or after[1] or score >= -1e-12 * seconds:
                continue  # the change does not help
            if waiting and score > waiting[0][0]:
                heapq.heappush(waiting, (score, change))
                continue
            if excess and not after[1]:
                waiting = []  # scores have another meaning from here on
            for near in every:
                if any(index in new for index, _ in near):
                    heapq.heappush(waiting, (-math.inf, near))
            words, (seconds, excess), helped = changed, after, True
        return words


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


def block_choices(
    graph: Graph,
    bands: int,
    cuts: tuple[Partition, Partition],
    value_bytes: int,
    fusion: int,
    overlap: bool,
    store: Store | None = None,
) -> list[StepChoices]:
    """Return the choices of each kind of rank that shares an image, layer by layer; tensors may be offloaded to
    `store`. `cuts`: of the input, along rows and columns. With `overlap` a window is never whole in memory, so that
    tensors inside layers are kept.
    """
    fixed, choices = fixed_memory(graph, bands, value_bytes), []
    for forward, _ in layer_ranks(graph, *cuts, fusion, bands, value_bytes):
        walk = _walk_with_store(forward, store)
        if overlap:
            items = [item if item.node is None else replace(item, rebuild=math.inf) for item in walk.items]
            walk = replace(walk, items=tuple(items))
        choices.append(StepChoices(walk, fixed + forward.besides))
    return choices
