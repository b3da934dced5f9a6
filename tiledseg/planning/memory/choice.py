"""What becomes of each tensor of a training step on one context, so that the step fits a budget at least time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tiledseg.geometry.graph import Graph
from tiledseg.geometry.memory_words import KEEP, OFFLOAD, REBUILD, MemoryPolicy
from tiledseg.planning.memory.best import Chosen
from tiledseg.planning.memory.leaving import choose, held, with_store
from tiledseg.planning.memory.store import Store
from tiledseg.planning.step.cost import tile_walk
from tiledseg.planning.walk.items import Walk, price, price_all_kept
from tiledseg.planning.walk.network_walk import NetworkWalk, Speed, network_walk
from tiledseg.planning.walk.step_memory import fixed_memory

ASSUMED = Speed()
BACKWARD = 2  # of a forward pass's seconds those of a backward pass, about
_TRIES = 12  # budgets tried for the least that is reached


@dataclass(frozen=True)
class LevelChoice:
    """Of a part of the network, what stands before the dot of its nodes' names: bytes that are kept for the backward
    pass, bytes that are rebuilt, the seconds of that, each run once, and of copies, as a share of the step's, and bytes
    that leave."""

    name: str
    kept: int
    rebuilt: int
    extra: float
    away: int = 0


@dataclass(frozen=True)
class MemoryChoice:
    """Bytes of a training step, weights and optimizer included: `kept` where everything is kept, `peak` by `policy`.

    `levels`: what becomes of each part of the network. `items`: what is rebuilt, by name, with its bytes. `extra`: the
    seconds that all of it takes, as a share of the step's; `gap`: the share of these that a better choice could save,
    at most (0: it is proven best). `away`: what leaves for a store, by name, with its bytes.
    """

    policy: MemoryPolicy
    kept: int
    peak: int
    levels: tuple[LevelChoice, ...]
    items: tuple[tuple[str, int], ...]
    extra: float
    gap: float
    away: tuple[tuple[str, int], ...] = ()

    @property
    def in_words(self) -> str:
        saved = (self.kept - self.peak) / 2**30
        best = "" if self.gap < 0.001 else f", of which a better choice might save {100 * self.gap:.2g} %"
        away = f", {len(self.away)} leave for the store meanwhile" if self.away else ""
        return (
            f"{len(self.items)} tensors are computed once more in place of being kept{away}: {self.peak / 2**30:.4g} "
            f"GiB a step, {saved:.4g} GiB less, for about {100 * self.extra:.2g} % more time{best}"
        )


@dataclass(frozen=True)
class StepChoices:
    """A training step on one context: its walk, and the bytes that are there whatever is chosen."""

    found: NetworkWalk
    fixed: int

    @property
    def walk(self) -> Walk:
        return self.found.walk

    @property
    def kept(self) -> int:
        """Bytes of a step that keeps everything."""
        return self.fixed + price_all_kept(self.walk).peak

    def choose(self, budget: int, quick: bool = False) -> MemoryChoice | None:
        """The cheapest of at most `budget` bytes; None where none was found. `quick`: some good one will do. Where
        time ends before any is found by which tensors may leave, all of it goes into those by which none does."""
        chosen = choose(self.walk, budget - self.fixed, quick)
        if chosen is None and not quick and any(item.can_be(OFFLOAD) for item in self.walk.items):
            chosen = choose(staying(self.walk), budget - self.fixed)
            chosen = chosen and replace(chosen, least=0.0)  # nobody knows what the others take
        return None if chosen is None else self.told(chosen)

    def peak(self, policy: MemoryPolicy) -> int:
        """Bytes of a step by a policy."""
        choices = self.found.lying(policy)
        return self.fixed + price(self.walk, choices).peak + held(self.walk, choices)

    def least(self) -> int:
        """About the least budget for which there is a choice, to a part in 4096 of what is reached."""
        return _least(
            lambda budget: self.choose(budget, quick=True) is not None, self.fixed + max(self.walk.base), self.kept
        )

    def told(self, chosen: Chosen) -> MemoryChoice:
        """A choice for each item as a policy, with what becomes of the step by it."""
        pairs = list(zip(self.walk.items, chosen.choices, strict=True))
        rebuilt = tuple((item.name, item.bytes) for item, choice in pairs if choice == REBUILD and item.asked)
        away = tuple((item.name, item.bytes) for item, choice in pairs if choice == OFFLOAD)
        policy, step = self.found.policy(chosen.choices), (1 + BACKWARD) * self.found.forward
        sizes = self.kept, self.fixed + chosen.peak, self._levels(chosen.choices, step), rebuilt
        return MemoryChoice(policy, *sizes, chosen.seconds / step, chosen.gap, away)

    def _levels(self, choices: Sequence[str], step: float) -> tuple[LevelChoice, ...]:
        found: dict[str, LevelChoice] = {}
        for item, choice in zip(self.walk.items, choices, strict=True):
            name = item.name.split(".")[0]
            level, size = found.get(name, LevelChoice(name, 0, 0, 0.0)), item.bytes
            again, away = size * (choice == REBUILD and item.asked), size * (choice == OFFLOAD)
            extra = (item.rebuild if again else item.offload if away else 0.0) / step
            sizes = level.kept + size * (choice == KEEP), level.rebuilt + again
            found[name] = LevelChoice(name, *sizes, level.extra + extra, level.away + away)
        return tuple(found.values())


def staying(walk: Walk) -> Walk:
    """The same, of which nothing may leave."""
    return replace(walk, items=tuple(replace(item, offload=math.inf) for item in walk.items))


def _least(fits: Callable[[int], bool], low: int, high: int) -> int:
    """By halving, between one that may not fit and one that does."""
    for _ in range(_TRIES):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def speed_with(store: Store | None) -> Speed:
    """At which a rank is taken to compute."""
    return store.speed if store else ASSUMED


def step_choices(
    graph: Graph,
    bands: int,
    context: tuple[int, int],
    value_bytes: int,
    store: Store | None = None,
    speed: Speed | None = None,
) -> StepChoices:
    """Of a step on a context of (height, width), of which tensors may leave for `store`; `speed`: at which a rank
    computes, the store's unless given. Raises GeometryError where this is no legal size."""
    found = network_walk(tile_walk(graph, bands, context, value_bytes), speed or speed_with(store))
    return StepChoices(with_store(found, store) if store else found, fixed_memory(graph, bands, value_bytes))
