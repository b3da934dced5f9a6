"""The choice where tensors may leave for a store: the cheapest of all that fit, with what is held of those that leave.

That is `STAYING` times the largest of them, at every moment. So it is chosen once for each size: none larger leaves,
and so much less room is left. The best of these choices is the best of all, and the least of their bounds is a bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tiledseg.geometry.memory_words import OFFLOAD
from tiledseg.planning.memory.best import MOST_WORK, Chosen, Found, bound_of, find, find_some
from tiledseg.planning.memory.store import LEAST, STAYING, Store
from tiledseg.planning.memory.ways import Ways
from tiledseg.planning.walk.items import Walk
from tiledseg.planning.walk.network_walk import NetworkWalk
from tiledseg.planning.walk.parts import Part

Rooms = list[tuple[Part, int]]
"""Choices by which none larger than some size leaves, and the bytes that are left then."""


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
    ways, whole = Ways(walk, budget), Part.whole(walk)
    sizes = {item.bytes for item in walk.items if item.can_be(OFFLOAD)}
    rooms = [(_up_to(walk, whole, size), budget - STAYING * size) for size in [0, *sorted(sizes)]]
    best = _some(ways, rooms) if quick else _best(ways, rooms)
    return None if best.choices is None else best.priced(walk, held(walk, best.choices))


def _some(ways: Ways, rooms: Rooms) -> Found:
    found = [find_some(ways, room, part) for part, room in rooms]
    least, work = min(each.least for each in found), sum(each.work for each in found)
    return min(found, key=lambda each: each.seconds)._replace(least=least, work=work)


def _best(ways: Ways, rooms: Rooms) -> Found:
    """First without any that leaves, then in the order of their bounds."""
    (part, room), *others = rooms
    best = find(ways, room, part, most_work=MOST_WORK // (4 if others else 1))
    for part, room in sorted(others, key=lambda each: bound_of(ways, each[1], each[0])):
        other = find(ways, room, part, best.seconds, max((MOST_WORK - best.work) // 2, 0))
        least, work = min(best.least, other.least), best.work + other.work
        best = Found(other.choices or best.choices, other.seconds, least, work)
    return best


def _up_to(walk: Walk, whole: Part, size: int) -> Part:
    """Of all choices those by which no larger item leaves."""
    pairs = zip(walk.items, whole.words, strict=True)
    words = (words if item.bytes <= size else tuple(w for w in words if w != OFFLOAD) for item, words in pairs)
    return replace(whole, words=tuple(words))
