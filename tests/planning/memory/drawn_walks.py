"""Backward passes drawn at random, and all choices of one, priced otherwise than the planner does: moment by moment."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

from tiledseg.geometry.graph import KEEP, OFFLOAD, REBUILD, WORDS
from tiledseg.planning.walk.items import Item, Walk


def drawn_walk(seed: int, most: int = 8) -> Walk:
    """Of up to `most` items in a graph with skips, some of which cannot be rebuilt, or sent away."""
    draw = random.Random(seed)
    count, sends = draw.randint(1, most), draw.random() < 0.4
    moments = draw.randint(count, 2 * count + 2)
    items = []
    for index in range(count):
        after = min(moments - 1, draw.choice([index, index + draw.randint(0, moments - 1 - index)]))
        parents = sorted(set(draw.sample(range(index), min(index, draw.choice([0, 1, 1, 1, 2])))))
        if index and draw.random() < 0.6:
            parents = sorted({index - 1, *parents[:1]})
        rebuild = math.inf if draw.random() < 0.15 else draw.randint(1, 9) / 2
        offload = math.inf if not sends or draw.random() < 0.5 else draw.randint(0, 8) / 4
        work = draw.choice([0, 0, draw.randint(0, 12)])
        size = draw.randint(0, 12)
        used = draw.random() < 0.8
        cheap = draw.random() < 0.4
        items.append(Item(f"i{index}", size, after, rebuild, tuple(parents), work, offload, used, cheap))
    for index, item in reversed(list(enumerate(items))):
        if not item.used:
            children = [child.after for child in items if index in child.parents]
            after = min(children, default=item.after)
            items[index] = replace(item, after=max(0, after - draw.choice([0, 0, 0, 1])))
    base = [draw.randint(0, 15) for _ in range(moments)]
    return Walk(tuple(items), tuple(base), tuple(draw.randint(0, here) for here in base))


def all_choices(walk: Walk) -> Iterator[tuple[str, ...]]:
    """Every choice of which each part can be."""
    return itertools.product(*([each for each in WORDS if item.can_be(each)] for item in walk.items))


def replayed(walk: Walk, choices: tuple[str, ...]) -> tuple[float, int]:
    """Seconds and peak of a choice: the backward pass is gone through from its first moment on, with a set of who is
    there for good."""
    items, replay = walk.items, _Replay(walk, choices)
    for moment in range(len(walk.base) - 1, -1, -1):
        replay.runs = []
        for index, (item, choice) in enumerate(zip(items, choices, strict=True)):
            if choice == OFFLOAD and item.after == moment:
                replay.there.add(index)
            if item.used and item.after == moment:
                replay.use(index, moment)
        lying = sum(items[index].bytes for index in replay.there if items[index].waits_from <= moment)
        works = [walk.rebuilding[moment] + lying + work for work in replay.runs]
        replay.peak = max([replay.peak, walk.base[moment] + lying, *works])
    sent = sum(item.offload for item, choice in zip(items, choices, strict=True) if choice == OFFLOAD)
    return replay.seconds + sent, replay.peak


class _Replay:
    def __init__(self, walk: Walk, choices: tuple[str, ...]) -> None:
        self.items, self.choices = walk.items, choices
        self.there = {index for index, choice in enumerate(choices) if choice == KEEP}
        self.seconds, self.peak = 0.0, 0
        self.runs: list[int] = []  # of each item that is rebuilt for good, or to be used: bytes besides

    def use(self, index: int, moment: int) -> None:
        if index not in self.there and self.choices[index] == REBUILD:
            self.runs.append(self._run(index, moment))

    def _run(self, index: int, moment: int) -> int:
        """Bytes besides the item itself."""
        self.seconds += self.items[index].rebuild
        held, peaks = 0, []
        for parent in self.items[index].parents:
            if self._is_made_now(parent, moment):
                peaks.append(held + self.items[parent].bytes + self._run(parent, moment))
                held += self.items[parent].bytes
        peaks.append(held + self.items[index].bytes + self.items[index].work)
        return max(peaks) - self.items[index].bytes

    def _is_made_now(self, index: int, moment: int) -> bool:
        """Whether an item of which another is made has to be made for the moment; else it is there, or is made to
        stay."""
        item = self.items[index]
        if index in self.there or (item.used and moment <= item.after):
            return False
        if self.choices[index] == REBUILD and (item.cheap or not item.used):
            return True
        self.there.add(index)
        if self.choices[index] == REBUILD:
            self.runs.append(self._run(index, moment))
        return False
