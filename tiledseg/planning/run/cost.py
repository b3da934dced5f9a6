"""What a run's training step costs, predicted: memory and time, and what to do where a rank has too little memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tiledseg.geometry.graph import Graph
from tiledseg.geometry.sharing.decomposition import decompose
from tiledseg.geometry.sharing.mesh_shape import MeshShape
from tiledseg.geometry.tiling import Tiling
from tiledseg.planning.cost_model.machine import Machine
from tiledseg.planning.cost_model.prices import Prices
from tiledseg.planning.cost_model.step_time import NO_TIME
from tiledseg.planning.modes.mode_cost import ModeCost, Task, mode_cost
from tiledseg.planning.run.spread import Spread
from tiledseg.planning.walk.step_memory import copies_memory, fixed_memory, training_memory


def step_cost(
    spread: Spread,
    mesh: MeshShape,
    graph: Graph,
    tilings: Sequence[Tiling],
    bands: int,
    value_bytes: int,
    images_per_step: int,
    machine: Machine,
    batch: int = 1,
) -> ModeCost:
    """Of a training step without stages on `images_per_step` images like the largest of `tilings`, over `mesh`.

    `memory` is of the tiling that needs most, and of as many images as go through the network together, `batch` of them
    at once.
    """
    task = step_task(mesh, graph, tilings, bands, value_bytes, images_per_step, batch)
    largest, images = task.decomposition.tiling, task.images
    cost = mode_cost(task, machine, spread.mode, spread.fusion)
    if spread.together:
        weights, copies = fixed_memory(graph, bands, value_bytes), copies_memory(graph, bands, value_bytes)
        further = (-(-images // batch) - 1) * copies  # each batch has a use of the weights of its own
        return replace(cost, memory=images * cost.memory - (images - 1) * weights + further)
    others = {tiling.context_max for tiling in tilings if not spread.shares_layers} - {largest.context_max}
    needed = [training_memory(graph, bands, context, value_bytes).total for context in others]
    return replace(cost, memory=max([cost.memory, *needed]))


def once_a_step(graph: Graph, bands: int, value_bytes: int, machine: Machine, mesh: MeshShape) -> float:
    """Seconds, in a pipeline that holds about as many weights in each stage, of what comes after its passes."""
    prices = Prices(graph, bands, value_bytes, machine, mesh.ranks // mesh.stages)
    return prices.step(NO_TIME, 0, 0.0).seconds / mesh.stages


def step_task(
    mesh: MeshShape,
    graph: Graph,
    tilings: Sequence[Tiling],
    bands: int,
    value_bytes: int,
    images_per_step: int,
    batch: int = 1,
) -> Task:
    """Such a step on the largest of `tilings`."""
    largest = max(tilings, key=lambda tiling: tiling.raster[0] * tiling.raster[1])
    images = min(images_per_step, batch * -(-images_per_step // (batch * mesh.replicas)))
    return Task(graph, bands, decompose(largest, (mesh.rows, mesh.cols)), value_bytes, images, mesh.replicas)


def memory_note(spread: Spread, needed: int, memory: int, windows: bool = False) -> str | None:
    """What the user should know where a step needs more than a rank has, both in bytes."""
    if needed <= memory:
        return None
    sizes = f"needs about {needed / 2**30:.1f} GiB, but {memory / 2**30:.1f} GiB are to be had"
    if windows:
        held = "all windows of a step are held at once" if spread.together else "a step on the largest window or tile"
        fewer = "fewer train.windows_per_step, or " if spread.together else ""
        return f"{held}, which {sizes}; use {fewer}a smaller train.window, and for the validation a finer tiling.grid"
    if spread.shares_layers:
        return (
            f"parallel.halo layer computes the whole block of a rank at once, which {sizes}; use more ranks an image, "
            "or mode exchange or read with a finer tiling.grid"
        )
    return f"a training step on the largest tile {sizes}; use a finer tiling.grid"
