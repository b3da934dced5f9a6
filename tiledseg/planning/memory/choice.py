"""The choice of what is kept, recomputed or offloaded in a training step, so that it fits a budget at little time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tiledseg.geometry.graph import KEEP, OFFLOAD, REBUILD, Graph, MemoryPolicy
from tiledseg.planning.cost_model.machine import ASSUMED, Machine
from tiledseg.planning.memory.greedy import Greedy
from tiledseg.planning.memory.store import Store, with_store
from tiledseg.planning.step.cost import tile_walk
from tiledseg.planning.walk.items import BACKWARD, Walk
from tiledseg.planning.walk.mode_cost import Task, layer_ranks, settled
from tiledseg.planning.walk.step_memory import fixed_memory, network_walk


@dataclass(frozen=True)
class MemoryChoice:
    """Bytes of a training step, weights and optimizer included: `kept` where everything is kept, `peak` by `policy`.

    `items`: recomputed tensors, by name, with their bytes; `away`: offloaded ones. `extra`: the seconds of both as a
    share of the step's.
    """

    policy: MemoryPolicy
    kept: int
    peak: int
    items: tuple[tuple[str, int], ...]
    extra: float
    away: tuple[tuple[str, int], ...] = ()

    @property
    def in_words(self) -> str:
        saved = (self.kept - self.peak) / 2**30
        away = f", {len(self.away)} leave for the store meanwhile" if self.away else ""
        return (
            f"{len(self.items)} tensors are computed once more in place of being kept{away}: {self.peak / 2**30:.4g} "
            f"GiB a step, {saved:.4g} GiB less, for about {100 * self.extra:.2g} % more time"
        )


@dataclass(frozen=True)
class StepChoices:
    """A training step on one context: its walk, and the `fixed` bytes, of weights for example.

    `complete`: micro-batches whose kept tensors are in memory at once, of which one runs backward.
    """

    walk: Walk
    fixed: int
    complete: int = 1

    @cached_property
    def greedy(self) -> Greedy:
        return Greedy(self.walk, self.complete)

    @cached_property
    def kept(self) -> int:
        """Bytes of a step that keeps everything."""
        return self.fixed + self.greedy.peak(self.greedy.kept)

    @cached_property
    def least(self) -> int:
        """Bytes from which on there surely is a choice."""
        return self.fixed + self.greedy.peak(self.greedy.leanest)

    @property
    def leanest(self) -> MemoryPolicy:
        """The policy of the least bytes."""
        return self.walk.policy(self.greedy.leanest)

    def choose(self, budget: int) -> MemoryChoice | None:
        """Return the choice of at most `budget` bytes, None where none fits."""
        chosen = self.greedy.choose(budget - self.fixed)
        if chosen is None:
            return None
        pairs = list(zip(self.walk.items, chosen.words, strict=True))
        rebuilt = tuple((item.name, item.bytes) for item, word in pairs if word == REBUILD and item.used)
        away = tuple((item.name, item.bytes) for item, word in pairs if word == OFFLOAD)
        policy, step = self.walk.policy(chosen.words), (1 + BACKWARD) * self.walk.forward
        sizes = self.kept, self.fixed + chosen.bytes, rebuilt
        return MemoryChoice(policy, *sizes, chosen.seconds / step, away)

    def peak(self, policy: MemoryPolicy) -> int:
        """Return the bytes of a step by a policy."""
        return self.fixed + self.greedy.peak(self.walk.needed_words(policy))

    def by_part(self, policy: MemoryPolicy) -> list[dict[str, Any]]:
        """Return, for each part of the network (what stands before the dot in its nodes' names), bytes kept, recomputed
        and offloaded (`away`), and the extra seconds as a share of the step's."""
        parts: dict[str, dict[str, Any]] = {}
        step = (1 + BACKWARD) * self.walk.forward
        for item, word in zip(self.walk.items, self.walk.words(policy), strict=True):
            name = item.name.split(".")[0]
            part = parts.setdefault(name, {"name": name, "kept": 0, "rebuilt": 0, "extra": 0.0, "away": 0})
            key = "kept" if word == KEEP else "away" if word == OFFLOAD else "rebuilt"
            if word != REBUILD or item.used:
                part[key] += item.bytes
                part["extra"] += {KEEP: 0.0, REBUILD: item.rebuild, OFFLOAD: item.offload}[word] / step
        return list(parts.values())


def step_choices(
    graph: Graph,
    bands: int,
    context: tuple[int, int],
    value_bytes: int,
    store: Store | None = None,
    machine: Machine | None = None,
) -> StepChoices:
    """Return the choices of a step on a context of (height, width); tensors may be offloaded to `store`.
    `machine`: the rank's speed, the store's unless given. Raises GeometryError where this is no legal size."""
    walk = network_walk(tile_walk(graph, bands, context, value_bytes), machine or (store.machine if store else ASSUMED))
    return StepChoices(with_store(walk, store) if store else walk, fixed_memory(graph, bands, value_bytes))


def block_choices(task: Task, fusion: int, overlap: bool, store: Store | None = None) -> list[StepChoices]:
    """Return the choices of each kind of rank that shares an image, layer by layer; tensors may be offloaded to
    `store`. With `overlap` a window is never whole in memory, so that tensors inside layers are kept.

    Raises GeometryError where a rank would own nothing of some tensor.
    """
    rows, cols = settled(task.graph, task.decomposition)
    fixed = fixed_memory(task.graph, task.bands, task.value_bytes)
    choices = []
    for forward, _ in layer_ranks(task.graph, rows, cols, fusion, task.bands, task.value_bytes):
        walk = network_walk(forward, store.machine if store else ASSUMED)
        walk = with_store(walk, store) if store else walk
        if overlap:
            items = [item if item.node is None else replace(item, rebuild=math.inf) for item in walk.items]
            walk = replace(walk, items=tuple(items))
        choices.append(StepChoices(walk, fixed + forward.besides))
    return choices
