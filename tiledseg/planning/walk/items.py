"""What lies in memory for a backward pass, as an additive model: items that are kept, rebuilt or sent away.

Moments are the nodes of a network, counted as they run forward; the backward pass meets them from the last to the
first. An item is a tensor that the backward pass needs. From its first use there, at moment `after`, until it is let
go, it is there whatever is chosen (`Walk.base` counts it). At the moments above `after` it only lies there:

- kept, it lies at all of them;
- rebuilt, at none, but for the sake of others that are rebuilt of it at such a moment. If it takes work (`stays`), it
  is computed then, once, and lies there from then on; if not, it is computed for the moment, as often as it is asked
  for. Either way its own parents must be there, or are rebuilt first;
- sent away, it lies there from the moment on at which it is fetched, which is before it is needed.

Seconds add up. Checked against `models.rebuild`, which does so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from tiledseg.geometry.memory_words import KEEP, OFFLOAD, REBUILD


@dataclass(frozen=True)
class Item:
    """A tensor that the backward pass needs.

    `after`: the moment of its first use there. `rebuild`: seconds to compute it once, infinite where it cannot be.
    `parents`: the items, by their numbers, all lower than its own, that this takes; others that it takes are there
    anyway. `work`: bytes that this needs for the moment, besides the item. `offload`: seconds that sending it away and
    fetching it cost, infinite where it cannot be. `fetched`: the moment at which it then lies there again. `asked`:
    whether the backward pass asks for it; else only who is rebuilt of it does, and it lies there, unless it is
    rebuilt, until the last of these has been used, at moment `after`. `cheap`: it is computed anew rather than kept for
    later.
    """

    name: str
    bytes: int
    after: int
    rebuild: float = math.inf
    parents: tuple[int, ...] = ()
    work: int = 0
    offload: float = math.inf
    fetched: int = 0
    asked: bool = True
    cheap: bool = False

    @property
    def stays(self) -> bool:
        """Whether, rebuilt for another, it lies there until it is needed itself."""
        return self.asked and not self.cheap

    def can_be(self, choice: str) -> bool:
        return {KEEP: 0.0, REBUILD: self.rebuild, OFFLOAD: self.offload}[choice] < math.inf

    def back(self, choice: str) -> int:
        """The moment at which it lies there again at the latest, where it is not kept."""
        return self.after if choice == REBUILD else max(self.after, self.fetched)

    @property
    def lies_from(self) -> int:
        """The first moment, counted forward, at which it only lies there."""
        return self.after + 1 if self.asked else self.after

    def is_there(self, moment: int) -> bool:
        """True if it is there at a moment at which it does not lie."""
        return self.asked and moment <= self.after


@dataclass(frozen=True)
class Walk:
    """A backward pass: its items, and at each moment the bytes that are there whatever is chosen.

    `base`: at the node's worst moment, its gradients included. `rebuilding`: before the node's own gradients are made,
    when the items that it needs are rebuilt.
    """

    items: tuple[Item, ...]
    base: tuple[int, ...]
    rebuilding: tuple[int, ...]


@dataclass(frozen=True)
class Price:
    """The cost of a choice: `seconds` more than keeping everything, and the bytes that each moment `needs`."""

    seconds: float
    needs: tuple[int, ...]

    @property
    def peak(self) -> int:
        return max(self.needs)


def price(walk: Walk, choices: Sequence[str]) -> Price:
    """Of a choice for each item."""
    until, runs = _runs(walk, choices)
    more = [0] * (len(walk.base) + 1)  # bytes at each moment than at the one before
    for item, choice, last in zip(walk.items, choices, until, strict=True):
        stop = len(walk.base) if choice == KEEP else last + 1
        if (choice != REBUILD or item.stays) and item.lies_from < stop:
            more[item.lies_from] += item.bytes
            more[stop] -= item.bytes
    lying = list(accumulate(more[:-1]))
    needs = [base + here for base, here in zip(walk.base, lying, strict=True)]
    seconds = sum(item.offload for item, choice in zip(walk.items, choices, strict=True) if choice == OFFLOAD)
    rebuilt = sum(1 << index for index, choice in enumerate(choices) if choice == REBUILD)
    for index, moments in enumerate(runs):
        for moment in moments:
            here = run_of(walk, index, moment, rebuilt)
            needs[moment] = max(needs[moment], walk.rebuilding[moment] + lying[moment] + here.work)
            seconds += here.seconds
    return Price(seconds, tuple(needs))


def _runs(walk: Walk, choices: Sequence[str]) -> tuple[list[int], list[list[int]]]:
    """Of each item the last moment, counted forward, at which it lies where it is not kept, and the moments at which it
    is rebuilt to be used itself."""
    until = [item.back(choice) for item, choice in zip(walk.items, choices, strict=True)]
    runs: list[list[int]] = [[] for _ in walk.items]
    asking: list[list[int]] = [[] for _ in walk.items]  # moments at which others are rebuilt of it
    for index in reversed(range(len(walk.items))):
        item, moments = walk.items[index], asking[index]
        if choices[index] == OFFLOAD or item.stays:
            until[index] = max([until[index], *moments])
        if choices[index] != REBUILD:
            continue
        if item.asked:
            runs[index] = [until[index]]
        needed = [*runs[index], *([] if item.stays else (m for m in moments if not item.is_there(m)))]
        for parent in item.parents:
            asking[parent] += needed
    return until, runs


@dataclass(frozen=True)
class Run:
    """What rebuilding an item at a moment takes: seconds, and bytes besides the item."""

    seconds: float
    work: int


def run_of(walk: Walk, index: int, moment: int, rebuilt: int) -> Run:
    """Of the items `rebuilt`, as bits. With those that do not stay and are rebuilt first, one after the other; each is
    let go when it has been used."""
    item = walk.items[index]
    seconds, held, most = item.rebuild, 0, 0
    for parent in item.parents:
        before = walk.items[parent]
        if rebuilt >> parent & 1 and not before.stays and not before.is_there(moment):
            first = run_of(walk, parent, moment, rebuilt)
            most = max(most, held + before.bytes + first.work)
            seconds, held = seconds + first.seconds, held + before.bytes
    return Run(seconds, max(most - item.bytes, held + item.work))
