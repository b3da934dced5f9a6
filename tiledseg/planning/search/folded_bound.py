"""Seconds that a folded pipeline takes at least, and a balance that comes near: so that few of them need a plan.

A rank begins when the first micro-batch has passed the chunks before it on the way down, and ends before these take
back the last one. So a flush lasts, for each rank, as long as these chunks take for one micro-batch and its own two for
all; and as long as one micro-batch takes for all layers. The least of the balances that keep the skips on their ranks
is found rank by rank, over the pairs of cuts. Messages, and what memory demands, make it longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tiledseg.pipeline.balance import folded_cuts

Numbers = NDArray[np.float64]


def least_folded_flush(
    layers: Sequence[float], skips: Sequence[tuple[int, int]], ranks: int, micro_batches: int
) -> tuple[float, tuple[int, ...]] | None:
    """Of a flush of so many micro-batches, in the unit of `layers`, the time of each for one, forward and backward:
    the least, and its balance; None where no cuts keep the skips on their ranks, or there is one rank alone."""
    pairs = folded_cuts(layers, skips)
    if not pairs or ranks < 2:
        return None
    down, up = np.array(pairs).T
    before = np.concatenate([[0.0], np.cumsum(layers)])
    inside = (down[:, None] < down[None, :]) & (up[None, :] < up[:, None])
    taken = before[up] - before[down]  # what is left for the ranks after
    step = np.where(inside, before[down][:, None] + micro_batches * (taken[:, None] - taken[None, :]), np.inf)
    longest, ways = micro_batches * (before[-1] - taken), []
    for _ in range(ranks - 2):
        sums = np.maximum(longest[:, None], step)
        ways.append(sums.argmin(axis=0))
        longest = sums.min(axis=0)
    longest = np.maximum(longest, before[down] + micro_batches * taken)
    last = int(longest.argmin())
    if not np.isfinite(longest[last]):
        return None
    return max(float(longest[last]), float(before[-1])), _balance(pairs, ways, last, len(layers))


def _balance(
    pairs: Sequence[tuple[int, int]], ways: Sequence[NDArray[np.intp]], last: int, layers: int
) -> tuple[int, ...]:
    """Layers of each chunk, from the innermost pair of cuts back to the outermost."""
    path = [last]
    for way in reversed(ways):
        path.append(int(way[path[-1]]))
    down, up = zip(*(pairs[place] for place in reversed(path)), strict=True)
    return tuple(b - a for a, b in pairwise((0, *down, *reversed(up), layers)))
