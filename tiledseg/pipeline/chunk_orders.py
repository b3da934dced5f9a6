"""Orders for ranks that hold several chunks: which pass a rank does when. Plain numbers in, plain numbers out.

A micro-batch makes 2C passes over the C chunks, one after the other: forward through chunks 0 to C - 1, then backward
through C - 1 to 0; passes are numbered so. A rank does the passes of its chunks one at a time, each of them micro-batch
by micro-batch.

The order is greedy. The urgency of a pass is the time by which it would have to start, were a micro-batch to leave the
pipeline every so often. A rank takes its most urgent pass. It is patient: rather than take another pass, it waits for a
more urgent one that comes soon. How often and how soon is tried out on the times. Chunk c holds at most C - c
micro-batches, the bound of 1f1b over C stages.

The law: whatever the times, every order is sound (`simulation.verify`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

FORWARD_SLOTS, BACKWARD_SLOTS = 1, 2  # the backward pass computes two gradients where the forward has one output

PassOrders = list[list[tuple[int, int]]]  # of each rank, in order: the pass, the micro-batch

# How often and how soon, as shares of the time of the slowest rank for a micro-batch. Finer steps gain 0.1 %.
_RATES = (0.2, 0.3, 0.4, 0.6, 0.8, 1.0)
_PATIENCE = (0.0, 0.05, 0.1, 0.2)
_SAMPLE = 48  # micro-batches on which they are chosen


class ChunkTimes(NamedTuple):
    """Times of each chunk, in any unit; `sending`: of what each but the last sends to the next (none: no time)."""

    forward: Sequence[float]
    backward: Sequence[float]
    sending: Sequence[float] = ()


def fastest(ranks: Sequence[int], micro_batches: int, times: ChunkTimes | None = None) -> PassOrders:
    """Return the order of the least makespan that is known for these times of chunks on `ranks`; without times, for
    ranks of equal work."""
    if times is None:
        shares = [1 / ranks.count(rank) for rank in ranks]
        times = ChunkTimes([FORWARD_SLOTS * share for share in shares], [BACKWARD_SLOTS * share for share in shares])
    sample = min(micro_batches, _SAMPLE)
    rules = ((rate, patience) for rate in _RATES for patience in _PATIENCE)
    _, rate, patience = min((urgent_first(ranks, times, sample, *rule)[0], *rule) for rule in rules)
    return urgent_first(ranks, times, micro_batches, rate, patience)[1]


def chunk_of(number: int, chunks: int) -> int:
    """Return the chunk of a pass."""
    return min(number, 2 * chunks - 1 - number)


def urgent_first(
    ranks: Sequence[int], chunk_times: ChunkTimes, micro_batches: int, rate: float, patience: float
) -> tuple[float, PassOrders]:
    """Return the makespan and the order in which each rank takes its most urgent pass, for a rate and a patience that
    are shares of the slowest rank's time."""
    chunks = len(ranks)
    place = (*ranks, *reversed(ranks))
    times = (*chunk_times.forward, *reversed(chunk_times.backward))
    sending = chunk_times.sending or (0.0,) * (chunks - 1)
    waits = (0.0, *sending, 0.0, *reversed(sending), 0.0)  # for the message before each pass
    own = [[number for number, at in enumerate(place) if at == rank] for rank in range(max(ranks) + 1)]
    slowest = max(sum(times[number] for number in passes) for passes in own)
    steps = [time + waits[number + 1] for number, time in enumerate(times)]
    left = list(accumulate(reversed(steps)))[::-1]  # from the start of each pass to the end of the last
    ends: list[list[float]] = [[] for _ in times]  # of the micro-batches that each pass has started
    order: PassOrders = [[] for _ in own]

    def ready_at(number: int) -> float:
        """Return the time at which the pass's next micro-batch can start; infinity where that is not known, or its
        chunk holds as many as it may."""
        m = len(ends[number])
        if m == micro_batches or (number and len(ends[number - 1]) <= m):
            return math.inf
        if number < chunks and m - len(ends[-1 - number]) >= chunks - number:
            return math.inf
        return ends[number - 1][m] + waits[number] if number else 0.0

    free = [0.0] * len(own)
    events = [(0.0, rank) for rank in range(len(own))]  # when a rank may have something new to do
    while events:
        now, rank = heapq.heappop(events)
        if free[rank] > now:
            continue
        soon = [number for number in own[rank] if ready_at(number) <= now + patience * slowest]
        if not soon:
            continue  # it is called again when there is something
        number = min(soon, key=lambda number: (rate * slowest * len(ends[number]) - left[number], number))
        if ready_at(number) > now:
            continue
        free[rank] = now + times[number]
        order[rank].append((number, len(ends[number])))
        ends[number].append(free[rank])
        heapq.heappush(events, (free[rank], rank))
        if number + 1 < len(times):
            heapq.heappush(events, (free[rank] + waits[number + 1], place[number + 1]))
    return ends[-1][-1], order
