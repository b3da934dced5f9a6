"""The halo modes of the planner's answer: a row of figures for each, the chosen one, the reason, and their table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from tiledseg.config.parallel import HALO_MODES
from tiledseg.errors import ConfigError, InputError
from tiledseg.geometry.sharing.decomposition import decompose
from tiledseg.geometry.tiling import Tiling
from tiledseg.planning.answer.text import columns, figures_basis, milliseconds, size, wrapped
from tiledseg.planning.question import Question
from tiledseg.planning.run.grid import finer_grid
from tiledseg.planning.run.norms import exact_modes
from tiledseg.planning.run.plan import RunPlan, plan_run
from tiledseg.planning.run.spread import Parallelism
from tiledseg.planning.step.halo_traffic import SentBytes
from tiledseg.planning.walk.mode_cost import ModeCost, Task, fusion_word, gradient_bytes, label, mode_words

Shape = tuple[int, int]
_HEAD = ("mode", "E", "redundant work", "reads", "messages", "bytes sent", "memory", "predicted", "")


class ModePlans(NamedTuple):
    """A step of `images` images on `gpus` GPUs: the plan of each halo mode that can be, and the reasons of others."""

    gpus: int
    images: int
    plans: tuple[RunPlan, ...]
    impossible: dict[str, str]


def mode_plans(
    question: Question, tiling: Tiling, mesh: Shape | None, gpus: int, images: int = 1, exact: bool = True
) -> ModePlans:
    """Plan a step in each halo mode; in layer mode with a thin halo at each layer, and with the best fusion if that is
    another. `mesh`: of an image, None as the plan spreads; not `exact`: modes in which a norm sees less, too."""
    plans: dict[tuple[str, int], RunPlan] = {}
    impossible: dict[str, str] = {}
    for mode in HALO_MODES:
        try:
            for fusion in (1, None) if mode == "layer" else (1,):
                parallel = Parallelism(exact=exact, halo=mode, mesh=mesh, fusion=fusion)
                plan = plan_run(question.run(parallel, gpus, tiling.grid, images))
                plans[mode, plan.cost.fusion] = plan
        except InputError as error:
            impossible[mode] = str(error.__cause__ or error)
    return ModePlans(gpus, images, tuple(plans.values()), impossible)


def image_mesh(question: Question, tiling: Tiling) -> Shape:
    """Return the ranks of an image, one a tile unless set. Raises ConfigError where a mesh has more than the grid."""
    mesh = question.mesh or tiling.grid
    if mesh[0] > tiling.grid[0] or mesh[1] > tiling.grid[1]:
        raise ConfigError(
            f"--mesh is {mesh[0]} x {mesh[1]} ranks, but the grid has {tiling.grid[0]} x {tiling.grid[1]} tiles; give "
            f"at most a rank a tile, or --grid {max(mesh[0], tiling.grid[0])} {max(mesh[1], tiling.grid[1])}"
        )
    return mesh


def modes_part(question: Question, tiling: Tiling, planned: ModePlans) -> dict[str, Any]:
    """Return a training step on one image in each halo mode, and the choice; bytes, whole messages, milliseconds."""
    mesh = question.mesh or tiling.grid
    network, machine, memory = question.network, question.machine, question.gpu_memory
    task = Task(network.graph(), network.bands, decompose(tiling, mesh), question.bytes_per_value)
    costs = [plan.cost for plan in planned.plans]
    exact = exact_modes(task.graph, len(tiling))
    finer = partial(finer_grid, tiling, task.graph, task.bands, memory or 0, question.bytes_per_value)
    chosen, reason = choose_mode(costs, memory, exact, finer)
    undivided, all_reduce = task.undivided_work, gradient_bytes(task)
    figures: dict[str, Any] = {"flops": machine.flops, "bandwidth": machine.bandwidth, "latency": machine.latency}
    if machine.known:
        figures |= {"profile": machine.name, "measured": machine.measured, "base_bytes": machine.base}
    impossible = [{"mode": mode, "possible": False, "reason": why} for mode, why in planned.impossible.items()]
    return {
        "mesh": list(mesh),
        "ranks": task.ranks,
        "machine": figures,
        "multiply_adds_undivided": undivided,
        "gradient_all_reduce": {
            "bytes": all_reduce,
            "milliseconds": milliseconds(machine.all_reduce_seconds(1, all_reduce, task.ranks)),
        },
        "costs": [_row(cost, undivided, cost.mode in exact, memory) for cost in costs] + impossible,
        "choice": {
            "mode": None if chosen is None else chosen.mode,
            "fusion": None if chosen is None else fusion_word(chosen.fusion),
            "reason": reason,
        },
    }


def choose_mode(
    costs: Sequence[ModeCost],
    memory: int | None = None,
    exact: Sequence[str] = HALO_MODES,
    finer: Callable[[], str] = lambda: "use a finer grid",
) -> tuple[ModeCost | None, str]:
    """Choose the mode of the least predicted time among the `exact` ones that fit `memory` bytes a rank, and say why.

    Without `memory` all fit; `finer` names a grid that would. The first of equals; None, and the reason, where there is
    none.
    """
    candidates = [cost for cost in costs if cost.mode in exact]
    fitting = [cost for cost in candidates if memory is None or cost.memory <= memory]
    if not costs:
        return None, "no mode takes a tile whole on this mesh"
    if not candidates:
        return None, "no mode can compute this exactly on this mesh; use fewer ranks an image, or another norm"
    if not fitting:
        least = min(candidates, key=lambda cost: cost.memory)
        return None, (
            f"no mode fits {memory} bytes a rank: {label(least)} needs least, {least.memory}; {finer()} and more "
            "ranks an image, or a lower precision"
        )
    chosen = min(fitting, key=lambda cost: cost.seconds)
    if all((cost.work, cost.traffic.step) == (chosen.work, SentBytes()) for cost in costs):
        return chosen, "all modes are the same here: each computes the same tiles, nothing twice, and sends nothing"
    faults = {False: " (not exact)", True: " (does not fit)"}
    compared = ", ".join(
        f"{label(cost)} {1000 * cost.seconds:.4g} ms{'' if cost in fitting else faults[cost in candidates]}"
        for cost in costs
        if cost is not chosen
    )
    against = f", against {compared}" if compared else ""
    return chosen, f"{label(chosen)} takes the least predicted time, {1000 * chosen.seconds:.4g} ms{against}"


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
        "milliseconds": milliseconds(cost.seconds),
    }
    return row if memory is None else row | {"fits": cost.memory <= memory}


def modes_text(part: dict[str, Any]) -> str:
    """Return a title, a row a mode, the basis of the seconds, the all-reduce of all modes, and the choice."""
    (rows, cols), choice, machine = part["mesh"], part["choice"], part["machine"]
    possible = [row for row in part["costs"] if row["possible"]]
    reduce = part["gradient_all_reduce"]
    remarks = [f"{row['mode']}: not possible: {row['reason']}" for row in part["costs"] if not row["possible"]]
    remarks.append(
        f"in all modes: one all-reduce of gradients, {size(reduce['bytes'])}, {reduce['milliseconds']:.4g} ms of the "
        "time predicted"
    )
    sums = next((row["norm_all_reduces"] for row in possible if row["norm_all_reduces"]["calls"]), None)
    if sums:
        remarks.append(f"layer: {sums['calls']} all-reduces of norm statistics, {size(sums['bytes'])}")
    basis = figures_basis(machine) if "profile" in machine else "assumed, not measured"
    remarks.append(
        f"{basis}: {machine['flops'] / 1e12:.4g} Tflop/s a rank, {machine['bandwidth'] / 1e9:.4g} GB/s between ranks, "
        f"{machine['latency'] * 1e6:.4g} us a message"
    )
    if machine.get("base_bytes"):
        remarks.append(f"the runtime itself, beside that memory: {size(machine['base_bytes'])} a rank")
    title = f"modes: a training step on one image, {rows} x {cols} ranks, by the busiest rank"
    table = columns([_HEAD, *(_cells(row, choice) for row in possible)])
    return "\n".join([title, table, *map(wrapped, [*remarks, f"choice: {choice['reason']}"])])


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
