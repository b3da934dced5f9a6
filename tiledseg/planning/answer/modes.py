"""The halo modes in the planner's answer: a step in each, and which is quickest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tiledseg.config.parallel import HALO_MODES
from tiledseg.errors import ConfigError, InputError
from tiledseg.geometry.shapes import count_parameters
from tiledseg.geometry.tiling import Tiling
from tiledseg.planning.answer.text import Section, machine_words, milliseconds, tabled, time_of
from tiledseg.planning.run.grid import finer_grid
from tiledseg.planning.run.plan import RunPlan, plan_run
from tiledseg.planning.run.question import RunQuestion
from tiledseg.planning.run.spread import Parallelism
from tiledseg.planning.walk.cost import tile_walk
from tiledseg.planning.walk.mode_cost import fusion_word, mode_words
from tiledseg.system.console import counted
from tiledseg.units import DOUBLE_BYTES, size

Shape = tuple[int, int]


@dataclass(frozen=True)
class ModePlans:
    """The plans of a step in each halo mode that can be on the GPUs of a question, and the reasons of the others.
    `mesh`: ranks that share an image, the same in all plans; None where each plan has its own, with few GPUs."""

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
        """GPUs that have work in the mode that keeps most busy."""
        return max([plan.cost.ranks for plan in self.plans], default=self.question.ranks)

    @property
    def remedy(self) -> str:
        """The way to a step that fits."""
        question = self.question
        if not any(plan.cost.mode == "read" for plan in self.exact):
            return "use more ranks an image"
        return finer_grid(self.tiling, question.graph, question.network.bands, question.memory, question.value_bytes)

    @property
    def reason(self) -> str:
        """The reason why a mode is chosen, or why none is."""
        if not self.plans:
            return "no mode takes a tile whole on this mesh"
        if self.best is None:
            return "no mode can compute this exactly on this mesh; use fewer ranks an image, or another norm"
        mode = mode_words(self.best.cost.mode, fusion_word(self.best.cost.fusion))
        if self.fitting:
            return f"{mode} takes the least predicted time of those that fit and are exact"
        least = f"{mode} needs least, {size(self.best.memory)}"
        return f"no mode fits {size(self.question.memory)} a rank: {least}; {self.remedy}"


def with_step(question: RunQuestion, tiles: int) -> RunQuestion:
    """Return the question with defaults for ranks and images of a step. The ranks are one for each of the `tiles` of an
    image. A step has as many images as the ranks take at a tile each."""
    ranks = question.ranks or tiles
    images = question.images_per_step or max(1, min(question.images, ranks // tiles))
    return replace(question, ranks=ranks, images_per_step=images)


def mode_plans(question: RunQuestion, tiling: Tiling, exact: bool = True) -> ModePlans:
    """Plan a step in each halo mode, in mode `layer` with the best fusion. Unless `exact`, modes in which a norm sees
    a part of its image are planned too. Raises ConfigError where a mesh has more ranks than the grid has tiles."""
    mesh = question.parallel.mesh or tiling.grid
    if mesh[0] > tiling.grid[0] or mesh[1] > tiling.grid[1]:
        raise ConfigError(
            f"--mesh is {mesh[0]} x {mesh[1]} ranks, but the grid has {tiling.grid[0]} x {tiling.grid[1]} tiles; give "
            f"at most a rank a tile, or --grid {max(mesh[0], tiling.grid[0])} {max(mesh[1], tiling.grid[1])}"
        )
    of_step = with_step(replace(question, grid=tiling.grid, machine=question.figures), math.prod(mesh))
    shape = mesh if question.parallel.mesh or of_step.ranks >= math.prod(mesh) else None
    plans, impossible = list[RunPlan](), dict[str, str]()
    for mode in HALO_MODES:
        try:
            parallel = Parallelism(exact=exact, halo=mode, mesh=shape, fusion=None)
            plans.append(plan_run(replace(of_step, parallel=parallel)))
        except InputError as error:
            impossible[mode] = str(error.__cause__ or error)
    return ModePlans(of_step, tiling, shape, tuple(plans), impossible)


def modes_part(modes: ModePlans) -> Section:
    """Return a training step in each halo mode, and the choice; bytes, whole messages, milliseconds."""
    question, mesh = modes.question, modes.mesh or modes.tiling.grid
    machine, graph, bands = question.figures, question.graph, question.network.bands
    undivided = tile_walk(graph, bands, modes.tiling.whole.shape).work
    sums = DOUBLE_BYTES * count_parameters(graph, bands, trained=True)  # of gradients, in float64 (docs/decisions/0003)
    reduce = {"bytes": sums, "milliseconds": milliseconds(machine.all_reduce_seconds(1, sums, modes.at_work))}
    chosen, reason = modes.best if modes.fitting else None, modes.reason
    figures: dict[str, Any] = {"flops": machine.flops, "bandwidth": machine.bandwidth, "latency": machine.latency}
    if machine.known:
        figures |= {"profile": machine.name, "measured": machine.measured, "base_bytes": machine.base}
    rows = [_row(modes, plan, undivided) for plan in modes.plans]
    values = {
        "mesh": list(mesh),
        "ranks": math.prod(mesh),
        "gpus": modes.at_work,
        "images_per_step": question.images_per_step,
        "machine": figures,
        "multiply_adds_undivided": undivided,
        "gradient_all_reduce": reduce,
        "costs": [*rows, *({"mode": m, "possible": False, "reason": why} for m, why in modes.impossible.items())],
        "choice": {
            "mode": chosen and chosen.cost.mode,
            "fusion": chosen and fusion_word(chosen.cost.fusion),
            "reason": reason,
        },
    }

    def remarks(row: Mapping[str, Any]) -> str:
        is_chosen = chosen is not None and row["mode"] == chosen.cost.mode
        flags = "chosen" * is_chosen, "not exact" * (not row["exact"]), "does NOT fit" * (not row.get("fits", True))
        return ", ".join(filter(None, flags))

    text = tabled(
        f"modes: a training step of {counted(question.images_per_step, 'image')} on {counted(modes.at_work, 'rank')}, "
        "by the busiest rank",
        rows,
        {
            "mode": lambda row: row["mode"] + f" ({row['fusion']})" * (row["fusion"] not in (None, 1)),
            "E": lambda row: f"{row['efficiency']:.4f}",
            "reads": lambda row: f"{row['pixels_read_rank'] / 1e6:.4g} Mpx",
            "messages": lambda row: f"{row['messages_rank']:,}",
            "sent": lambda row: size(row["bytes_rank"]),
            "memory": lambda row: size(row["memory_rank"]),
            "predicted": lambda row: time_of(row["milliseconds"]),
            "": remarks,
        },
        [
            *(f"{mode}: not possible: {why}" for mode, why in modes.impossible.items()),
            f"in all modes: one all-reduce of gradients, {size(sums)}, {reduce['milliseconds']:.4g} ms of the time "
            "predicted",
            f"{machine_words(question)}: {machine.flops / 1e12:.4g} Tflop/s a rank, {machine.bandwidth / 1e9:.4g} GB/s "
            f"between ranks, {machine.latency * 1e6:.4g} us a message",
            f"choice: {reason}",
        ],
    )
    return Section(values, text)


def _row(modes: ModePlans, plan: RunPlan, undivided: int) -> dict[str, Any]:
    """Return the figures of a mode. `undivided`: multiply-adds of the network on the whole image."""
    cost, limit = plan.cost, modes.question.limit
    row = {
        "mode": cost.mode,
        "fusion": fusion_word(cost.fusion),
        "possible": True,
        "exact": plan in modes.exact,
        "efficiency": round(cost.work / undivided, 4),
        "multiply_adds": cost.work,
        "messages_rank": cost.messages_rank,
        "bytes_rank": cost.bytes_rank,
        "messages": cost.messages,
        "bytes": cost.bytes,
        "pixels_read": cost.read,
        "pixels_read_rank": cost.read_max,
        "norm_all_reduces": {"calls": cost.norms[0], "bytes": cost.norms[1]},
        "memory_rank": cost.memory,
        "milliseconds": milliseconds(cost.seconds),
    }
    return row if limit is None else row | {"fits": cost.memory <= limit}
