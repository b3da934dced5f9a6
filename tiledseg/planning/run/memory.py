"""A training step that needs more memory than a rank has: tensors that are recomputed or offloaded so that it fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tiledseg.errors import BudgetError
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.memory_policy import homes
from tiledseg.geometry.memory_words import KEEP, OFFLOAD, REBUILD
from tiledseg.geometry.tiling import Tiling
from tiledseg.planning.modes.mode_cost import Task
from tiledseg.planning.run.pipeline import MicroBatchSize
from tiledseg.planning.run.spread import Spread
from tiledseg.planning.step.cost import tile_walk
from tiledseg.planning.walk.step_memory import fixed_memory, training_memory

if TYPE_CHECKING:
    from tiledseg.planning.memory.choice import MemoryChoice, StepChoices
    from tiledseg.planning.memory.store import Store

MIB = 2**20
_TRIES = 4  # choices for the largest step, each with less room, where another step needs more


def memory_choices(
    spread: Spread, task: Task, tilings: Sequence[Tiling], store: Store | None = None
) -> list[StepChoices]:
    """Return the steps on all contexts of `tilings`, or, where ranks share layers, those of each kind of rank on the
    largest image. Tensors may be offloaded to `store`."""
    from tiledseg.planning.memory.choice import block_choices, step_choices

    if spread.shares_layers:
        return block_choices(task, spread.fusion, spread.overlap, store)
    contexts = {tiling.context_max for tiling in tilings}
    return [step_choices(task.graph, task.bands, context, task.value_bytes, store) for context in contexts]


def choose_memory(
    spread: Spread,
    every: Sequence[StepChoices],
    needed: int,
    fixed: int,
    images: int,
    budget: int,
    asked: bool,
    finer: Callable[[], tuple[int, int] | None],
) -> MemoryChoice | None:
    """Choose the tensors that are recomputed or offloaded: one choice for `every` step.

    `needed`: bytes of a step that keeps everything, of `images` at once, which share `fixed` bytes. Return None where
    no choice fits the `budget`. Where the user `asked` for that budget, raise BudgetError, which names the `finer` grid
    that fits.
    """
    largest = max(every, key=lambda step: step.kept)
    besides = needed - images * (largest.kept - fixed)
    choice = _fitting(every, largest, fixed + (budget - besides) // images)
    if choice is not None:
        return replace(choice, kept=needed, peak=besides + images * (choice.peak - fixed))
    if asked:
        raise _too_small(spread, needed, besides + images * (largest.least - fixed), images, budget, finer())
    return None


def _fitting(every: Sequence[StepChoices], largest: StepChoices, room: int) -> MemoryChoice | None:
    """Return the choice for the largest step by which all others fit too."""
    left = room
    for _ in range(_TRIES):
        choice = largest.choose(left)
        if choice is None:
            return None
        peak = max(step.peak(choice.policy) for step in every)
        if peak <= room:
            return replace(choice, peak=peak)
        left -= peak - room
    return None


def check_budget(recompute: str, needed: int, budget: int) -> None:
    """Raise BudgetError where a step does not fit with the recomputation that the user has set."""
    if needed > budget:
        raise BudgetError(
            f"memory.budget is {budget} bytes, but with memory.recompute {recompute} a step needs {needed}; leave "
            "recompute out, or use a finer tiling.grid"
        )


def _too_small(
    spread: Spread, needed: int, least: int, images: int, budget: int, finer: tuple[int, int] | None
) -> BudgetError:
    what, use = "tile", "a smaller model, train.precision bf16, or parallel.halo layer on more ranks"
    if finer is not None:
        use = f"tiling.grid [{finer[0]},{finer[1]}], which fits with all kept, {use}"
    elif spread.shares_images:
        use = f"a finer tiling.grid, {use}"
    if spread.shares_layers:
        what, use = "block of an image", "more ranks an image, memory.blocks, a smaller model, or train.precision bf16"
    if images > 1:
        use = f"a smaller train.tiles_per_batch or train.images_per_step, {use}"
    error = BudgetError(
        f"memory.budget is {budget} bytes, but a training step on the largest {what} needs {needed}, and {least} with "
        f"all rebuilt that helps; use {use}"
    )
    error.least, error.names_grid = least, finer is not None
    return error


@dataclass(frozen=True)
class OffloadPlan:
    """Bytes of a rank. Of a micro-batch `kept` are offloaded, at most `staying` of them wait in memory; `small`: bytes
    of tensors too small to be offloaded. A step needs `memory`. `chosen`: the memory policy says which are offloaded.
    """

    kept: int
    staying: int
    memory: int
    chosen: bool = False
    small: int = 0

    def in_words(self, store: str) -> str:
        """Return the plan as a line of the log; `store`: the place of the offloaded bytes."""
        what = "leaves" if self.chosen else "the backward pass needs"
        whole = f"{(self.kept + self.small) / MIB:.1f} MiB that {what}"
        if self.kept == 0:
            return f"all {whole} stay in memory: each tensor is too small to leave"
        staying = f"{(self.staying + self.small) / MIB:.1f} MiB at most"
        return f"of {whole} {staying} stay in memory, the rest goes to {store}"

    def of_batch(self, tiles: int) -> OffloadPlan:
        """Return the plan of `tiles` at once; `memory` stays."""
        return replace(self, kept=self.kept * tiles, staying=self.staying * tiles, small=self.small * tiles)


def offload_by(choice: MemoryChoice | None) -> OffloadPlan | None:
    """Return the plan of the tensors that a choice offloads; None where it offloads none."""
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
    """Plan steps that offload all that the backward pass needs, of `tiles` micro-batches at once.

    `needed`: bytes of a step on one that keeps everything. That is also the plan where ranks share layers, in stages,
    and where tensors are recomputed: the step then needs less. Raises BudgetError where `budget` is too small.
    """
    from tiledseg.planning.memory.store import LEAST, STAYING
    from tiledseg.planning.walk.items import price
    from tiledseg.planning.walk.network_walk import network_walk

    context, value = largest.pixels, largest.value_bytes
    forward = tile_walk(graph, bands, context, value)
    walk = network_walk(forward).walk
    words = [(OFFLOAD if i.bytes * tiles >= LEAST else KEEP) if i.asked else REBUILD for i in walk.items]
    leaving = [item.bytes for item, word in zip(walk.items, words, strict=True) if word == OFFLOAD]
    kept, small = sum(leaving), sum(item.bytes for item in walk.items if item.asked) - sum(leaving)
    staying = min(kept, STAYING * max(leaving, default=0))
    memory = needed
    if not spread.shares_layers and spread.mesh.stages == 1 and (graph.memory is None or graph.memory.keeps_all):
        step = training_memory(graph, bands, context, value)
        alive = _most_alive(graph, [forward.input_bytes, *(cost.output_bytes for cost in forward.costs)])
        peak = staying + max(price(walk, words).peak, alive)
        memory = min(needed, max(needed, step.total) - step.activations - step.backward + peak)
    memory += (tiles - 1) * (memory - fixed_memory(graph, bands, value))
    if budget is not None and memory > budget:
        raise BudgetError(
            f"memory.budget is {budget} bytes, but with memory.offload all a step needs {memory}; use a finer "
            "tiling.grid, a smaller model, or train.precision bf16"
        )
    return OffloadPlan(kept, staying, memory, small=small)


def _most_alive(graph: Graph, sizes: list[int]) -> int:
    """Return the bytes of the tensors that the network itself holds at the worst moment of the forward pass: those
    that later nodes take, and the one just made. They cannot be offloaded."""
    place, alive, most = homes(graph), {0}, 0
    for k in range(len(graph)):
        alive.add(k + 1)
        most = max(most, sum(sizes[home] for home in {place[tensor] for tensor in alive}))
        alive -= set(graph.released[k])
    return most
