"""The halo modes in the planner's answer, and its first lines: does it fit, on which GPUs, how long it takes, and what
would be better."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tiledseg.config.parallel import HALO_MODES
from tiledseg.errors import ConfigError, InputError
from tiledseg.geometry.sharing.decomposition import decompose
from tiledseg.geometry.tiling import Tiling, finest_grid, make_tiling
from tiledseg.planning.answer.text import milliseconds, time_of
from tiledseg.planning.run.grid import finer_grid
from tiledseg.planning.run.plan import RunPlan, plan_run, run_grid
from tiledseg.planning.run.question import RunQuestion
from tiledseg.planning.run.spread import Parallelism
from tiledseg.planning.walk.mode_cost import ModeCost, Task, fusion_word, gradient_bytes, label
from tiledseg.planning.walk.rank_steps import SentBytes
from tiledseg.units import size

SHORTER = 0.98  # times the epoch: what saves less is not named
Shape = tuple[int, int]


@dataclass(frozen=True)
class ModePlans:
    """The plans of a step in each halo mode that can be on the GPUs of a question, and the reasons of the others.
    `mesh`: ranks that share an image, None where there are fewer GPUs than tiles: then as each plan spreads."""

    question: RunQuestion
    tiling: Tiling
    mesh: Shape | None
    plans: tuple[RunPlan, ...]
    impossible: dict[str, str]

    @cached_property
    def exact(self) -> list[RunPlan]:
        return [plan for plan in self.plans if not any(note.startswith("not exact") for note in plan.warnings)]

    @cached_property
    def fitting(self) -> list[RunPlan]:
        return [plan for plan in self.exact if plan.memory <= self.question.memory]

    @cached_property
    def best(self) -> RunPlan | None:
        """The quickest plan that is exact and fits, else the exact one of least memory; None where none is exact."""
        quickest = min(self.fitting, key=lambda plan: plan.cost.seconds, default=None)
        return quickest or min(self.exact, key=lambda plan: plan.memory, default=None)

    @property
    def at_work(self) -> int:
        """GPUs that have work."""
        images, ranks = self.question.images_per_step, self.question.ranks
        if self.mesh is None:
            return min(ranks, images * len(self.tiling))
        alone = math.prod(self.mesh)
        return min(images, ranks // alone) * alone

    def values(self, plan: RunPlan) -> dict[str, Any]:
        """Return the mode, bytes, GPUs and seconds of an epoch as plain values."""
        epoch = -(-self.question.images // self.question.images_per_step) * plan.cost.seconds
        of_mode = {"mode": plan.spread.mode, "fusion": fusion_word(plan.cost.fusion), "memory": plan.memory}
        return of_mode | {"gpus": self.at_work, "epoch_seconds": round(epoch, 6)}


def with_step(question: RunQuestion, tiles: int) -> RunQuestion:
    """Return the question with its ranks, by default one for each of so many `tiles` of an image, and the images of a
    step: by default as many as these ranks take at one a tile."""
    ranks = question.ranks or tiles
    images = question.images_per_step or max(1, min(question.images, ranks // tiles))
    return replace(question, ranks=ranks, images_per_step=images)


def mode_plans(question: RunQuestion, tiling: Tiling, exact: bool = True) -> ModePlans:
    """Plan a step in each halo mode, in layer mode with the best fusion. Not `exact`: modes in which a norm sees less,
    too. Raises ConfigError where a mesh has more ranks than the grid has tiles."""
    mesh = question.parallel.mesh or tiling.grid
    if mesh[0] > tiling.grid[0] or mesh[1] > tiling.grid[1]:
        raise ConfigError(
            f"--mesh is {mesh[0]} x {mesh[1]} ranks, but the grid has {tiling.grid[0]} x {tiling.grid[1]} tiles; give "
            f"at most a rank a tile, or --grid {max(mesh[0], tiling.grid[0])} {max(mesh[1], tiling.grid[1])}"
        )
    asked = with_step(replace(question, grid=tiling.grid, machine=question.figures), math.prod(mesh))
    shape = mesh if question.parallel.mesh or asked.ranks >= math.prod(mesh) else None
    plans, impossible = list[RunPlan](), dict[str, str]()
    for mode in HALO_MODES:
        try:
            parallel = Parallelism(exact=exact, halo=mode, mesh=shape, fusion=None)
            plans.append(plan_run(replace(asked, parallel=parallel)))
        except InputError as error:
            impossible[mode] = str(error.__cause__ or error)
    return ModePlans(asked, tiling, shape, tuple(plans), impossible)


def modes_part(modes: ModePlans) -> dict[str, Any]:
    """Return a training step in each halo mode, and the choice; bytes, whole messages, milliseconds."""
    question, tiling, mesh = modes.question, modes.tiling, modes.mesh or modes.tiling.grid
    machine, graph, bands = question.figures, question.graph, question.network.bands
    task = Task(graph, bands, decompose(tiling, mesh), question.value_bytes)
    undivided, all_reduce, chosen = task.undivided_work, gradient_bytes(task), modes.best if modes.fitting else None
    figures: dict[str, Any] = {"flops": machine.flops, "bandwidth": machine.bandwidth, "latency": machine.latency}
    if machine.known:
        figures |= {"profile": machine.name, "measured": machine.measured, "base_bytes": machine.base}
    impossible = [{"mode": mode, "possible": False, "reason": why} for mode, why in modes.impossible.items()]
    return {
        "mesh": list(mesh),
        "ranks": task.ranks,
        "gpus": modes.at_work,
        "images_per_step": question.images_per_step,
        "machine": figures,
        "multiply_adds_undivided": undivided,
        "gradient_all_reduce": {
            "bytes": all_reduce,
            "milliseconds": milliseconds(machine.all_reduce_seconds(1, all_reduce, modes.at_work)),
        },
        "costs": [_row(plan.cost, undivided, plan in modes.exact, question.limit) for plan in modes.plans] + impossible,
        "choice": {
            "mode": chosen and chosen.cost.mode,
            "fusion": chosen and fusion_word(chosen.cost.fusion),
            "reason": _reason(modes),
        },
    }


def _reason(modes: ModePlans) -> str:
    """Return why a mode is chosen, or none."""
    question, best = modes.question, modes.best
    if not modes.plans:
        return "no mode takes a tile whole on this mesh"
    if best is None:
        return "no mode can compute this exactly on this mesh; use fewer ranks an image, or another norm"
    if not modes.fitting:
        use = "use more ranks an image"
        if any(plan.cost.mode == "read" for plan in modes.exact):
            of_step = question.graph, question.network.bands, question.memory, question.value_bytes
            use = finer_grid(modes.tiling, *of_step)
        least = f"{label(best.cost)} needs least, {size(best.memory)}"
        return f"no mode fits {size(question.memory)} a rank: {least}; {use}"
    if all((plan.cost.work, plan.cost.traffic.step) == (best.cost.work, SentBytes()) for plan in modes.plans):
        return "all modes are the same here: each computes the same tiles, nothing twice, and sends nothing"
    against = [
        f"{label(plan.cost)} {time_of(1000 * plan.cost.seconds)}"
        + ("" if plan in modes.fitting else " (does not fit)" if plan in modes.exact else " (not exact)")
        for plan in modes.plans
        if plan is not best
    ]
    least = f"{label(best.cost)} takes the least predicted time, {time_of(1000 * best.cost.seconds)}"
    return f"{least}{', against ' * bool(against)}{', '.join(against)}"


def _row(cost: ModeCost, undivided: int, exact: bool, memory: int | None) -> dict[str, Any]:
    passes = {name: getattr(cost.busiest, name) for name in ("forward", "backward")}
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
        **{name: {"messages_rank": sent.messages, "bytes_rank": sent.bytes} for name, sent in passes.items()},
        "messages": cost.traffic.step.messages,
        "bytes": cost.traffic.step.bytes,
        "pixels_read": cost.read,
        "pixels_read_rank": cost.read_max,
        "norm_all_reduces": {"calls": cost.norms.step.messages, "bytes": cost.norms.step.bytes},
        "memory_rank": cost.memory,
        "milliseconds": milliseconds(cost.seconds),
    }
    return row if memory is None else row | {"fits": cost.memory <= memory}


def summary_part(question: RunQuestion, answer: dict[str, Any], modes: ModePlans) -> dict[str, Any]:
    """Return the figures of the first lines; bytes, milliseconds, seconds of an epoch. `answer`: the other parts."""
    tiling, best = modes.tiling, modes.best
    part = basis_part(question, modes.at_work) | {
        "grid": list(tiling.grid),
        "tiles": len(tiling),
        "halo": answer["exact"]["halo"],
        "context": answer["exact"]["context_max"],
        "recomputed": 0,
        "recompute_percent": 0.0,
    }
    if "stages" in answer:
        staged = answer["stages"]
        pipelines, step = max(1, question.ranks // staged["stages"]), staged["step"]["milliseconds"]
        steps = -(-question.images * len(tiling) // (staged["micro_batches"] * pipelines))
        memory = max(row["memory"]["total"] for row in staged["by_stage"])
        return part | {
            "fits": None if question.limit is None else memory <= question.limit,
            "memory": memory,
            "modes": [{"mode": "read", "fusion": None, "milliseconds": step}],
            "gpus": pipelines * staged["stages"],
            "micro_batches": staged["micro_batches"] * pipelines,
            "milliseconds": step,
            "epoch_seconds": round(steps * step / 1000, 6),
            "better": [],
        }
    part["better"] = _better(question, modes)
    if best is None:
        reason = next(iter(modes.impossible.values()), "no mode is exact on this grid")
        return part | {"fits": False, "reason": reason, "modes": []}
    if best.rebuilt is not None:
        part |= {"recomputed": len(best.rebuilt.items), "recompute_percent": round(100 * best.rebuilt.extra, 2)}
    costs = [best.cost, *(plan.cost for plan in modes.exact if plan is not best)]
    rows = [{"mode": c.mode, "fusion": fusion_word(c.fusion), "milliseconds": milliseconds(c.seconds)} for c in costs]
    return part | {
        **modes.values(best),
        "fits": None if question.limit is None else best in modes.fitting,
        "modes": rows,
        "images_per_step": modes.question.images_per_step,
        "milliseconds": rows[0]["milliseconds"],
    }


def basis_part(question: RunQuestion, gpus: int) -> dict[str, Any]:
    """Return the facts that figures of a plan on so many GPUs rest on."""
    machine, precision = question.figures, question.precision
    slow = machine.known and question.value_bytes == 2 and machine.flops <= machine.rates.get("fp32", 0.0)
    basis = f"{machine.name}, {'measured' if machine.measured else 'by its datasheet, not measured'}"
    return {
        "gpu": question.limit,
        "gpus_asked": question.ranks,
        "gpus_per_node": question.figures.ranks_per_host,
        "slow_precision": f"{precision} is no faster than fp32 on {machine.name}" if slow else "",
        "proposed": question.images > 1 and not question.images_per_step,
        "images": question.images,
        "epoch_values": question.images * math.prod(question.shape) * question.network.bands,
        "machine": basis if machine.known else f"{machine.flops / 1e12:.4g} Tflop/s assumed, give --machine",
        "reading": not machine.has_free_core(gpus),
    }


def better_precision(question: RunQuestion) -> str | None:
    """Return a precision of 16 bits for wider values, or the other one where the machine has a quicker rate for it."""
    rates = question.figures.rates
    usual = "fp16" if rates.get("fp16", 0.0) > rates.get("bf16", question.figures.flops) else "bf16"
    quicker = rates.get(usual, 0.0) > 1.5 * rates.get(question.precision, math.inf)
    return usual if question.value_bytes > 2 or quicker else None


def _better(question: RunQuestion, here: ModePlans) -> list[dict[str, Any]]:
    """Return other settings, each with its figures: those that fit where these do not, or have a shorter epoch."""
    longest, found = math.inf, list[dict[str, Any]]()
    if here.best and here.fitting:
        longest = SHORTER * here.values(here.best)["epoch_seconds"]
    for flags, other in _others(question, here):
        assert other.grid is not None, "a grid is given"
        with contextlib.suppress(InputError):
            modes = mode_plans(other, make_tiling(other.shape, other.grid, here.tiling.footprint))
            values = modes.values(modes.best) if modes.best and modes.fitting else {"epoch_seconds": math.inf}
            found += [{"flags": flags, **values}] if values["epoch_seconds"] < longest else []
    return found


def _others(question: RunQuestion, here: ModePlans) -> Iterator[tuple[str, RunQuestion]]:
    """Yield flags, and the question with them, all tensors kept: narrower values, a GPU a tile, the grid of the fewest
    tiles that fit where these do not, and a finer one where GPUs are not counted."""
    tiling = here.tiling
    kept = "none" if question.recompute == "auto" else question.recompute
    question = replace(question, grid=tiling.grid, recompute=kept)
    if usual := better_precision(question):
        yield f"--precision {usual}", replace(question, precision=usual)
    if 0 < question.ranks < len(tiling):
        yield f"--gpus {len(tiling)}", replace(question, ranks=len(tiling))
    if question.parallel.mesh is not None:
        return
    grids = list[Shape]()
    if not here.fitting:
        ranks = -(-max(1, question.ranks) // question.images)
        asked = replace(question, ranks=ranks, grid=None, parallel=Parallelism(halo="layer"))
        with contextlib.suppress(InputError):
            grids.append(run_grid(asked, tiling.footprint, question.rasters[0]))
    if not question.ranks:
        finest = finest_grid(question.shape, tiling.footprint)
        grids.append((min(finest[0], 2 * tiling.grid[0]), min(finest[1], 2 * tiling.grid[1])))
    for grid in dict.fromkeys(grids):
        if grid != tiling.grid:
            yield f"--grid {grid[0]} {grid[1]}", replace(question, grid=grid)
