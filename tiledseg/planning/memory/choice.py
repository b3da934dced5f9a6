"""What becomes of each tensor of a training step on one context, so that the step fits a budget at least time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tiledseg.geometry.graph import Graph
from tiledseg.geometry.memory_words import REBUILD, MemoryPolicy
from tiledseg.planning.cost import layer_costs
from tiledseg.planning.memory.best import Chosen, choose
from tiledseg.planning.memory.items import Walk, price, price_all_kept
from tiledseg.planning.memory.network_walk import NetworkWalk, Speed, network_walk
from tiledseg.planning.step_memory import fixed_memory

ASSUMED = Speed()
BACKWARD = 2  # of a forward pass's seconds those of a backward pass, about
_TRIES = 12  # budgets tried for the least that is reached


@dataclass(frozen=True)
class LevelChoice:
    """Of a part of the network, what stands before the dot of its nodes' names: bytes that are kept for the backward
    pass, bytes that are rebuilt, and the seconds of running that once, as a share of the step's."""

    name: str
    kept: int
    rebuilt: int
    extra: float


@dataclass(frozen=True)
class MemoryChoice:
    """Bytes of a training step, weights and optimizer included: `kept` where everything is kept, `peak` by `policy`.

    `levels`: what becomes of each part of the network. `items`: what is rebuilt, by name, with its bytes. `extra`: the
    seconds that it takes, as a share of the step's; `gap`: the share of these that a better choice could save, at most
    (0: it is proven best).
    """

    policy: MemoryPolicy
    kept: int
    peak: int
    levels: tuple[LevelChoice, ...]
    items: tuple[tuple[str, int], ...]
    extra: float
    gap: float

    @property
    def in_words(self) -> str:
        saved = (self.kept - self.peak) / 2**30
        best = "" if self.gap < 0.001 else f", of which a better choice might save {100 * self.gap:.2g} %"
        return (
            f"{len(self.items)} tensors are computed once more in place of being kept: {self.peak / 2**30:.4g} GiB a "
            f"step, {saved:.4g} GiB less, for about {100 * self.extra:.2g} % more time{best}"
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
        """The cheapest of at most `budget` bytes; None where none was found. `quick`: some good one will do."""
        chosen = choose(self.walk, budget - self.fixed, quick)
        return None if chosen is None else self.told(chosen)

    def peak(self, policy: MemoryPolicy) -> int:
        """Bytes of a step by a policy."""
        return self.fixed + price(self.walk, self.found.lying(policy)).peak

    def least(self) -> int:
        """About the least budget for which there is a choice, to a part in 4096 of what is reached."""
        return _least(
            lambda budget: self.choose(budget, quick=True) is not None, self.fixed + max(self.walk.base), self.kept
        )

    def told(self, chosen: Chosen) -> MemoryChoice:
        """A choice for each item as a policy, with what becomes of the step by it."""
        pairs = zip(self.walk.items, chosen.choices, strict=True)
        rebuilt = tuple((item.name, item.bytes) for item, choice in pairs if choice == REBUILD and item.asked)
        policy, step = self.found.policy(chosen.choices), (1 + BACKWARD) * self.found.forward
        sizes = self.kept, self.fixed + chosen.peak, self._levels(chosen.choices, step), rebuilt
        return MemoryChoice(policy, *sizes, chosen.seconds / step, chosen.gap)

    def _levels(self, choices: Sequence[str], step: float) -> tuple[LevelChoice, ...]:
        found: dict[str, LevelChoice] = {}
        for item, choice in zip(self.walk.items, choices, strict=True):
            name = item.name.split(".")[0]
            level, rebuilt = found.get(name, LevelChoice(name, 0, 0, 0.0)), choice == REBUILD
            kept, again = item.bytes * (not rebuilt), item.bytes * (rebuilt and item.asked)
            extra = item.rebuild / step if again else 0.0
            found[name] = LevelChoice(name, level.kept + kept, level.rebuilt + again, level.extra + extra)
        return tuple(found.values())


def _least(fits: Callable[[int], bool], low: int, high: int) -> int:
    """By halving, between one that may not fit and one that does."""
    for _ in range(_TRIES):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def step_choices(
    graph: Graph, bands: int, context: tuple[int, int], value_bytes: int, speed: Speed = ASSUMED
) -> StepChoices:
    """Of a step on a context of (height, width). Raises GeometryError where this is no legal size."""
    costs = layer_costs(graph, bands, context, value_bytes)
    found = network_walk(graph, costs, bands * context[0] * context[1] * value_bytes, value_bytes, speed)
    return StepChoices(found, fixed_memory(graph, bands, value_bytes))
