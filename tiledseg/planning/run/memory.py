"""The memory of a run's training step, predicted: on the rank that needs most, and what to do where it is too much."""

from __future__ import annotations

from collections.abc import Sequence

from tiledseg.geometry.decomposition import decompose
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.tiling import Tiling
from tiledseg.planning.machine import Machine
from tiledseg.planning.mode_cost import Task, layer_cost
from tiledseg.planning.run.spread import Spread
from tiledseg.planning.step_memory import training_memory, weights_memory


def run_memory(
    spread: Spread, graph: Graph, tilings: Sequence[Tiling], bands: int, value_bytes: int, images_per_step: int = 1
) -> int:
    """Bytes of a training step without stages: of the largest block in mode `layer`, or of as many as go through the
    network together; else of the largest context."""
    if not spread.shares_layers:
        contexts = {tiling.context_max for tiling in tilings}
        return max(training_memory(graph, bands, context, value_bytes).total for context in contexts)
    largest = max(tilings, key=lambda tiling: tiling.raster[0] * tiling.raster[1])
    task = Task(graph, bands, decompose(largest, (spread.mesh.rows, spread.mesh.cols)), value_bytes)
    one = layer_cost(task, Machine(), spread.fusion).memory
    images = -(-images_per_step // spread.mesh.replicas) if spread.together else 1
    return one + (images - 1) * (one - weights_memory(task.parameters, value_bytes))


def memory_note(spread: Spread, needed: int, memory: int) -> str | None:
    """What the user should know where a step needs more than a rank has, both in bytes."""
    if needed <= memory:
        return None
    sizes = f"needs about {needed / 2**30:.1f} GiB, but {memory / 2**30:.1f} GiB are to be had"
    if spread.shares_layers:
        return (
            f"parallel.halo layer computes the whole block of a rank at once, which {sizes}; use more ranks an image, "
            "or mode exchange or read with a finer tiling.grid"
        )
    return f"a training step on the largest tile {sizes}; use a finer tiling.grid"
