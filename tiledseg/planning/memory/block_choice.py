"""What may become of each tensor on each kind of rank that shares an image, layer by layer."""

from __future__ import annotations

from tiledseg.planning.memory.choice import StepChoices, speed_with
from tiledseg.planning.memory.leaving import with_store
from tiledseg.planning.memory.store import Store
from tiledseg.planning.modes.mode_cost import Task, held_besides, layer_ranks, settled
from tiledseg.planning.step.cost import rank_walk
from tiledseg.planning.walk.network_walk import network_walk
from tiledseg.planning.walk.step_memory import fixed_memory


def block_choices(task: Task, fusion: int, overlap: bool, store: Store | None = None) -> list[StepChoices]:
    """Of each kind of rank; tensors may leave for `store`. With `overlap` a window is never there at once, so that it
    is kept as it is put together.

    Raises GeometryError where a rank would own nothing of some tensor.
    """
    rows, cols = settled(task.graph, task.decomposition)
    fixed = fixed_memory(task.graph, task.bands, task.value_bytes)
    found = []
    for rank in layer_ranks(task.graph, rows, cols, fusion, task.bands, task.value_bytes):
        walk = rank_walk(task.graph, task.bands, rank.row, rank.col, task.ranks, task.value_bytes)
        items = network_walk(walk, speed_with(store))
        items = with_store(items, store) if store else items
        found.append(StepChoices(items.without_insides() if overlap else items, fixed + held_besides(task, rank)))
    return found
