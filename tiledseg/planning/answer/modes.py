"""The halo modes of the planner's answer: a row of figures for each, the chosen one, the reason, and their table."""

from __future__ import annotations

from functools import partial
from typing import Any

from tiledseg.config.parallel import HALO_MODES
from tiledseg.errors import ConfigError, InputError
from tiledseg.geometry.sharing.decomposition import decompose
from tiledseg.geometry.tiling import Tiling
from tiledseg.planning.answer.text import columns, size, wrapped
from tiledseg.planning.cost_model.machine import Machine
from tiledseg.planning.modes.mode_choice import choose_mode, fusion_word, mode_words
from tiledseg.planning.modes.mode_cost import ModeCost, Task, gradient_bytes
from tiledseg.planning.question import Question, run_question
from tiledseg.planning.run.grid import finer_grid
from tiledseg.planning.run.norms import exact_modes
from tiledseg.planning.run.parallelism import Parallelism
from tiledseg.planning.run.plan import plan_run

_HEAD = ("mode", "E", "redundant work", "reads", "messages", "bytes sent", "memory", "predicted", "")


def modes_part(question: Question, tiling: Tiling) -> dict[str, Any]:
    """One training step on one image in each halo mode, and the choice; bytes, whole messages, milliseconds.

    Raises ConfigError where the mesh has more ranks along a dim than the grid has tiles.
    """
    mesh = question.mesh or tiling.grid
    if mesh[0] > tiling.grid[0] or mesh[1] > tiling.grid[1]:
        raise ConfigError(
            f"--mesh is {mesh[0]} x {mesh[1]} ranks, but the grid has {tiling.grid[0]} x {tiling.grid[1]} tiles; give "
            f"at most a rank a tile, or --grid {max(mesh[0], tiling.grid[0])} {max(mesh[1], tiling.grid[1])}"
        )
    network, machine = question.network, question.machine
    task = Task(network.graph(), network.bands, decompose(tiling, mesh), question.bytes_per_value)
    costs: list[ModeCost] = []
    impossible = []
    for mode in HALO_MODES:
        try:
            costs += _costs(question, tiling, mesh, mode)
        except InputError as error:
            impossible.append({"mode": mode, "possible": False, "reason": str(error.__cause__ or error)})
    exact = exact_modes(task.graph, len(tiling))
    memory = question.gpu_memory
    finer = partial(finer_grid, tiling, task.graph, task.bands, memory or 0, question.bytes_per_value)
    chosen, reason = choose_mode(costs, memory, exact, finer)
    undivided = task.undivided_work
    rows = [_row(cost, undivided, cost.mode in exact, memory) for cost in costs]
    all_reduce = gradient_bytes(task)
    return {
        "mesh": list(mesh),
        "ranks": task.ranks,
        "machine": {"flops": machine.flops, "bandwidth": machine.bandwidth, "latency": machine.latency}
        | _profile(machine),
        "multiply_adds_undivided": undivided,
        "gradient_all_reduce": {
            "bytes": all_reduce,
            "milliseconds": _milliseconds(machine.all_reduce_seconds(1, all_reduce, task.ranks)),
        },
        "costs": rows + impossible,
        "choice": {
            "mode": None if chosen is None else chosen.mode,
            "fusion": None if chosen is None else fusion_word(chosen.fusion),
            "reason": reason,
        },
    }


def _profile(machine: Machine) -> dict[str, Any]:
    """What of it is said besides three figures."""
    if not machine.known:
        return {}
    return {"profile": machine.name, "measured": machine.measured, "base_bytes": machine.base}


def _costs(question: Question, tiling: Tiling, mesh: tuple[int, int], mode: str) -> list[ModeCost]:
    """What plans of a run in that mode say: in layer mode with a thin halo at each layer, and with the best fusion if
    that is another. Raises ConfigError where no run can be."""
    fusions = (1, None) if mode == "layer" else (1,)
    asked = [Parallelism(exact=False, halo=mode, mesh=mesh, fusion=fusion) for fusion in fusions]
    costs = [plan_run(run_question(question, each, mesh[0] * mesh[1], tiling.grid)).cost for each in asked]
    return list({cost.fusion: cost for cost in costs}.values())


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
        "pixels_read": cost.read,
        "pixels_read_rank": cost.read_max,
        "norm_all_reduces": {"calls": cost.norms.step.messages, "bytes": cost.norms.step.bytes},
        "memory_rank": cost.memory,
        "milliseconds": _milliseconds(cost.seconds),
    }
    return row if memory is None else row | {"fits": cost.memory <= memory}


def _milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 4)


def modes_title(part: dict[str, Any]) -> str:
    rows, cols = part["mesh"]
    return f"modes: a training step on one image, {rows} x {cols} ranks, by the busiest rank"


def modes_table(part: dict[str, Any]) -> str:
    """A row a mode, what the seconds rest on, the all-reduce that all share, and the choice."""
    choice, machine = part["choice"], part["machine"]
    possible = [row for row in part["costs"] if row["possible"]]
    lines = [columns([_HEAD, *(_cells(row, choice) for row in possible)])]
    lines += [wrapped(f"{row['mode']}: not possible: {row['reason']}") for row in part["costs"] if not row["possible"]]
    reduce = part["gradient_all_reduce"]
    lines.append(
        wrapped(
            f"in all modes: one all-reduce of gradients, {size(reduce['bytes'])}, {reduce['milliseconds']:.4g} ms of "
            "the time predicted"
        )
    )
    sums = [row for row in possible if row["norm_all_reduces"]["calls"]]
    if sums:
        found = sums[0]["norm_all_reduces"]
        lines.append(wrapped(f"layer: {found['calls']} all-reduces of norm statistics, {size(found['bytes'])}"))
    lines.append(
        wrapped(
            f"{_known(machine)}: {machine['flops'] / 1e12:.4g} Tflop/s a rank, "
            f"{machine['bandwidth'] / 1e9:.4g} GB/s between ranks, {machine['latency'] * 1e6:.4g} us a message"
        )
    )
    if machine.get("base_bytes"):
        lines.append(wrapped(f"the runtime itself, beside that memory: {size(machine['base_bytes'])} a rank"))
    lines.append(wrapped(f"choice: {choice['reason']}"))
    return "\n".join(lines)


def _known(machine: dict[str, Any]) -> str:
    """Return the source of the figures."""
    if "profile" not in machine:
        return "assumed, not measured"
    return f"{machine['profile']}, {'measured' if machine['measured'] else 'by its datasheet, not measured'}"


def _cells(row: dict[str, Any], choice: dict[str, Any]) -> tuple[str, ...]:
    fusion = row["fusion"]
    remarks = [
        "chosen" * ((row["mode"], fusion) == (choice["mode"], choice["fusion"])),
        "not exact" * (not row["exact"]),
        "does NOT fit" * (not row.get("fits", True)),
    ]
    return (
        mode_words(row["mode"], fusion),
        f"{row['efficiency']:.4f}",
        f"{row['redundant_percent']:.2f} %",
        f"{row['pixels_read_rank'] / 1e6:.4g} Mpx",
        f"{row['messages_rank']:,}",
        size(row["bytes_rank"]),
        size(row["memory_rank"]),
        f"{row['milliseconds']:.4g} ms",
        ", ".join(filter(None, remarks)),
    )
