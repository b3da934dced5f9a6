"""The least that the rest of a choice can cost, whatever is chosen: lower bounds for the search.

Left out is who must lie there, besides, when an item is rebuilt of others long before it. What is then left is a
knapsack: at each moment the items kept below it must fit. It is solved backwards over the items, for the bytes that are
kept already, in `CELLS` steps at most: exactly, where items' sizes are multiples of so few; else sizes are rounded
down, so a bound it remains. Items that are rebuilt on the way to one soon after are known, so that they are paid for.
For one long after that is `expected` to be rebuilt, they are paid for in advance, and it gives that back if it is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tiledseg.geometry.memory_words import KEEP, OFFLOAD, REBUILD
from tiledseg.planning.walk.items import Walk, bits, run_of
from tiledseg.planning.walk.parts import NEAR, Part

CELLS = 4096

Table = NDArray[np.float64]  # of bytes kept, in cells: seconds at least


@dataclass(frozen=True)
class Advance:
    """Seconds that are paid when an item is rebuilt, for another at a later place."""

    index: int
    place: int
    seconds: float


class Rests:
    """Of the items of a walk from a place on, in the order in which they are decided.

    `rooms`: bytes that may be kept while each is decided, and after the last: at the moments since the one before.
    `part`: the choices that there are. `expected`: a choice that the best is expected to resemble.
    """

    def __init__(
        self,
        walk: Walk,
        order: Sequence[int],
        rooms: Sequence[float],
        budget: int,
        part: Part,
        expected: Sequence[str] | None,
    ) -> None:
        self.walk, self.order, self.rooms, self.part = walk, order, rooms, part
        unit = math.gcd(*(item.bytes for item in walk.items)) or 1
        self.cell = unit if budget // unit < CELLS else max(1, -(-budget // CELLS))
        self.cells = max(0, budget) // self.cell + 1
        self.at = {index: place for place, index in enumerate(order)}
        self.advances = list(self._advances(expected))
        self.budget = budget
        self.tables: dict[tuple[int, int], Table] = {}

    def least(self, place: int, kept: NDArray[np.int64], again: int) -> NDArray[np.float64]:
        """Seconds at least of the items from `place` on, where `kept` bytes are kept before them, and those of `again`,
        as bits, are rebuilt; infinite where nothing fits."""
        paid = sum(each.seconds for each in self.advances if again >> each.index & 1 and each.place >= place)
        table = self._table(place, again & self.near[place])
        return paid + table[np.minimum(kept // self.cell, self.cells - 1)]

    def _advances(self, expected: Sequence[str] | None) -> Iterator[Advance]:
        for index, (item, words) in enumerate(zip(self.walk.items, self.part.words, strict=True)):
            again = words == (REBUILD,) or (REBUILD in words and expected is not None and expected[index] == REBUILD)
            for parent in item.parents if item.asked and again else ():
                before = self.walk.items[parent]
                is_far = self.at[index] - self.at[parent] > NEAR
                if is_far and not before.stays and not before.is_there(item.after) and before.can_be(REBUILD):
                    yield Advance(parent, self.at[index], before.rebuild)

    @cached_property
    def near(self) -> list[int]:
        """At each place the items before it of which one soon after may be rebuilt, as bits."""
        found = [0] * (len(self.order) + 1)
        for index in range(len(self.walk.items)):
            askers = (self.at[k] for k in bits(self.walk.askers[index]))
            own = self.at[index]
            last = max((place for place in askers if place - own <= NEAR), default=own)
            for place in range(own + 1, last + 1):
                found[place] |= 1 << index
        return found

    def _table(self, place: int, again: int) -> Table:
        found = self.tables.get((place, again))
        if found is None:
            found = self.tables[place, again] = self._limited(self._made(place, again), self.rooms[place])
        return found

    def _made(self, place: int, again: int) -> Table:
        if place == len(self.order):
            return np.zeros(self.cells)
        found: Table | None = None
        for choice in self.part.words[self.order[place]]:
            size, seconds, now = self._option(place, choice, again)
            after = self._shifted(self._table(place + 1, now & self.near[place + 1]), size // self.cell, seconds)
            if choice == REBUILD:
                after = self._limited(after, self._room_again(place, again))
            found = after if found is None else np.minimum(found, after)
        assert found is not None, "each item can be kept"
        return found

    def _option(self, place: int, choice: str, again: int) -> tuple[int, float, int]:
        """Bytes that are kept, seconds, and who is rebuilt so far."""
        index = self.order[place]
        item = self.walk.items[index]
        if choice != REBUILD:
            back = sum(each.seconds for each in self.advances if each.place == place)
            return item.bytes * (choice == KEEP), (item.offload if choice == OFFLOAD else 0.0) - back, again
        seconds = run_of(self.walk, index, item.after, again).seconds if item.asked else 0.0
        seconds += sum(each.seconds for each in self.advances if each.index == index)
        return 0, seconds, again | 1 << index

    def _room_again(self, place: int, again: int) -> float:
        """Bytes that may be kept before the item of a place, where it is rebuilt: those of which it is rebuilt lie
        there then, and there is room for the work."""
        index, before = self.order[place], self.rebuilding[place]
        moment = self.walk.items[index].after
        if before is None:
            return math.inf
        lying = sum(self.walk.items[each].bytes for each in self._origins(index, moment, again))
        work = run_of(self.walk, index, moment, again).work
        return self.budget - max(self.walk.base[moment] + lying, before + lying + work)

    @cached_property
    def rebuilding(self) -> list[int | None]:
        """Of the item of each place, where it is rebuilt: the least bytes that are there then whatever is chosen, None
        where this is not known."""
        found: list[int | None] = []
        for place, index in enumerate(self.order):
            item, moment = self.walk.items[index], self.walk.items[index].after
            shared = place and self.walk.items[self.order[place - 1]].after == moment
            askers = bits(self.walk.askers[index]) if item.stays else []
            least = min(self.walk.rebuilding[self.walk.items[k].after] for k in [index, *askers])
            found.append(None if shared or not item.asked else least)
        return found

    def _origins(self, index: int, moment: int, again: int) -> set[int]:
        found = set[int]()
        for parent in self.walk.items[index].parents:
            if again >> parent & 1 and not self.walk.items[parent].is_there(moment):
                found |= {parent} if self.walk.items[parent].stays else self._origins(parent, moment, again)
        return found

    def _shifted(self, table: Table, cells: int, seconds: float) -> Table:
        found = np.empty_like(table)
        left = max(0, self.cells - cells)
        np.add(table[self.cells - left :], seconds, out=found[:left])
        found[left:] = table[-1] + seconds
        return found

    def _limited(self, table: Table, room: float) -> Table:
        if room >= self.cells * self.cell:
            return table
        found = table.copy()
        found[max(0, math.floor(room) // self.cell + 1) if room >= 0 else 0 :] = math.inf
        return found
