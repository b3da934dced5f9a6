"""What may become of the items of a moment, and of those that lie there for others: the steps of a search.

Of all that was decided before, a step asks for a `Key` alone, and for how many bytes lie there. Who lies there for
somebody's sake goes when the last of these has been made, or stays for those still to come.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from tiledseg.geometry.memory_words import KEEP, OFFLOAD, REBUILD
from tiledseg.planning.walk.items import Walk, bits, run_of

Words = tuple[tuple[str, ...], ...]  # of each item what may become of it


class Key(NamedTuple):
    """What the rest needs to know of the items decided, as bits: `asked` and `sent` are rebuilt or sent away, and lie
    there, for somebody's sake or since they have not left; `gone` do not come back; `thin` are rebuilt as often as
    asked for."""

    asked: int = 0
    sent: int = 0
    gone: int = 0
    thin: int = 0


@dataclass(frozen=True)
class Moment:
    """`entering`: items that are decided at it; `waiting`: those decided later, as bits; `decided`: how many are, it
    included. `following`: bytes that are there whatever is chosen at the moments that follow it, at most."""

    number: int
    entering: tuple[int, ...]
    waiting: int
    decided: int
    following: float


class Way(NamedTuple):
    """From what lies there before a moment to what does after it: `lies` more bytes, and `seconds` spent, if a budget
    has room for `needs` bytes besides what lies there before it. `words`: of the items entering."""

    after: Key
    lies: int
    seconds: float
    needs: float
    words: tuple[str, ...]


class _State(NamedTuple):
    """While a moment goes on. `chosen`: the last word, and those before."""

    asked: int
    sent: int
    gone: int
    thin: int
    lies: int
    seconds: float
    needs: float
    chosen: tuple[Any, ...]


class Ways:
    """Those of a walk, for budgets of at most so many bytes. What was asked for once is kept."""

    def __init__(self, walk: Walk, most: float = math.inf) -> None:
        self.walk, self.most = walk, most
        self.at, self.serving = cache(self._at), cache(self._serving)

    @property
    def made(self) -> int:
        """How often they were not known yet."""
        return self.at.cache_info().misses

    def _at(self, moment: Moment, words: Words, key: Key) -> tuple[Way, ...]:
        """The items of the moment are decided, by some of `words` each, then those that are not needed longer go."""
        states = [_State(*key, 0, 0.0, -math.inf, ())]
        for index, of_item in zip(moment.entering, words, strict=True):
            states = [after for before in states for after in self._decide(before, index, of_item)]
        return tuple(way for each in states for way in self._pass(each, moment))

    def _serving(self, key: Key) -> tuple[int, float]:
        """Bytes of who lies there for somebody's sake or has not left, and seconds that rebuilding them takes."""
        size = sum(self.walk.items[index].bytes for index in bits(key.asked | key.sent))
        return size, sum(self.walk.items[index].rebuild for index in bits(key.asked))

    def _pass(self, state: _State, moment: Moment) -> Iterator[Way]:
        words = _words(state.chosen)
        origins = self._origins(words, moment.entering)
        there = origins + self.walk.rebuilding[moment.number]
        state = state._replace(needs=origins + self.walk.base[moment.number])
        state, asking = self._rebuild_thin(state, moment, there)
        for after in self._leave(state, moment, there, bits(state.asked | state.sent), asking):
            needs = max(after.needs, moment.following + after.lies)
            if needs <= self.most:
                gone = self._still(after.gone, moment.waiting)
                thin = self._still(after.thin, moment.waiting | after.asked)
                yield Way(Key(after.asked, after.sent, gone, thin), after.lies, after.seconds, needs, words)

    def _origins(self, words: Sequence[str], entering: Sequence[int]) -> int:
        """Bytes of those just decided that lie there at this moment already, for who is rebuilt of them."""
        pairs = zip(entering, words, strict=True)
        items = [self.walk.items[index] for index, word in pairs if word != REBUILD]
        return sum(item.bytes for item in items if not item.asked)

    def _decide(self, state: _State, index: int, words: Sequence[str]) -> Iterator[_State]:
        item, bit = self.walk.items[index], 1 << index
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

    def _rebuild_thin(self, state: _State, moment: Moment, there: int) -> tuple[_State, int]:
        """What is thin and needed for the first time is rebuilt at this moment, and so asks for others."""
        asking = 0
        for index in moment.entering:
            if state.thin >> index & 1 and self.walk.items[index].asked:
                state = self._paid(state, index, moment.number, there)
                asking |= self._parents(index, state.thin, moment.number)
        return state, asking

    def _paid(self, state: _State, index: int, moment: int, there: int) -> _State:
        """With the seconds of rebuilding an item, and the room for it."""
        run = run_of(self.walk, index, moment, state.thin)
        return state._replace(seconds=state.seconds + run.seconds, needs=max(state.needs, there + run.work))

    def _leave(self, state: _State, moment: Moment, there: int, lying: list[int], asking: int) -> Iterator[_State]:
        """Of the items `lying`, the last first, those go that nobody asks for any more: at this moment the last one
        did, or it is their own. Who may still be asked for may stay as well. `asking`: of whom others are rebuilt at
        this moment. `there`: bytes at it, besides what lies there."""
        if state.needs > self.most:
            return
        if not lying:
            yield state
            return
        index, rest = lying[0], lying[1:]
        item, bit = self.walk.items[index], 1 << index
        rebuilt = bool(state.asked & bit)
        back = item.back(REBUILD if rebuilt else OFFLOAD)
        is_asked = back > moment.number or self._is_asked(state, index)
        lasts = bool(self.walk.askers[index] & moment.waiting)
        if lasts or is_asked:
            yield from self._leave(state, moment, there, rest, asking)
        if is_asked or not (back == moment.number or asking & bit):
            return
        if rebuilt:
            state = self._paid(state, index, moment.number, there)
            asking |= self._parents(index, state.thin, moment.number)
        gone = state.gone | bit if lasts else state.gone
        lies, asked, sent = state.lies - item.bytes, state.asked & ~bit, state.sent & ~bit
        after = state._replace(lies=lies, asked=asked, sent=sent, gone=gone)
        yield from self._leave(after, moment, there, rest, asking)

    def _is_asked(self, state: _State, index: int) -> bool:
        """Whether somebody who lies there is to be rebuilt of it."""
        others = self.walk.askers[index] & state.asked
        return others > 0 and any(self._parents(other, state.thin) >> index & 1 for other in bits(others))

    def _still(self, mask: int, others: int) -> int:
        """Of these items those that others of `others` may ask for."""
        return sum(1 << index for index in bits(mask) if self.walk.askers[index] & others)


def _words(chosen: tuple[Any, ...]) -> tuple[str, ...]:
    found = []
    while chosen:
        word, chosen = chosen
        found.append(word)
    return tuple(reversed(found))
