"""Where all that autograd keeps is to leave memory: what stays of it there, and what a step then needs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tiledseg.errors import BudgetError
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.memory_policy import homes
from tiledseg.geometry.memory_words import KEEP, OFFLOAD, REBUILD
from tiledseg.planning.run.pipeline import MicroBatchSize
from tiledseg.planning.run.spread import Spread
from tiledseg.planning.step.cost import layer_costs
from tiledseg.planning.walk.step_memory import fixed_memory, training_memory
from tiledseg.records import dataclass

if TYPE_CHECKING:
    from tiledseg.planning.memory.choice import MemoryChoice

MIB = 2**20


@dataclass(frozen=True)
class OffloadPlan:
    """Bytes of a rank. Of a micro-batch `kept` leave, of which at most `staying` are in memory while nobody else holds
    them; the rest is in a file. `small`: those of tensors too small to leave. A step needs `memory`. `chosen`: of what
    the memory policy has leave alone."""

    kept: int
    staying: int
    memory: int
    chosen: bool = False
    small: int = 0

    def in_words(self, store: str) -> str:
        """For the user; `store`: where the rest goes."""
        what = "leaves" if self.chosen else "the backward pass needs"
        whole = f"{(self.kept + self.small) / MIB:.1f} MiB that {what}"
        if self.kept == 0:
            return f"all {whole} stay in memory: each tensor is too small to leave"
        staying = f"{(self.staying + self.small) / MIB:.1f} MiB at most"
        return f"of {whole} {staying} stay in memory, the rest goes to {store}"

    def of_batch(self, tiles: int) -> OffloadPlan:
        """Of so many tiles at once; `memory` is the plan's to say."""
        return replace(self, kept=self.kept * tiles, staying=self.staying * tiles, small=self.small * tiles)


def offload_by(choice: MemoryChoice | None) -> OffloadPlan | None:
    """Of what a choice has leave; None where nothing does."""
    if choice is None or not choice.away:
        return None
    from tiledseg.planning.memory.store import STAYING

    sizes = [size for _, size in choice.away]
    return OffloadPlan(sum(sizes), min(sum(sizes), STAYING * max(sizes)), choice.peak, chosen=True)


def plan_offload(
    spread: Spread,
    graph: Graph,
    bands: int,
    largest: MicroBatchSize,
    needed: int,
    budget: int | None,
    tiles: int = 1,
) -> OffloadPlan:
    """Of steps on micro-batches of which the largest is given, so many `tiles` at once. `needed`: bytes of a step on
    one with everything kept, by which is planned where ranks share layers, in stages, and where tensors are computed
    once more: there it needs less.

    Raises BudgetError for a `budget` in bytes that is not enough.
    """
    from tiledseg.planning.memory.store import LEAST, STAYING
    from tiledseg.planning.walk.items import price
    from tiledseg.planning.walk.network_walk import Speed, network_walk

    context, value = largest.pixels, largest.value_bytes
    costs = layer_costs(graph, bands, context, value)
    first = bands * context[0] * context[1] * value
    sizes = [first, *(cost.output_bytes for cost in costs)]
    walk = network_walk(graph, costs, first, value, Speed()).walk
    words = [(OFFLOAD if i.bytes * tiles >= LEAST else KEEP) if i.asked else REBUILD for i in walk.items]
    leaving = [item.bytes for item, word in zip(walk.items, words, strict=True) if word == OFFLOAD]
    kept, small = sum(leaving), sum(item.bytes for item in walk.items if item.asked) - sum(leaving)
    staying = min(kept, STAYING * max(leaving, default=0))
    memory = needed
    if not spread.shares_layers and spread.mesh.stages == 1 and (graph.memory is None or graph.memory.keeps_all):
        step = training_memory(graph, bands, context, value)
        away = price(walk, words).peak
        blocks = max(0, needed - step.total)  # of mode exchange
        fixed = step.total - step.activations - step.backward
        memory = min(needed, fixed + blocks + staying + max(away, _most_alive(graph, sizes)))
    memory += (tiles - 1) * (memory - fixed_memory(graph, bands, value))
    if budget is not None and memory > budget:
        raise BudgetError(
            f"memory.budget is {budget} bytes, but with memory.offload all a step needs {memory}; use a finer "
            "tiling.grid, a smaller model, or train.precision bf16"
        )
    return OffloadPlan(kept, staying, memory, small=small)


def _most_alive(graph: Graph, sizes: list[int]) -> int:
    """Bytes of the tensors that nodes are still to take, and of that which one makes, at the forward pass's worst
    moment: the network holds them, so that they cannot leave."""
    place, alive, most = homes(graph), {0}, 0
    for k in range(len(graph)):
        alive.add(k + 1)
        most = max(most, sum(sizes[home] for home in {place[tensor] for tensor in alive}))
        alive -= set(graph.released[k])
    return most
