"""Seconds that a pipeline takes at least, whatever its balance: so that most pipelines need no plan.

A stage begins when the first micro-batch has passed those before it, and ends before they take back the last one. So
with contiguous stages a flush lasts, for each stage, as long as the layers before it take for one micro-batch and its
own for all. Of all balances the one whose longest of these sums is least is found by halving: the most layers that a
stage may have under a limit are best for those after it. Messages, and what memory demands, make it longer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

_HALVINGS = 30


def least_flush(layers: Sequence[float], stages: int, micro_batches: int) -> float:
    """Of a flush of so many micro-batches, in the unit of `layers`: the time of each for one, forward and backward."""
    before = (0.0, *accumulate(layers))
    low, high = micro_batches * before[-1] / stages, micro_batches * before[-1]
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if _fits(before, stages, micro_batches, middle) else (middle, high)
    return low


def _fits(before: Sequence[float], stages: int, micro_batches: int, limit: float) -> bool:
    first = 0
    for _ in range(stages):
        room = (limit - before[first]) / micro_batches
        first = bisect_right(before, before[first] + room) - 1 if room > 0 else first
    return first == len(before) - 1
