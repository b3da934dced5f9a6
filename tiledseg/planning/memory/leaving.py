"""The choice where tensors may leave for a store: the cheapest of all that fit, with what is held of those that leave.

That is `STAYING` times the largest of them, at every moment. So it is chosen once for each size: none larger leaves,
and so much less room is left. The best of these choices is the best of all, and the least of their bounds is a bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tiledseg.geometry.memory_words import OFFLOAD
from tiledseg.planning.memory.best import MOST_STATES, Chosen, Found, bound_of, find
from tiledseg.planning.memory.store import LEAST, STAYING, Store
from tiledseg.planning.walk.items import Walk
from tiledseg.planning.walk.network_walk import NetworkWalk


def with_store(found: NetworkWalk, store: Store) -> NetworkWalk:
    """The same, of which tensors that the backward pass asks for may leave for `store`: each comes back just before it
    is needed."""
    items = tuple(
        replace(item, offload=store.seconds(item.bytes))
        if home is not None and item.asked and item.bytes >= LEAST
        else item
        for item, home in zip(found.walk.items, found.homes, strict=True)
    )
    return replace(found, walk=replace(found.walk, items=items))


def held(walk: Walk, choices: Sequence[str]) -> int:
    """Bytes that are in memory at every moment, of all that leave by a choice for each item."""
    pairs = zip(walk.items, choices, strict=True)
    return STAYING * max((item.bytes for item, choice in pairs if choice == OFFLOAD), default=0)


def choose(walk: Walk, budget: int, quick: bool = False) -> Chosen | None:
    """The cheapest choice of at most `budget` bytes, with what stays of tensors that leave; None where none was found
    that fits. `quick`: some good one will do."""
    best, left = find(_up_to(walk, 0), budget, quick), MOST_STATES
    sizes = {item.bytes for item in walk.items if item.can_be(OFFLOAD)}
    parts = [(_up_to(walk, size), budget - STAYING * size) for size in sorted(sizes)]
    for each, room in sorted(parts, key=lambda part: bound_of(*part)):
        other = find(each, room, quick, best.seconds, left // 2)
        left -= other.states
        best = Found(other.choices or best.choices, other.seconds, min(best.least, other.least), other.states)
    return None if best.choices is None else best.priced(walk, held(walk, best.choices))


def _up_to(walk: Walk, size: int) -> Walk:
    """The same, of which no larger item leaves."""
    items = tuple(item if item.bytes <= size else replace(item, offload=math.inf) for item in walk.items)
    return replace(walk, items=items)
