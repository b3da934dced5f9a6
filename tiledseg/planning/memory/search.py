"""The cheapest choice whose peak fits a budget: exact for the additive model of `items`.

The moments are gone through from the first node on. Of all that was decided so far the rest needs to know little: a key
(`ways`), the bytes that lie there now, and the seconds spent. Decisions of one key are compared: who lies in more bytes
and costs more is dropped. So is who cannot become cheaper than the best choice known (`bound`). In a U-Net a tensor of
the way down is asked for on the way up, so it is remembered over all levels below; skips nest, and few are open at
once. So there are few keys, of each of which many decisions are looked at together, as arrays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiledseg.geometry.memory_words import OFFLOAD
from tiledseg.planning.memory.bound import Rests
from tiledseg.planning.memory.ways import Key, Moment, Way, Ways
from tiledseg.planning.walk.items import Walk
from tiledseg.planning.walk.parts import Part


class _States(NamedTuple):
    """Decisions up to a moment. `group`: which of `keys` each is of, ascending. `lies`: bytes that lie there, those for
    somebody's sake included. `before`: its number among the states of the moment before, and `way`: which of `ways` led
    to it."""

    keys: Sequence[Key]
    ways: Sequence[Way]
    group: NDArray[np.int64]
    lies: NDArray[np.int64]
    seconds: NDArray[np.float64]
    before: NDArray[np.int64]
    way: NDArray[np.int64]

    def at(self, which: NDArray[np.int64] | NDArray[np.bool_]) -> _States:
        group, lies, seconds = self.group[which], self.lies[which], self.seconds[which]
        return _States(self.keys, self.ways, group, lies, seconds, self.before[which], self.way[which])


_NONE = np.zeros(1, np.int64)
_START = _States([Key()], [], _NONE, _NONE, np.zeros(1), _NONE, _NONE)

LEAN_OF = 8  # states one goes on for its few bytes
KEY, MADE = 100, 400  # states whose work takes as long as that of a key, and of making its ways or its bound


def order_of(walk: Walk) -> list[int]:
    """The items in the order in which they are decided."""
    return sorted(range(len(walk.items)), key=lambda index: (walk.items[index].after, index))


class Search:
    """The choices of one part. Each run is a pass over the moments."""

    def __init__(self, ways: Ways, budget: int, part: Part, expected: Sequence[str] | None) -> None:
        self.ways, self.budget, self.part = ways, budget, part
        self.walk = walk = ways.walk
        self.order = order_of(walk)
        edges = [-1, *(walk.items[index].after for index in self.order), len(walk.base) - 1]
        base = part.base(walk)
        rooms = [budget - _most(base, low, high) for low, high in itertools.pairwise(edges)]
        self.rests = Rests(walk, self.order, rooms, budget, part, expected)
        self.moments = list(self._moments())
        self.most = self.least = math.inf
        self.lean_of = LEAN_OF
        self.made_before = ways.made
        self.looked_at = 0  # states and, by their work, keys

    @property
    def bound(self) -> float:
        """Seconds below which there is no choice."""
        return float(self.rests.least(0, np.zeros(1, np.int64), 0)[0])

    @property
    def work(self) -> int:
        """Done so far, in states: a measure of time that is the same on each machine."""
        return self.looked_at + MADE * (self.ways.made - self.made_before + len(self.rests.tables))

    def run(
        self, width: int, most: float, most_work: float = math.inf, lean_of: int = LEAN_OF
    ) -> tuple[tuple[str, ...] | None, float]:
        """The best choice of less than `most` seconds that at most `width` states lead to, None where none does; and
        the seconds below which there is no choice at all. Nothing is known where that takes more than `most_work`. Of
        `lean_of` states left one may stay for its few bytes."""
        self.lean_of = lean_of
        self.most = most if math.isinf(most) else most * (1 - 1e-12)
        self.least = math.inf  # of all that is left out for want of width
        passed = [_START]
        last = len(self.walk.base) - 1
        if _most(self.walk.base, -1, self.moments[0].number if self.moments else last) > self.budget:
            return None, math.inf
        for moment in self.moments:
            states = self._narrow(self._pass(passed[-1], moment), moment, width)
            if not len(states.group):
                return None, self.least
            if self.work > most_work:
                return None, 0.0
            passed.append(states)
        best = int(np.argmin(passed[-1].seconds))
        return self._choices(passed, best), min(self.least, float(passed[-1].seconds[best]))

    def _moments(self) -> Iterator[Moment]:
        """Those at which something is decided or may go."""
        items, decided, waiting = self.walk.items, 0, (1 << len(self.walk.items)) - 1
        numbers = sorted({item.after for item in items} | {item.back(OFFLOAD) for item in items})
        for number, following in itertools.pairwise([*numbers, len(self.walk.base) - 1]):
            entering = tuple(index for index in self.order[decided:] if items[index].after == number)
            decided += len(entering)
            waiting &= ~sum(1 << index for index in entering)
            yield Moment(number, entering, waiting, decided, _most(self.walk.base, number, following))

    def _choices(self, passed: Sequence[_States], state: int) -> tuple[str, ...]:
        found: dict[int, str] = {}
        for moment, states in zip(reversed(self.moments), reversed(passed), strict=False):
            found.update(zip(moment.entering, states.ways[states.way[state]].words, strict=True))
            state = int(states.before[state])
        return tuple(found[index] for index in range(len(found)))

    def _pass(self, states: _States, moment: Moment) -> _States:
        """The states after a moment: each by all ways that its key has."""
        words = tuple(self.part.words[index] for index in moment.entering)
        by_key = [self.ways.at(moment, words, key) for key in states.keys]
        counts = np.array([len(ways) for ways in by_key])
        ways = [way for of_key in by_key for way in of_key]
        number = {key: group for group, key in enumerate(dict.fromkeys(way.after for way in ways))}
        before = np.repeat(np.arange(len(states.group)), counts[states.group])
        first = np.cumsum(counts) - counts
        way = first[states.group[before]] + _counted(counts[states.group])
        fits = states.lies[before] + np.array([each.needs for each in ways])[way] <= self.budget
        before, way = before[fits], way[fits]
        group = np.array([number[each.after] for each in ways], np.int64)[way]
        lies = states.lies[before] + np.array([each.lies for each in ways], np.int64)[way]
        seconds = states.seconds[before] + np.array([each.seconds for each in ways])[way]
        self.looked_at += len(way) + KEY * len(number)
        return _States(list(number), ways, group, lies, seconds, before, way)

    def _narrow(self, states: _States, moment: Moment, width: int) -> _States:
        """Without those that another one beats, or that cannot become the best; at most so many as the width."""
        states = _unbeaten(states)
        least = self._least(states, moment)
        hopeful = least < self.most
        states, least = states.at(hopeful), least[hopeful]
        if len(least) > width:
            goes_on = _leading(least, states.lies, width, width // self.lean_of)
            self.least = min(self.least, float(least[~goes_on].min()))
            states = states.at(goes_on)
        left, group = np.unique(states.group, return_inverse=True)
        return states._replace(keys=[states.keys[each] for each in left], group=group)

    def _least(self, states: _States, moment: Moment) -> NDArray[np.float64]:
        """Seconds at least of what each state may lead to."""
        found = states.seconds.copy()
        starts = np.searchsorted(states.group, np.arange(len(states.keys) + 1))
        for key, start, stop in zip(states.keys, starts[:-1], starts[1:], strict=True):
            if start < stop:
                serving, owed = self.ways.serving(key)
                kept = states.lies[start:stop] - serving
                found[start:stop] += owed + self.rests.least(moment.decided, kept, key.thin | key.asked | key.gone)
        return found


def _most(base: Sequence[int], low: int, high: int) -> float:
    """Of the moments after `low`, up to `high`."""
    return max(base[low + 1 : high + 1], default=-math.inf)


def _leading(seconds: NDArray[np.float64], lies: NDArray[np.int64], width: int, lean: int) -> NDArray[np.bool_]:
    """Of so many states at most whether they go on: those of the least seconds, and `lean` of the fewest bytes, which
    alone lead to anything where hardly anything fits."""
    found = np.zeros(len(lies), np.bool_)
    found[np.lexsort((lies, seconds))[: width - lean]] = True
    found[np.lexsort((seconds, lies))[:lean]] = True
    return found


def _counted(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """From nought on, for each count."""
    first = np.cumsum(counts) - counts
    return np.arange(counts.sum()) - np.repeat(first, counts)


def _unbeaten(states: _States) -> _States:
    """Of states of one key those with fewer bytes than all that are cheaper, by key and seconds."""
    states = states.at(np.lexsort((states.lies, states.seconds, states.group)))
    if not len(states.group):
        return states
    below = states.lies - states.group * (states.lies.max() + 1)  # each key's below those of the one before
    fewest = np.minimum.accumulate(below)
    return states.at(np.concatenate([[True], below[1:] < fewest[:-1]]))
