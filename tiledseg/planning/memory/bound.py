"""The least that the rest of a choice can cost, whatever is chosen: a lower bound for the search.

Nobody asks here who else must be there when an item is rebuilt, but for those that serve it alone. What is then left is
a knapsack whose limits are nested: at each moment the items kept below it must fit. It is solved backwards over the
items, for the bytes that are kept already, in `CELLS` steps; sizes are rounded down, so a bound it remains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tiledseg.planning.memory.items import Item

CELLS = 4096

Options = list[tuple[int, float]]  # bytes kept, seconds


class Rests:
    """`least`: of the items from a place on. `rooms`: bytes that may be kept while each is decided, and after the last:
    at the moments since the one before."""

    def __init__(self, items: Sequence[Options], rooms: Sequence[float], budget: int) -> None:
        self.cell = max(1, -(-budget // CELLS))
        cells = max(0, budget) // self.cell + 1
        table = self._limited([0.0] * cells, rooms[-1])
        self.tables = [table]
        for options, room in zip(reversed(items), reversed(rooms[:-1]), strict=True):
            table = self._limited(self._best(table, options), room)
            self.tables.append(table)
        self.tables.reverse()

    def least(self, place: int, kept: int) -> float:
        """Seconds at least of the items from `place` on, where `kept` bytes are kept before them; infinite where
        nothing fits."""
        table = self.tables[place]
        return table[min(kept // self.cell, len(table) - 1)]

    def _best(self, table: list[float], options: Options) -> list[float]:
        found = [math.inf] * len(table)
        for size, seconds in options:
            after = table[size // self.cell :]
            after += [table[-1]] * (len(table) - len(after))
            found = [min(here, there + seconds) for here, there in zip(found, after, strict=True)]
        return found

    def _limited(self, table: list[float], room: float) -> list[float]:
        if math.isinf(room):
            return table
        fitting = max(0, math.floor(room) // self.cell + 1)
        return table[:fitting] + [math.inf] * (len(table) - fitting)


def options_of(items: Sequence[Item]) -> list[Options]:
    """What can become of each, less than it costs at most. What nobody asks for but a single other item that is rebuilt
    of it is decided with that one."""
    serving = _serving(items)
    return [
        [(0, 0.0)] if index in serving.values() else _options(item, items[serving[index]] if index in serving else None)
        for index, item in enumerate(items)
    ]


def _serving(items: Sequence[Item]) -> dict[int, int]:
    """Of an item the one that serves it alone, the largest."""
    children: dict[int, list[int]] = {}
    for index, item in enumerate(items):
        for parent in item.parents:
            children.setdefault(parent, []).append(index)
    alone = [index for index, item in enumerate(items) if _is_alone(items, item, children.get(index, []))]
    return {children[index][0]: index for index in sorted(alone, key=lambda index: items[index].bytes)}


def _is_alone(items: Sequence[Item], item: Item, children: Sequence[int]) -> bool:
    return not item.asked and len(children) == 1 and items[children[0]].after == item.after


def _options(item: Item, servant: Item | None) -> Options:
    if not item.asked:
        return [(0, 0.0)]
    found = [(item.bytes, 0.0), (0, item.offload)]
    if servant is None:
        found.append((0, item.rebuild))
    else:
        found += [(servant.bytes, item.rebuild), (0, item.rebuild + min(servant.rebuild, servant.offload))]
    return [(size, seconds) for size, seconds in found if seconds < math.inf]
