"""The cheapest choice whose peak fits a budget: exact for the additive model of `items`.

The moments are gone through from the first node on. Of all that was decided so far the rest needs to know little: the
bytes that lie there now, the seconds spent, who does not come back (nobody may be rebuilt of him), and who lies there
for the sake of somebody still to be decided. Decisions that agree in this are compared: who lies in more bytes and
costs more is dropped. So is who cannot become cheaper than the best choice known (`bound`). In a U-Net a tensor of the
way down is asked for on the way up, so it is remembered over all levels below; skips nest, and few are open at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tiledseg.geometry.memory_words import KEEP, OFFLOAD, REBUILD
from tiledseg.planning.memory.bound import Rests
from tiledseg.planning.walk.items import Walk, run_of
from tiledseg.planning.walk.parts import Part


class _State(NamedTuple):
    """What the rest needs to know. Items are bits: `asked` and `sent` are rebuilt or sent away, and lie there, for
    somebody's sake or since they have not left; `gone` do not come back; `thin` are rebuilt as often as asked for.
    `lies`: bytes that lie there, those of `asked` and `sent` included. `chosen`: the last choice, and those before."""

    lies: int
    seconds: float
    asked: int
    sent: int
    gone: int
    thin: int
    chosen: tuple[Any, ...]

    @property
    def key(self) -> tuple[int, int, int, int]:
        return self.asked, self.sent, self.gone, self.thin


def order_of(walk: Walk) -> list[int]:
    """The items in the order in which they are decided."""
    return sorted(range(len(walk.items)), key=lambda index: (walk.items[index].after, index))


class Search:
    """The choices of one part. Each run is a pass over the moments."""

    def __init__(self, walk: Walk, budget: int, part: Part, expected: Sequence[str] | None) -> None:
        self.walk, self.budget, self.part = walk, budget, part
        self.order = order_of(walk)
        edges = [-1, *(walk.items[index].after for index in self.order), len(walk.base) - 1]
        rooms = [self._room(low, high, part.base(walk)) for low, high in itertools.pairwise(edges)]
        self.rests = Rests(walk, self.order, rooms, budget, part, expected)
        self.most = self.least = math.inf
        self.lean = False
        self.waiting = 0
        self.states = 0  # that have been looked at

    @property
    def bound(self) -> float:
        """Seconds below which there is no choice."""
        return self.rests.least(0, 0, 0)

    def _room(self, low: int, high: int, base: Sequence[int]) -> float:
        """Bytes that may lie there at the moments after `low`, up to `high`."""
        return self.budget - max(base[low + 1 : high + 1], default=-math.inf)

    def run(self, width: int, most: float, lean: bool = False) -> tuple[tuple[str, ...] | None, float]:
        """The best choice of less than `most` seconds that at most `width` states lead to, None where none does; and
        the seconds below which there is no choice at all. `lean`: the states of the fewest bytes lead on, not those of
        the least seconds: where hardly anything fits."""
        self.lean = lean
        self.most = most if math.isinf(most) else most * (1 - 1e-12)
        self.least = math.inf  # of all that is left out for want of width
        items = self.walk.items
        self.waiting = (1 << len(items)) - 1  # not yet decided
        moments = sorted({item.after for item in items} | {item.back(OFFLOAD) for item in items})
        decided, last = 0, len(self.walk.base) - 1
        first = self._room(-1, min(moments, default=last), self.walk.base)
        states = [_State(0, 0.0, 0, 0, 0, 0, ())] if first >= 0 else []
        for moment, following in itertools.pairwise([*moments, last]):
            entering = [index for index in self.order[decided:] if items[index].after == moment]
            decided += len(entering)
            self.waiting &= ~sum(1 << index for index in entering)
            room = self._room(moment, following, self.walk.base)
            passed = [after for state in states for after in self._pass(state, moment, entering, room)]
            self.states += len(passed)
            states = self._narrow(passed, decided, width)
        best = min(states, key=lambda state: state.seconds, default=None)
        if best is None:
            return None, self.least
        return self._choices(best), min(self.least, best.seconds)

    def _choices(self, state: _State) -> tuple[str, ...]:
        found, chosen = {}, state.chosen
        for index in reversed(self.order):
            found[index], chosen = chosen
        return tuple(found[index] for index in range(len(found)))

    def _pass(self, state: _State, moment: int, entering: Sequence[int], room: float) -> Iterator[_State]:
        """The states after a moment: its items are decided, then those that are not needed longer go."""
        left = self.budget - state.lies
        states = [state]
        for index in entering:
            states = [after for before in states for after in self._decide(before, index)]
        for each in states:
            held = left - self._serving(each, entering)
            if held < self.walk.base[moment]:
                continue
            free = held - self.walk.rebuilding[moment]
            passing = self._rebuild_thin(each, moment, entering, free)
            if passing is not None:
                lying = _bits(each.asked | each.sent)
                yield from (s for s in self._leave(passing[0], moment, free, lying, passing[1]) if s.lies <= room)

    def _serving(self, state: _State, entering: Sequence[int]) -> int:
        """Bytes of those just decided that lie there at this moment already, for who is rebuilt of them."""
        found, chosen = 0, state.chosen
        for index in reversed(entering):
            choice, chosen = chosen
            if choice != REBUILD and not self.walk.items[index].asked:
                found += self.walk.items[index].bytes
        return found

    def _decide(self, state: _State, index: int) -> Iterator[_State]:
        item, bit, words = self.walk.items[index], 1 << index, self.part.words[index]
        lies = state.lies + item.bytes
        if KEEP in words:
            yield state._replace(lies=lies, chosen=(KEEP, state.chosen))
        if REBUILD in words and not (item.asked and self._parents(index, state.thin) & state.gone):
            chosen = (REBUILD, state.chosen)
            if item.stays:
                yield state._replace(lies=lies, asked=state.asked | bit, chosen=chosen)
            else:
                yield state._replace(thin=state.thin | bit, chosen=chosen)
        if OFFLOAD in words:
            sent, seconds = state.sent | bit, state.seconds + item.offload
            yield state._replace(lies=lies, seconds=seconds, sent=sent, chosen=(OFFLOAD, state.chosen))

    def _parents(self, index: int, thin: int, moment: int | None = None) -> int:
        """Those that must be there when it is rebuilt, as bits: of thin ones theirs, but for those that are there at
        this moment."""
        found = 0
        for parent in self.walk.items[index].parents:
            if not thin >> parent & 1:
                found |= 1 << parent
            elif moment is None or not self.walk.items[parent].is_there(moment):
                found |= self._parents(parent, thin, moment)
        return found

    def _rebuild_thin(
        self, state: _State, moment: int, entering: Sequence[int], free: int
    ) -> tuple[_State, int] | None:
        """What is thin and needed for the first time is rebuilt at this moment, and so asks for others."""
        asking = 0
        for index in entering:
            if state.thin >> index & 1 and self.walk.items[index].asked:
                state = state._replace(seconds=self._paid(state, index, moment, free))
                asking |= self._parents(index, state.thin, moment)
        return None if math.isinf(state.seconds) else (state, asking)

    def _paid(self, state: _State, index: int, moment: int, free: int) -> float:
        """Seconds with those of rebuilding an item; infinite where this takes too many bytes."""
        run = run_of(self.walk, index, moment, state.thin)
        return state.seconds + run.seconds if run.work <= free else math.inf

    def _leave(self, state: _State, moment: int, free: int, lying: list[int], asking: int) -> Iterator[_State]:
        """Of the items `lying`, the last first, those go that nobody asks for any more: at this moment the last one
        did, or it is their own. Who may still be asked for may stay as well. `asking`: of whom others are rebuilt at
        this moment. `free`: bytes at it."""
        if not lying:
            yield state
            return
        index, rest = lying[0], lying[1:]
        item, bit = self.walk.items[index], 1 << index
        rebuilt = bool(state.asked & bit)
        back = item.back(REBUILD if rebuilt else OFFLOAD)
        lasts = bool(self.walk.askers[index] & self.waiting)
        if lasts or back > moment or self._is_asked(state, index):
            yield from self._leave(state, moment, free, rest, asking)
        if back > moment or self._is_asked(state, index) or not (back == moment or asking & bit):
            return
        seconds = self._paid(state, index, moment, free) if rebuilt else state.seconds
        if seconds < math.inf:
            gone = state.gone | bit if lasts else state.gone
            asking |= self._parents(index, state.thin, moment) if rebuilt else 0
            lies, asked, sent = state.lies - item.bytes, state.asked & ~bit, state.sent & ~bit
            after = state._replace(lies=lies, seconds=seconds, asked=asked, sent=sent, gone=gone)
            yield from self._leave(after, moment, free, rest, asking)

    def _is_asked(self, state: _State, index: int) -> bool:
        """Whether somebody who lies there is to be rebuilt of it."""
        others = self.walk.askers[index] & state.asked
        return others > 0 and any(self._parents(other, state.thin) >> index & 1 for other in _bits(others))

    def _narrow(self, states: list[_State], decided: int, width: int) -> list[_State]:
        """Without those that another one beats, or that cannot become the best; at most so many as the width."""
        priced = []
        for state in states:
            kept = state.lies - sum(self.walk.items[index].bytes for index in _bits(state.asked | state.sent))
            owed = sum(self.walk.items[index].rebuild for index in _bits(state.asked))
            least = state.seconds + owed + self.rests.least(decided, kept, state.thin | state.asked | state.gone)
            if least < self.most:
                gone = self._still(state.gone, self.waiting)
                thin = self._still(state.thin, self.waiting | state.asked)
                priced.append((least, state._replace(gone=gone, thin=thin)))
        found = _unbeaten(priced)
        if len(found) > width:
            if self.lean:
                found.sort(key=lambda pair: (pair[1].lies, pair[0]))
            else:
                found.sort(key=lambda pair: pair[0])
            self.least = min(self.least, *(least for least, _ in found[width:]))
            found = found[:width]
        return [state for _, state in found]

    def _still(self, mask: int, others: int) -> int:
        """Of these items those that others of `others` may ask for."""
        return sum(1 << index for index in _bits(mask) if self.walk.askers[index] & others)


def _unbeaten(priced: list[tuple[float, _State]]) -> list[tuple[float, _State]]:
    """Of states that agree in what lies and is gone, those with fewer bytes than all that are cheaper."""
    found = []
    priced.sort(key=lambda each: (each[1].key, each[1].seconds, each[1].lies))
    key, lies = None, math.inf
    for least, state in priced:
        if state.key != key:
            key, lies = state.key, math.inf
        if state.lies < lies:
            lies = state.lies
            found.append((least, state))
    return found


def _bits(mask: int) -> list[int]:
    """The numbers of the bits that are set, the highest first."""
    found = []
    while mask:
        found.append(mask.bit_length() - 1)
        mask ^= 1 << found[-1]
    return found
