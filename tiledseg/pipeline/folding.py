"""Orders for a folded pipeline: what a rank with a part of the way down and its mirror on the way up computes when.

A micro-batch makes 2C passes over the C chunks, one after the other: forward through chunks 0 to C - 1, then backward
through C - 1 to 0; passes are numbered so. A rank does the passes of its chunks, one at a time, each of them
micro-batch by micro-batch; the question is in which order. Plain numbers in, plain numbers out.

`periodic` is for ranks of equal work: every micro-batch does the same, a period after the one before.

`urgent_first` is for chunks of any times. The urgency of a pass: the time by which it would have to start, were a
micro-batch to leave the pipeline every so often. A rank takes its most urgent pass, but is patient: rather than take
another, it waits for a more urgent one that it knows to come soon. How often, and how soon, is tried out on the times.
Chunk c holds at most C - c micro-batches, the bound of 1f1b over C stages.

The law: whatever the times, every order is sound (`simulation.faults`), and `fastest` is no slower than `periodic`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import accumulate

FORWARD_SLOTS, BACKWARD_SLOTS = 1, 2  # the backward pass computes two gradients where the forward has one output
_PERIOD = 2 * (FORWARD_SLOTS + BACKWARD_SLOTS)  # what a rank does for each micro-batch where all chunks are equal

Passes = list[list[tuple[int, int]]]  # of each rank, in order: the pass, the micro-batch

# How often and how soon, as shares of the time of the slowest rank for a micro-batch. Finer steps gain 0.1 %.
_RATES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
_PATIENCE = (0.0, 0.05, 0.1, 0.2)
_SAMPLE = 48  # micro-batches on which they are chosen


def fastest(ranks: Sequence[int], micro_batches: int, forward: Sequence[float], backward: Sequence[float]) -> Passes:
    """The order of the least makespan that is known for these times of the chunks, in any unit; sends cost nothing."""
    times = pass_times(forward, backward)
    equal = periodic(ranks, micro_batches)
    best = urgent_first(ranks, micro_batches, times, *_choose_rule(ranks, min(micro_batches, _SAMPLE), times))
    return min(equal, best, key=lambda order: makespan(order, ranks, times))


def pass_times(forward: Sequence[float], backward: Sequence[float]) -> tuple[float, ...]:
    """The time of each pass."""
    return (*forward, *reversed(backward))


def chunk_of(number: int, chunks: int) -> int:
    """The chunk of a pass."""
    return min(number, 2 * chunks - 1 - number)


def _choose_rule(ranks: Sequence[int], micro_batches: int, times: Sequence[float]) -> tuple[float, float]:
    rules = [(rate, patience) for rate in _RATES for patience in _PATIENCE]
    return min(rules, key=lambda rule: makespan(urgent_first(ranks, micro_batches, times, *rule), ranks, times))


def urgent_first(
    ranks: Sequence[int], micro_batches: int, times: Sequence[float], rate: float, patience: float
) -> Passes:
    """Each rank takes its most urgent pass, for a rate and a patience that are shares of the slowest rank's time."""
    chunks, passes = len(ranks), len(times)
    rank_of = [ranks[chunk_of(number, chunks)] for number in range(passes)]
    own = [[number for number in range(passes) if rank_of[number] == rank] for rank in range(max(ranks) + 1)]
    left = list(accumulate(reversed(times)))[::-1]  # time from the start of each pass to the end of the last
    slowest = max(sum(times[number] for number in numbers) for numbers in own)
    every, soon = rate * slowest, patience * slowest
    ends: list[list[float]] = [[] for _ in times]  # of the micro-batches that each pass has started
    free = [0.0] * len(own)
    order: Passes = [[] for _ in own]

    def candidate(number: int, now: float) -> tuple[float, int, float] | None:
        """Of the pass's next micro-batch: urgency, pass, when it can start; None where that is not soon."""
        m = len(ends[number])
        if m == micro_batches or (number and len(ends[number - 1]) <= m):
            return None
        ready = ends[number - 1][m] if number else 0.0
        held = m - len(ends[-1 - number]) if number < chunks else 0
        return None if ready > now + soon or held >= chunks - number > 0 else (every * m - left[number], number, ready)

    events = [(0.0, rank) for rank in range(len(own))]  # when a rank may have something new to do
    while events:
        now, rank = heapq.heappop(events)
        found = [] if free[rank] > now else [candidate(number, now) for number in own[rank]]
        _, number, ready = min((one for one in found if one), default=(0.0, 0, math.inf))
        if ready > now:
            continue  # it is called again when there is something
        free[rank] = now + times[number]
        order[rank].append((number, len(ends[number])))
        ends[number].append(free[rank])
        heapq.heappush(events, (free[rank], rank))
        if number + 1 < passes:
            heapq.heappush(events, (free[rank], rank_of[number + 1]))
    return order


def makespan(order: Passes, ranks: Sequence[int], times: Sequence[float]) -> float:
    """When the last pass ends, each starting as soon as its rank and the micro-batch's pass before it are done."""
    chunks = len(ranks)
    ends: list[list[float]] = [[] for _ in times]
    position, clock = [0] * len(order), [0.0] * len(order)
    waiting = list(range(len(order)))
    while waiting:
        rank = waiting.pop()
        for number, m in order[rank][position[rank] :]:
            if number and len(ends[number - 1]) <= m:
                break
            clock[rank] = max(clock[rank], ends[number - 1][m] if number else 0.0) + times[number]
            ends[number].append(clock[rank])
            position[rank] += 1
            if number + 1 < len(times):
                waiting.append(ranks[chunk_of(number + 1, chunks)])
    return max(clock)


def periodic(ranks: Sequence[int], micro_batches: int) -> Passes:
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
