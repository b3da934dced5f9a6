"""Orders for ranks that hold several chunks: which pass a rank does when. Plain numbers in, plain numbers out.

A micro-batch makes 2C passes over the C chunks, one after the other: forward through chunks 0 to C - 1, then backward
through C - 1 to 0; passes are numbered so. A rank does the passes of its chunks, one at a time, each of them
micro-batch by micro-batch; the question is in which order.

`periodic` is for folded ranks of equal work: every micro-batch does the same, a period after the one before.

`urgent_first` is for chunks of any times. The urgency of a pass: the time by which it would have to start, were a
micro-batch to leave the pipeline every so often. A rank takes its most urgent pass, but is patient: rather than take
another, it waits for a more urgent one that it knows to come soon. How often, and how soon, is tried out on the times.
Chunk c holds at most C - c micro-batches, the bound of 1f1b over C stages.

The law: whatever the times, every order is sound (`simulation.verify`), and `fastest` is no slower than the order for
ranks of equal work.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

FORWARD_SLOTS, BACKWARD_SLOTS = 1, 2  # the backward pass computes two gradients where the forward has one output
_PERIOD = 2 * (FORWARD_SLOTS + BACKWARD_SLOTS)  # what a rank does for each micro-batch where all chunks are equal

PassOrders = list[list[tuple[int, int]]]  # of each rank, in order: the pass, the micro-batch

# How often and how soon, as shares of the time of the slowest rank for a micro-batch. Finer steps gain 0.1 %.
_RATES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
_PATIENCE = (0.0, 0.05, 0.1, 0.2)
_SAMPLE = 48  # micro-batches on which they are chosen


class ChunkTimes(NamedTuple):
    """Times of each chunk, in any unit; `sending`: of what each but the last sends to the next (none: no time)."""

    forward: Sequence[float]
    backward: Sequence[float]
    sending: Sequence[float] = ()


class OrderRule(NamedTuple):
    """How often a micro-batch is to leave, and how soon is soon: shares of the slowest rank's time."""

    rate: float
    patience: float


@dataclass(frozen=True)
class PassTimes:
    """What each micro-batch does: the rank and the time of each pass, and what it waits for the message before it."""

    ranks: tuple[int, ...]
    times: tuple[float, ...]
    waits: tuple[float, ...]

    @property
    def chunks(self) -> int:
        return len(self.times) // 2

    @property
    def slowest(self) -> float:
        """The time that the busiest rank works on a micro-batch."""
        work = [0.0] * (max(self.ranks) + 1)
        for rank, time in zip(self.ranks, self.times, strict=True):
            work[rank] += time
        return max(work)


def pass_times(ranks: Sequence[int], times: ChunkTimes) -> PassTimes:
    """Of a pipeline whose chunks are on `ranks`."""
    sending = times.sending or (0.0,) * (len(ranks) - 1)
    return PassTimes(
        (*ranks, *reversed(ranks)),
        (*times.forward, *reversed(times.backward)),
        (0.0, *sending, 0.0, *reversed(sending)),
    )


def fastest(ranks: Sequence[int], micro_batches: int, times: ChunkTimes | None = None) -> PassOrders:
    """The order of the least makespan that is known for these times; without times, for ranks of equal work."""
    for_equal = periodic(ranks, micro_batches)
    if times is None:
        return for_equal
    given = pass_times(ranks, times)
    rule = best_rule(given, min(micro_batches, _SAMPLE))
    return min(for_equal, urgent_first(given, micro_batches, *rule), key=lambda order: makespan(order, given))


def best_rule(given: PassTimes, micro_batches: int) -> OrderRule:
    """The rate and the patience with which `urgent_first` makes the order of the least makespan."""
    rules = [OrderRule(rate, patience) for rate in _RATES for patience in _PATIENCE]
    return min(rules, key=lambda rule: makespan(urgent_first(given, micro_batches, *rule), given))


def chunk_of(number: int, chunks: int) -> int:
    return min(number, 2 * chunks - 1 - number)


def urgent_first(given: PassTimes, micro_batches: int, rate: float, patience: float) -> PassOrders:
    """Each rank takes its most urgent pass, for a rate and a patience that are shares of the slowest rank's time."""
    passes, chunks = len(given.times), given.chunks
    own: list[list[int]] = [[] for _ in range(max(given.ranks) + 1)]
    for number, rank in enumerate(given.ranks):
        own[rank].append(number)
    every, soon = rate * given.slowest, patience * given.slowest
    left = _time_left(given)
    ends: list[list[float]] = [[] for _ in given.times]  # of the micro-batches that each pass has started
    order: PassOrders = [[] for _ in own]

    def candidate(number: int, now: float) -> tuple[float, int, float] | None:
        """Of the pass's next micro-batch: urgency, pass, when it can start; None where that is not soon."""
        m = len(ends[number])
        if m == micro_batches or (number and len(ends[number - 1]) <= m):
            return None
        ready = ends[number - 1][m] + given.waits[number] if number else 0.0
        if ready > now + soon or (number < chunks and m - len(ends[-1 - number]) >= chunks - number):
            return None
        return every * m - left[number], number, ready

    free = [0.0] * len(own)
    events = [(0.0, rank) for rank in range(len(own))]  # when a rank may have something new to do
    while events:
        now, rank = heapq.heappop(events)
        found = [] if free[rank] > now else [candidate(number, now) for number in own[rank]]
        _, number, ready = min((one for one in found if one), default=(0.0, 0, math.inf))
        if ready > now:
            continue  # it is called again when there is something
        free[rank] = now + given.times[number]
        order[rank].append((number, len(ends[number])))
        ends[number].append(free[rank])
        heapq.heappush(events, (free[rank], rank))
        if number + 1 < passes:
            heapq.heappush(events, (free[rank] + given.waits[number + 1], given.ranks[number + 1]))
    return order


def _time_left(given: PassTimes) -> list[float]:
    """From the start of each pass to the end of a micro-batch's last."""
    steps = [time + wait for time, wait in zip(given.times, (*given.waits[1:], 0.0), strict=True)]
    return list(accumulate(reversed(steps)))[::-1]


def makespan(order: PassOrders, given: PassTimes) -> float:
    """When the last pass ends, each starting as soon as its rank is free and its micro-batch has come."""
    ends: list[list[float]] = [[] for _ in given.times]
    position, clock = [0] * len(order), [0.0] * len(order)
    waiting = list(range(len(order)))
    while waiting:
        rank = waiting.pop()
        for number, m in order[rank][position[rank] :]:
            if number and len(ends[number - 1]) <= m:
                break
            ready = ends[number - 1][m] + given.waits[number] if number else 0.0
            clock[rank] = max(clock[rank], ready) + given.times[number]
            ends[number].append(clock[rank])
            position[rank] += 1
            if number + 1 < len(given.times):
                waiting.append(given.ranks[number + 1])
    return max(clock)


def periodic(ranks: Sequence[int], micro_batches: int) -> PassOrders:
    """The order for ranks of equal work: each by the starts of its passes, one period apart for each micro-batch."""
    chunks = len(ranks)
    starts: list[list[tuple[int, int, int]]] = [[] for _ in range(max(ranks) + 1)]
    for number, offset in enumerate(_offsets(ranks)):
        rank = ranks[chunk_of(number, chunks)]
        starts[rank] += [(offset + _PERIOD * m, number, m) for m in range(micro_batches)]
    return [[(number, m) for _, number, m in sorted(rank)] for rank in starts]


def _offsets(ranks: Sequence[int]) -> list[int]:
    """The slot in which a micro-batch starts each pass. No rank does two passes at once, modulo the period.

    A pass starts as soon as the one before it has ended and the rank's slots are free; it never leaves free slots in
    runs of odd length once both forward passes of a rank are placed, since backward passes need two in a row.
    """
    chunks = len(ranks)
    taken: list[set[int]] = [set() for _ in range(max(ranks) + 1)]
    offsets: list[int] = []
    now = 0
    for number in range(2 * chunks):
        rank = ranks[chunk_of(number, chunks)]
        length = FORWARD_SLOTS if number < chunks else BACKWARD_SLOTS
        if ranks.count(rank) == 1:
            length *= 2  # as much work as the two chunks of another rank
        while not _may_take(taken[rank], now, length):
            now += 1
        taken[rank] |= {(now + slot) % _PERIOD for slot in range(length)}
        offsets.append(now)
        now += length
    return offsets


def _may_take(busy: set[int], start: int, length: int) -> bool:
    slots = {(start + slot) % _PERIOD for slot in range(length)}
    free = set(range(_PERIOD)) - busy - slots
    if busy & slots:
        return False
    runs = [
        next(n for n in range(1, _PERIOD + 1) if (slot + n) % _PERIOD not in free)
        for slot in free
        if (slot - 1) % _PERIOD not in free
    ]
    return not busy or all(run % 2 == 0 for run in runs)
