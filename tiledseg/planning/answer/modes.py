"""The halo modes of the planner's answer: a row of figures for each, the one chosen, and why."""

from __future__ import annotations

from typing import Any

from tiledseg.errors import ConfigError, GeometryError
from tiledseg.geometry.blocks import layer_blocks
from tiledseg.geometry.decomposition import decompose
from tiledseg.geometry.tiling import Tiling
from tiledseg.planning.answer.question import Question
from tiledseg.planning.mode_choice import choose_fusion, choose_mode, fusion_word
from tiledseg.planning.mode_cost import (
    ModeCost,
    Task,
    exchange_cost,
    gradient_bytes,
    layer_cost,
    read_cost,
)
from tiledseg.planning.run.norms import exact_modes


def modes_part(question: Question, tiling: Tiling) -> dict[str, Any]:
    """One training step on one image in each halo mode, and the choice; bytes, whole messages, milliseconds.

    Raises ConfigError where the mesh has more ranks along a dim than the grid has tiles.
    """
    mesh = question.mesh or tiling.grid
    if mesh[0] > tiling.grid[0] or mesh[1] > tiling.grid[1]:
        raise ConfigError(
            f"--mesh is {mesh[0]} x {mesh[1]} ranks, but the grid has {tiling.grid[0]} x {tiling.grid[1]} tiles; give "
            "at most a rank a tile, or a finer --grid"
        )
    network, machine = question.network, question.machine
    task = Task(network.graph(), network.bands, decompose(tiling, mesh), question.bytes_per_value)
    costs = [read_cost(task, machine), exchange_cost(task, machine)]
    impossible = None
    try:
        costs += _layer_costs(question, task)
    except GeometryError as error:
        impossible = str(error)
    exact = exact_modes(task.graph, len(tiling))
    chosen, reason = choose_mode(costs, question.gpu_memory, exact)
    undivided = task.undivided_work
    rows = [_row(cost, undivided, cost.mode in exact, question.gpu_memory) for cost in costs]
    if impossible is not None:
        rows.append({"mode": "layer", "possible": False, "reason": impossible})
    all_reduce = gradient_bytes(task)
    return {
        "mesh": list(mesh),
        "ranks": task.ranks,
        "machine": {"flops": machine.flops, "bandwidth": machine.bandwidth, "latency": machine.latency},
        "multiply_adds_undivided": undivided,
        "gradient_all_reduce": {
            "bytes": all_reduce,
            "milliseconds": _milliseconds(machine.all_reduce_seconds(1, all_reduce, task.ranks)),
        },
        "costs": rows,
        "choice": {
            "mode": None if chosen is None else chosen.mode,
            "fusion": None if chosen is None else fusion_word(chosen.fusion),
            "reason": reason,
        },
    }


def _layer_costs(question: Question, task: Task) -> list[ModeCost]:
    """Layer mode with a thin halo at each layer, and with the best fusion where that is another."""
    blocks = layer_blocks(task.decomposition.tiling, task.graph, task.decomposition.shape)
    best = choose_fusion(task.graph, blocks.rows, blocks.cols, task.bands, task.value_bytes, question.machine)
    return [layer_cost(task, question.machine, fusion) for fusion in sorted({1, best})]


def _row(cost: ModeCost, undivided: int, exact: bool, memory: int | None) -> dict[str, Any]:
    row = {
        "mode": cost.mode,
        "fusion": fusion_word(cost.fusion),
        "possible": True,
        "exact": exact,
        "efficiency": round(cost.work / undivided, 4),
        "redundant_percent": round(100 * (cost.work / undivided - 1), 2),
        "multiply_adds": cost.work,
        "multiply_adds_rank": cost.work_max,
        "messages_rank": cost.busiest.step.messages,
        "bytes_rank": cost.busiest.step.bytes,
        "forward": {"messages_rank": cost.busiest.forward.messages, "bytes_rank": cost.busiest.forward.bytes},
        "backward": {"messages_rank": cost.busiest.backward.messages, "bytes_rank": cost.busiest.backward.bytes},
        "messages": cost.traffic.step.messages,
        "bytes": cost.traffic.step.bytes,
        "norm_all_reduces": {"calls": cost.norms.step.messages, "bytes": cost.norms.step.bytes},
        "memory_rank": cost.memory,
        "milliseconds": _milliseconds(cost.seconds),
    }
    return row if memory is None else row | {"fits": cost.memory <= memory}


def _milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 4)
