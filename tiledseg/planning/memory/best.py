"""The cheapest choice whose peak fits a budget: exact for the additive model of `items`.

All choices are searched with few states at a time (`search`), then with more. Where that proves nothing, they are split
into parts by what becomes of a skip and of who takes it (`parts`), the largest first; the part of the least bound is
the next. One whose bound is no less than the best known choice is done with. Skips nest, so that few are split, but at
budgets that hardly anything fits: there the work ends after `MOST_WORK`, and the gap says what is left.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

from tiledseg.planning.memory.search import LEAN_OF, Search, order_of
from tiledseg.planning.memory.ways import Ways
from tiledseg.planning.walk.items import Walk, price
from tiledseg.planning.walk.parts import Part, links

NARROW = 40  # states after a moment, at first
WIDER = 8  # times as many then: once in a part that can be split, else again and again
ROOT = 0.4  # of the work is done before anything is split
MANY, PATIENCE = 2000, 5  # states, and times the work, where no choice is known that fits
LEANER_OF = 2  # in place of LEAN_OF, then
MOST_WORK = 9_000_000  # in all: about a second's


@dataclass(frozen=True)
class Chosen:
    """A choice for each item. `least`: seconds below which no choice fits; those of this one where it is the best.
    `work`: done to find it, in states that were looked at (`Search.work`)."""

    choices: tuple[str, ...]
    seconds: float
    peak: int
    least: float
    work: int

    @property
    def proven(self) -> bool:
        return self.gap <= 1e-9

    @property
    def gap(self) -> float:
        """Share of the seconds that a better choice could save, at most."""
        return 0.0 if self.seconds == 0 else max(0.0, 1 - self.least / self.seconds)


class Found(NamedTuple):
    """What was looked for: the best choice, None where there is none below so many seconds; below `least` there is none
    at all. `work`: done."""

    choices: tuple[str, ...] | None
    seconds: float
    least: float
    work: int

    def priced(self, walk: Walk, besides: int) -> Chosen:
        """With its peak, of which `besides` bytes are not the walk's."""
        assert self.choices is not None, "something was found"
        cost = price(walk, self.choices)
        least = max(0.0, min(self.least, cost.seconds))
        return Chosen(self.choices, cost.seconds, cost.peak + besides, least, self.work)


def find(ways: Ways, budget: int, part: Part, below: float = math.inf, most_work: int = MOST_WORK) -> Found:
    """The cheapest choice of a peak of at most `budget` bytes, of a part of all choices and of those of less than
    `below` seconds, by about so much work; by more where none has been found yet."""
    tree = _Tree(ways, budget, below, most_work)
    tree.add(part)
    tree.grow()
    if tree.best is None and tree.open and math.isinf(below):
        tree.look_for_any(part)
    return Found(tree.best, tree.seconds, tree.least, tree.work)


def find_some(ways: Ways, budget: int, part: Part) -> Found:
    """Some good choice: the best that few states lead to."""
    for lean_of in (LEAN_OF, LEANER_OF):
        search = Search(ways, budget, part, None)
        found, least = search.run(NARROW, math.inf, lean_of=lean_of)
        if found is not None or math.isinf(least):
            break
    return Found(found, math.inf if found is None else price(ways.walk, found).seconds, least, search.work)


def bound_of(ways: Ways, budget: int, part: Part) -> float:
    """Seconds below which no choice of a part fits; infinite where none does."""
    return Search(ways, budget, part, None).bound


class _Tree:
    """Parts that are still to be searched, by their bounds. `seconds`: of the best choice known, or below which one
    is wanted; `least`: below which there is none."""

    def __init__(self, ways: Ways, budget: int, below: float, most_work: int) -> None:
        self.walk, self.ways, self.budget = ways.walk, ways, budget
        self.most_work = most_work
        self.links = links(self.walk, order_of(self.walk))
        self.best: tuple[str, ...] | None = None
        self.seconds = below
        self.unproven = math.inf  # of parts that are searched and not proven: their least bound
        self.open: list[tuple[float, int, Part]] = []
        self.numbers = itertools.count()
        self.work = 0

    @property
    def least(self) -> float:
        return min([self.unproven, self.seconds, *(bound for bound, *_ in self.open)])

    @property
    def work_left(self) -> int:
        return self.most_work - self.work

    def grow(self) -> None:
        while self.open and not self._is_beaten(self.open[0][0]) and self.work_left > 0:
            self._visit(*heapq.heappop(self.open))

    def look_for_any(self, whole: Part) -> None:
        """Before it is said that none is found: through all at once by many states, then on."""
        work = self.most_work
        self._take(Search(self.ways, self.budget, whole, None).run(MANY, math.inf, work, LEANER_OF)[0])
        while self.best is None and self.open and self.most_work < PATIENCE * work:
            self.most_work += work
            self.grow()

    def _visit(self, bound: float, _: int, part: Part) -> None:
        left = max(bound, self._search(part))
        if self._is_beaten(left):
            return
        if part.decided == len(self.links):
            self.unproven = min(self.unproven, left)
            return
        for each in part.split(self.walk, self.links[part.decided]):
            self.add(each, left)

    def _search(self, part: Part) -> float:
        """Seconds below which the part has no choice but those that are known."""
        least, width = 0.0, NARROW
        while True:
            least = max(least, self._run(part, width))
            width *= WIDER
            if self._is_beaten(least) or self._work_for(part, width) <= 0:
                return least

    def _work_for(self, part: Part, width: int) -> float:
        """That may be done for a part by so many states, NARROW aside."""
        if part.decided == len(self.links) or (part.decided and width == NARROW * WIDER):
            return self.work_left
        return 0 if part.decided else ROOT * self.most_work - self.work

    def _run(self, part: Part, width: int) -> float:
        search = Search(self.ways, self.budget, part, self.best)
        most_work = math.inf if width == NARROW else self._work_for(part, width)
        found, least = search.run(width, self.seconds, most_work)
        self.work += search.work
        self._take(found)
        return least

    def _take(self, found: tuple[str, ...] | None) -> None:
        if found is not None:
            self.best, self.seconds = found, price(self.walk, found).seconds

    def _is_beaten(self, bound: float) -> bool:
        return bound >= self.seconds * (1 - 1e-12)

    def add(self, part: Part, least: float = 0.0) -> None:
        """`least`: seconds below which what it is a part of has no choice."""
        search = Search(self.ways, self.budget, part, self.best)
        bound = max(least, search.bound)
        self.work += search.work
        if not self._is_beaten(bound):
            heapq.heappush(self.open, (bound, next(self.numbers), part))
