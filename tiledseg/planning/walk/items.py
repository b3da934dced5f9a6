"""The memory of a backward pass as items: tensors that are kept, recomputed or offloaded, and the peak of a choice.

Moments are the steps of a forward walk; the backward pass meets them from the last to the first. An item is a tensor
that the backward pass needs, or bytes that a node keeps inside, as many as a tensor's (a cast copy, say). From its
first use there, at moment `after`, until it is freed, an item is in memory whatever is chosen (`Walk.base` counts it).
At the moments above `after` it only waits:

- kept, it is in memory at all of them;
- recomputed, it is in memory only where another item is recomputed from it. An item of some work (`stays`) is then
  computed once, and stays. A cheap one is computed for the moment, as often as it is needed. Either way its own parents
  must be in memory, or are recomputed first;
- offloaded, it is in memory at none of them: it is fetched just before its use.

`walk.step_memory` makes the items of a network. Checked against `models.rebuild`, which recomputes so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from tiledseg.geometry.graph import KEEP, OFFLOAD, REBUILD, Graph, MemoryPolicy
from tiledseg.geometry.memory_policy import spread

NEVER = 1e6  # seconds that mark a tensor which cannot be recomputed here: it is kept where a recomputed one needs it
BACKWARD = 2  # about the seconds of a backward pass, by those of a forward pass
NO_GRAPH = Graph(())
Words = tuple[str, ...]


@dataclass(frozen=True)
class Item:
    """A tensor (`home`, see `geometry.memory_policy`), or bytes inside a `node`, that the backward pass needs.

    `after`: the moment of its first use there. `rebuild`: seconds to compute it once, infinite where it cannot be.
    `parents`: numbers of the items from which it is computed, all lower than its own; other inputs are in memory
    anyway. `work`: bytes that computing it takes for the moment, besides the item. `offload`: seconds of sending it
    away and fetching it, infinite where it cannot be. `used`: the backward pass reads it; else only items recomputed
    from it do, and unless it is recomputed itself it stays until the last of these, at moment `after`. `cheap`: it is
    computed anew rather than kept for later.
    """

    name: str
    bytes: int
    after: int
    rebuild: float = math.inf
    parents: tuple[int, ...] = ()
    work: int = 0
    offload: float = math.inf
    used: bool = True
    cheap: bool = False
    home: int | None = None
    node: int | None = None

    @property
    def stays(self) -> bool:
        """True if it stays until its own use, once it is recomputed for another item."""
        return self.used and not self.cheap

    @property
    def waits_from(self) -> int:
        """The first moment, counted forward, at which it only waits."""
        return self.after + self.used

    def can_be(self, word: str) -> bool:
        return {KEEP: 0.0, REBUILD: self.rebuild, OFFLOAD: self.offload}[word] < math.inf


class Price(NamedTuple):
    """The cost of a choice: `seconds` more than keeping everything, and the bytes that each moment `needs`."""

    seconds: float
    needs: tuple[int, ...]

    @property
    def peak(self) -> int:
        return max(self.needs)


@dataclass(frozen=True)
class Walk:
    """A backward pass: its items, and at each moment the bytes that are there whatever is chosen.

    `base`: at the node's worst moment, its gradients included. `rebuilding`: before the node's own gradients are made,
    when the items that it needs are recomputed. `forward`: seconds of the forward pass.
    """

    items: tuple[Item, ...]
    base: tuple[int, ...]
    rebuilding: tuple[int, ...]
    graph: Graph = NO_GRAPH
    forward: float = 0.0

    def policy(self, words: Sequence[str]) -> MemoryPolicy:
        """Return the policy of a word for each item."""
        pairs = list(zip(self.items, words, strict=True))
        tensors = {item.home: word for item, word in pairs if item.home is not None}
        inside = {item.node: word for item, word in pairs if item.node is not None}
        every = [inside.get(k, KEEP) for k in range(len(self.graph))]
        return spread(self.graph, lambda home: tensors.get(home, KEEP), every)

    def words(self, policy: MemoryPolicy) -> Words:
        """Return the word of a policy for each item; an item that cannot be recomputed here is kept."""

        def word(item: Item) -> str:
            chosen = policy.tensors[item.home] if item.home is not None else policy.inside[item.node or 0]
            return KEEP if chosen == REBUILD and item.rebuild >= NEVER else chosen

        return tuple(map(word, self.items))

    def needed_words(self, policy: MemoryPolicy) -> Words:
        """Return `words` without the kept items that no backward pass and no recomputed item needs."""
        words, needed = self.words(policy), [item.used for item in self.items]
        for index in reversed(range(len(self.items))):
            if needed[index] and words[index] == REBUILD:
                for parent in self.items[index].parents:
                    needed[parent] = True
        return tuple(word if is_needed else REBUILD for word, is_needed in zip(words, needed, strict=True))

    def kept(self, words: Sequence[str]) -> int:
        """Return the bytes in memory when the forward pass has ended, by a word for each item."""
        kept = sum(item.bytes for item, word in zip(self.items, words, strict=True) if word == KEEP)
        return self.rebuilding[-1] + kept


def price(walk: Walk, words: Sequence[str]) -> Price:
    """Price a choice of a word for each item."""
    last_waits, runs = _waits_and_runs(walk, words)
    more = [0] * (len(walk.base) + 1)  # bytes that come at each moment, less those that go
    for item, word, last in zip(walk.items, words, last_waits, strict=True):
        stop = len(walk.base) if word == KEEP else last + 1
        if (word != REBUILD or item.stays) and item.waits_from < stop:
            more[item.waits_from] += item.bytes
            more[stop] -= item.bytes
    waiting = list(accumulate(more[:-1]))
    needs = [base + here for base, here in zip(walk.base, waiting, strict=True)]
    seconds = sum(item.offload for item, word in zip(walk.items, words, strict=True) if word == OFFLOAD)
    for index, moment in runs:
        taken, work = _run_cost(walk, words, index, moment)
        needs[moment] = max(needs[moment], walk.rebuilding[moment] + waiting[moment] + work)
        seconds += taken
    return Price(seconds, tuple(needs))


def _waits_and_runs(walk: Walk, words: Sequence[str]) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the last moment, counted forward, at which each item waits that is not kept. Return also the runs: items
    that are recomputed to be used or to stay, each with its moment."""
    last_waits = [item.after for item in walk.items]
    for_others: list[list[int]] = [[] for _ in walk.items]  # moments at which others are recomputed from an item
    runs = []
    for index in reversed(range(len(walk.items))):
        item, moments = walk.items[index], for_others[index]
        if words[index] == OFFLOAD or item.stays:
            last_waits[index] = max([item.after, *moments])
        if words[index] != REBUILD:
            continue
        own = [last_waits[index]] if item.used else []
        runs += [(index, moment) for moment in own]
        if not item.stays:
            own += [moment for moment in moments if not (item.used and moment <= item.after)]
        for parent in item.parents:
            for_others[parent] += own
    return last_waits, runs


def _run_cost(walk: Walk, words: Sequence[str], index: int, moment: int) -> tuple[float, int]:
    """Return the seconds of recomputing an item at a moment, and the bytes besides the item. Parents that do not stay
    are recomputed first, one after the other, and freed after their use."""
    item = walk.items[index]
    seconds, held, most = item.rebuild, 0, 0
    for parent in item.parents:
        before = walk.items[parent]
        if words[parent] == REBUILD and not before.stays and not (before.used and moment <= before.after):
            first, work = _run_cost(walk, words, parent, moment)
            most = max(most, held + before.bytes + work)
            seconds, held = seconds + first, held + before.bytes
    return seconds, max(most - item.bytes, held + item.work)
