"""Which storages leave memory in a step that is known, and where and in which order they come back. Pure.

A budget holds what stays; the others come back into what this has left by then, or, where that is not enough, into a
window that is kept free for them. What has the longest time between save and use leaves first: in a network that is run
back layer by layer these are the first layers' tensors, the largest ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from tiledseg.memory.disk.slots import whole_pages
from tiledseg.memory.timeline import Life
from tiledseg.records import dataclass

_WINDOW_SHARE = 4  # of the budget, the part of the window; more where the largest tensor and half of it want more
_AHEAD = 3  # tensors as large as the largest that may be on their way at once


class Return(NamedTuple):
    """A storage that comes back, to `offset` of the window, or (None) to memory of its own."""

    storage: int
    offset: int | None


@dataclass(frozen=True)
class StepPlan:
    """`leaving`: storages that leave as soon as autograd alone holds them; `returns` in the order of their first use;
    `window`: bytes into which they come back."""

    leaving: frozenset[int]
    returns: tuple[Return, ...]
    window: int


def plan_step(lives: Sequence[Life], budget: int) -> StepPlan:
    """The fewest bytes that leave, longest unused first, so that all that stays and the window are within `budget`
    bytes at every tick. A budget that is too small for that makes everything leave."""
    if peak(lives, frozenset()) <= budget:
        return StepPlan(frozenset(), (), 0)
    largest = max((whole_pages(life.size) for life in lives if life.alone is not None), default=0)
    leaving = choose_leaving(lives, budget)
    if fits_beside(lives, leaving, budget):
        return StepPlan(leaving, tuple(Return(k, None) for k in _in_order(lives, leaving)), 0)
    window = min(max(budget // _WINDOW_SHARE, 3 * largest // 2), budget // 2, _AHEAD * largest)
    leaving = choose_leaving(lives, budget - window)
    returns = place_returns(lives, leaving, window)
    return StepPlan(leaving, returns, _end(lives, returns))


def choose_leaving(lives: Sequence[Life], limit: int) -> frozenset[int]:
    """Storages to move out so that those which stay have `limit` bytes at most at every tick."""
    end = _end_of_step(lives)
    leaving: frozenset[int] = frozenset()
    while True:
        held = bytes_held(lives, leaving)
        most = max(held, default=0)
        at = held.index(most) if held else 0
        there = [k for k, life in enumerate(lives) if k not in leaving and _holds(life, at, end)]
        if most <= limit or not there:
            return leaving
        leaving |= {max(there, key=lambda k: (_unused(lives[k], end), lives[k].size))}


def peak(lives: Sequence[Life], leaving: frozenset[int]) -> int:
    """The most bytes that autograd alone holds at a tick, without those that leave."""
    return max(bytes_held(lives, leaving), default=0)


def bytes_held(lives: Sequence[Life], leaving: frozenset[int]) -> list[int]:
    """At every tick, the bytes that autograd alone holds, without those of storages that leave."""
    end = _end_of_step(lives)
    changes = [0] * (end + 2)
    for k, life in enumerate(lives):
        if life.alone is not None and k not in leaving:
            changes[life.alone] += life.size
            changes[_stop(life, end)] -= life.size
    return list(accumulate(changes[: end + 1]))


def fits_beside(lives: Sequence[Life], leaving: frozenset[int], budget: int) -> bool:
    """Whether what comes back finds room, one storage ahead, in what those that stay have left of the budget: they are
    used first where each step is gone back the way that it came."""
    held, order = bytes_held(lives, leaving), _in_order(lives, leaving)
    spans = {k: range(_later_uses(lives[k])[0], lives[k].uses[-1] + 1) for k in order}
    for place, k in enumerate(order):
        ahead = order[place + 1 : place + 2]
        for tick in spans[k]:
            there = {*ahead, *(j for j in order if tick in spans[j])}
            if held[tick] + sum(lives[j].size for j in there) > budget:
                return False
    return True


def _in_order(lives: Sequence[Life], leaving: frozenset[int]) -> list[int]:
    """Of the first uses after they have left."""
    return sorted((k for k in leaving if _later_uses(lives[k])), key=lambda k: _later_uses(lives[k])[0])


def place_returns(lives: Sequence[Life], leaving: frozenset[int], window: int) -> tuple[Return, ...]:
    """Where each storage comes back to, in the order of first uses: the lowest place of the window that is free from
    when the read begins to the last use. A read begins as early as the window has room; the order stays."""
    order = _in_order(lives, leaving)
    placed: list[tuple[int, int, int]] = []  # (begin, stop, free from this tick on)
    found = []
    now = 0
    for k in order:
        size, first = whole_pages(lives[k].size), _later_uses(lives[k])[0]
        offset = None
        for tick in sorted({now, *(free for _, _, free in placed if now < free <= first)}):
            placed = [place for place in placed if place[2] > tick]
            offset = _lowest([(begin, stop) for begin, stop, _ in placed], size, window)
            if offset is not None:
                placed.append((offset, offset + size, lives[k].uses[-1] + 1))
                now = tick
                break
        found.append(Return(k, offset))
    return tuple(found)


def _lowest(taken: Sequence[tuple[int, int]], size: int, room: int) -> int | None:
    """The lowest begin of `size` free bytes among `room`."""
    begin = 0
    for first, stop in sorted(taken):
        if first - begin >= size:
            break
        begin = max(begin, stop)
    return begin if begin + size <= room else None


def _end(lives: Sequence[Life], returns: Sequence[Return]) -> int:
    return max((r.offset + whole_pages(lives[r.storage].size) for r in returns if r.offset is not None), default=0)


def _end_of_step(lives: Sequence[Life]) -> int:
    """The last tick at which anything happens."""
    return max((tick for life in lives for tick in (life.alone or 0, *life.uses)), default=0)


def _later_uses(life: Life) -> list[int]:
    """Those after autograd alone held it."""
    return [tick for tick in life.uses if life.alone is not None and tick > life.alone]


def _stop(life: Life, end: int) -> int:
    """The first tick without it."""
    return end + 1 if life.freed is None else min(life.freed, end + 1)


def _unused(life: Life, end: int) -> int:
    """Ticks from being held by autograd alone to the next use, or to the end."""
    return (_later_uses(life) or [end + 1])[0] - (life.alone or 0)


def _holds(life: Life, tick: int, end: int) -> bool:
    return life.alone is not None and life.alone <= tick < _stop(life, end)
