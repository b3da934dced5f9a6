"""The cheapest choice whose peak fits a budget: exact for the additive model of `items`.

A part of all choices is searched with few states at a time (`search`). Where that proves nothing, it is split by what
becomes of a skip and of who takes it (`parts`), the largest first; the part of the least bound is the next. One whose
bound is no less than the best known choice is done with. Skips nest, so that few are split, but at budgets that hardly
anything fits: there the work ends after `MOST_STATES`, and the gap says what is left.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tiledseg.planning.memory.search import Search, order_of
from tiledseg.planning.walk.items import Walk, price
from tiledseg.planning.walk.parts import Part, links

NARROW = 40  # states after a moment, at first
WIDE = (NARROW, 300)  # and then, in a part that can be split
WIDEST = (NARROW, 1000, 4000)  # in one that cannot
MOST_STATES = 60_000  # looked at, in all: a second's work
FEW_PARTS = 2  # searched, where some good choice will do
LAST = 1500  # states after a moment, where none has been found that fits


@dataclass(frozen=True)
class Chosen:
    """A choice for each item. `least`: seconds below which no choice fits; those of this one where it is the best."""

    choices: tuple[str, ...]
    seconds: float
    peak: int
    least: float

    @property
    def proven(self) -> bool:
        return self.gap <= 1e-9

    @property
    def gap(self) -> float:
        """Share of the seconds that a better choice could save, at most."""
        return 0.0 if self.seconds == 0 else max(0.0, 1 - self.least / self.seconds)


class Found(NamedTuple):
    """What was looked for: the best choice, None where there is none below so many seconds; below `least` there is none
    at all. `states`: looked at."""

    choices: tuple[str, ...] | None
    seconds: float
    least: float
    states: int

    def priced(self, walk: Walk, besides: int = 0) -> Chosen:
        """With its peak, of which `besides` bytes are not the walk's."""
        assert self.choices is not None, "something was found"
        cost = price(walk, self.choices)
        return Chosen(self.choices, cost.seconds, cost.peak + besides, max(0.0, min(self.least, cost.seconds)))


def choose(walk: Walk, budget: int, quick: bool = False) -> Chosen | None:
    """The cheapest choice of a peak of at most `budget` bytes; None where none was found that fits. `quick`: some good
    one will do."""
    found = find(walk, budget, quick)
    return None if found.choices is None else found.priced(walk)


def find(walk: Walk, budget: int, quick: bool = False, below: float = math.inf, states: int = MOST_STATES) -> Found:
    """The same, of those of less than `below` seconds, by about so many states."""
    tree = _Tree(walk, budget, quick, below, states)
    tree.grow()
    if tree.best is None and tree.open and math.isinf(below):
        tree.look_for_room()
    return Found(tree.best, tree.seconds, tree.least, tree.states)


def bound_of(walk: Walk, budget: int) -> float:
    """Seconds below which no choice fits; infinite where none does."""
    return Search(walk, budget, Part.whole(walk), None).bound


class _Tree:
    """Parts that are still to be searched, by their bounds. `seconds`: of the best choice known, or below which one
    is wanted; `least`: below which there is none."""

    def __init__(self, walk: Walk, budget: int, quick: bool, below: float, most_states: int) -> None:
        self.walk, self.budget, self.quick, self.most_states = walk, budget, quick, most_states
        self.links = links(walk, order_of(walk))
        self.best: tuple[str, ...] | None = None
        self.seconds = below
        self.unproven = math.inf  # of parts that are searched and not proven: their least bound
        self.open: list[tuple[float, int, Part]] = []
        self.numbers = itertools.count()
        self.states = 0  # looked at

    @property
    def least(self) -> float:
        return min([self.unproven, self.seconds, *(bound for bound, *_ in self.open)])

    def grow(self) -> None:
        self._add(Part.whole(self.walk))
        parts = 0
        while self.open and not self._is_beaten(self.open[0][0]):
            if self.states >= self.most_states or (self.quick and parts == FEW_PARTS):
                return
            self._visit(*heapq.heappop(self.open))
            parts += 1

    def look_for_room(self) -> None:
        """Through the whole at once: by the fewest bytes, then with more states."""
        for width, lean in [(NARROW, True)] if self.quick else [(NARROW, True), (LAST, False)]:
            found, _ = Search(self.walk, self.budget, Part.whole(self.walk), None).run(width, math.inf, lean)
            if found is not None:
                self.best, self.seconds = found, price(self.walk, found).seconds
                return

    def _visit(self, bound: float, _: int, part: Part) -> None:
        ends = part.decided == len(self.links)
        left = max(bound, self._search(part, (NARROW,) if self.quick else WIDEST if ends else WIDE))
        if self._is_beaten(left):
            return
        if ends or (self.quick and self.best is not None):
            self.unproven = min(self.unproven, left)
            return
        for each in part.split(self.walk, self.links[part.decided]):
            self._add(each)

    def _is_beaten(self, bound: float) -> bool:
        return bound >= self.seconds * (1 - 1e-12)

    def _add(self, part: Part) -> None:
        bound = Search(self.walk, self.budget, part, self.best).bound
        if not self._is_beaten(bound):
            heapq.heappush(self.open, (bound, next(self.numbers), part))

    def _search(self, part: Part, widths: Sequence[int]) -> float:
        """Seconds below which the part has no choice but those that are known."""
        least = math.inf
        for width in widths:
            search = Search(self.walk, self.budget, part, self.best)
            found, least = search.run(width, self.seconds)
            self.states += search.states
            if found is not None:
                self.best, self.seconds = found, price(self.walk, found).seconds
            if self._is_beaten(least) or self.states >= self.most_states:
                break
        return least
