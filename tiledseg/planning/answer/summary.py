"""The first lines of the answer: does it fit, on which grid and GPUs, how long it takes, and what would be better."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from tiledseg.errors import InputError
from tiledseg.geometry.tiling import Tiling, finest_grid, make_tiling
from tiledseg.planning.answer.modes import ModePlans, mode_plans
from tiledseg.planning.answer.text import duration, milliseconds, size, words
from tiledseg.planning.question import Question
from tiledseg.planning.run.norms import exact_modes
from tiledseg.planning.run.plan import RunPlan, run_grid
from tiledseg.planning.run.question import Extent
from tiledseg.planning.run.spread import Parallelism
from tiledseg.planning.walk.mode_cost import fusion_word, mode_words
from tiledseg.system.console import counted

WIDTH, MOST_HEADING = 80, 4  # columns, and lines of the raster and the network
SHORTER = 0.98  # times the epoch: what saves less is not named
_LABEL = 11  # columns of a row's name


class Outcome(NamedTuple):
    """A run on the GPUs of a question: the exact plan of each halo mode, the quickest that fits (else the one of least
    memory) first; GPUs at work, images of a step, and seconds of an epoch."""

    plans: tuple[RunPlan, ...]
    fits: bool
    gpus: int
    images: int
    epoch: float

    @property
    def figures(self) -> dict[str, Any]:
        """The mode, bytes, GPUs and seconds as plain values."""
        plan = self.plans[0]
        of_mode = {"mode": plan.spread.mode, "fusion": fusion_word(plan.cost.fusion), "memory": plan.memory}
        return of_mode | {"gpus": self.gpus, "epoch_seconds": round(self.epoch, 6)}


def outcome(question: Question, tiling: Tiling, modes: ModePlans | None = None) -> Outcome | str:
    """Return the run of the least predicted time on the GPUs of the question, or why there is none. `modes`: plans of
    one image on as many GPUs as it has tiles, or as its mesh has ranks."""
    mesh, memory = question.mesh or tiling.grid, question.gpu_memory
    alone = math.prod(mesh)
    gpus = question.gpus or alone
    images = max(1, min(question.images, gpus // alone))
    shape = mesh if question.mesh or gpus >= alone else None  # fewer GPUs than tiles: as the plan spreads
    if modes is None or (modes.gpus, modes.images) != (gpus, images):
        modes = mode_plans(question, tiling, shape, gpus, images)
    exact = exact_modes(question.network.graph(), len(tiling))
    plans = [plan for plan in modes.plans if plan.spread.mode in exact]
    if not plans:
        return next(iter(modes.impossible.values()), "no mode is exact on this grid")
    fitting = [plan for plan in plans if memory is None or plan.memory <= memory]
    best = min(fitting or plans, key=lambda plan: plan.cost.seconds if fitting else plan.memory)
    every = (best, *(plan for plan in plans if plan is not best))
    at_work = images * alone if shape else min(gpus, len(tiling))
    return Outcome(every, bool(fitting), at_work, images, -(-question.images // images) * best.cost.seconds)


def summary_part(question: Question, tiling: Tiling, answer: dict[str, Any], modes: ModePlans) -> dict[str, Any]:
    """Return the figures of the first lines; bytes, milliseconds, seconds of an epoch. `answer`: the other parts,
    `modes`: plans of one image."""
    machine, known = question.machine, question.gpu_memory is not None
    basis = f"{machine.name}, {'measured' if machine.measured else 'by its datasheet, not measured'}"
    part = {
        "gpu": question.gpu_memory,
        "grid": list(tiling.grid),
        "tiles": len(tiling),
        "halo": answer["exact"]["halo"],
        "context": answer["exact"]["context_max"],
        "gpus_per_node": question.node_gpus,
        "images": question.images,
        "machine": basis if machine.known else f"{machine.flops / 1e12:.4g} Tflop/s assumed, give --machine",
        "recomputed": 0,
        "recompute_percent": 0.0,
    }
    if "stages" in answer:
        return part | _stages(question, tiling, answer["stages"])
    run = outcome(question, tiling, modes)
    if isinstance(run, str):
        return part | {"fits": False, "reason": run, "modes": [], "better": list(_better(question, tiling, None))}
    rebuilt = run.plans[0].rebuilt
    if rebuilt is not None:
        part |= {"recomputed": len(rebuilt.items), "recompute_percent": round(100 * rebuilt.extra, 2)}
    costs = [plan.cost for plan in run.plans]
    rows = [{"mode": c.mode, "fusion": fusion_word(c.fusion), "milliseconds": milliseconds(c.seconds)} for c in costs]
    return part | {
        **run.figures,
        "fits": run.fits if known else None,
        "modes": rows,
        "images_per_step": run.images,
        "milliseconds": rows[0]["milliseconds"],
        "better": list(_better(question, tiling, run)),
    }


def _stages(question: Question, tiling: Tiling, part: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of pipelines."""
    pipelines = max(1, (question.gpus or part["stages"]) // part["stages"])
    steps = -(-question.images * len(tiling) // (part["micro_batches"] * pipelines))
    memory, step = max(row["memory"]["total"] for row in part["by_stage"]), part["step"]["milliseconds"]
    return {
        "fits": None if question.gpu_memory is None else memory <= question.gpu_memory,
        "memory": memory,
        "modes": [{"mode": "read", "fusion": None, "milliseconds": step}],
        "gpus": pipelines * part["stages"],
        "micro_batches": part["micro_batches"] * pipelines,
        "milliseconds": step,
        "epoch_seconds": round(steps * step / 1000, 6),
        "better": [],
    }


def _better(question: Question, tiling: Tiling, here: Outcome | None) -> Iterator[dict[str, Any]]:
    """Yield other settings, each with its figures: those that fit where these do not, or have a shorter epoch."""
    for flags, other in _others(question, tiling):
        try:
            assert other.grid is not None, "a grid is given"
            run = outcome(other, make_tiling(other.size, other.grid, tiling.footprint))
        except InputError:
            continue
        shorter = here is None or not here.fits or isinstance(run, str) or run.epoch < SHORTER * here.epoch
        if not isinstance(run, str) and run.fits and shorter:
            yield {"flags": flags, **run.figures}


def _others(question: Question, tiling: Tiling) -> Iterator[tuple[str, Question]]:
    """Yield flags, and the question with them, all tensors kept: narrower values, a GPU a tile, the grid of the fewest
    tiles that fit and give each GPU one, and one of twice the rows and columns where GPUs are not counted."""
    kept = "none" if question.recompute == "auto" else question.recompute
    question, machine = replace(question, grid=tiling.grid, recompute=kept, memory_budget=None), question.machine
    if question.precision in ("fp32", "fp64"):
        usual = "fp16" if machine.rates.get("fp16", 0.0) > machine.rates.get("bf16", machine.flops) else "bf16"
        yield f"--precision {usual}", replace(question, precision=usual)
    if question.gpus is not None and question.gpus < len(tiling):
        yield f"--gpus {len(tiling)}", replace(question, gpus=len(tiling))
    if question.mesh is not None:
        return
    grids = []
    if question.gpu_memory is not None:
        try:
            ranks = -(-(question.gpus or 1) // question.images)
            asked = question.run(Parallelism(halo="layer"), ranks)
            grids.append(run_grid(asked, tiling.footprint, Extent(question.size)))
        except InputError:
            pass  # no grid fits
    if question.gpus is None:
        finest = finest_grid(question.size, tiling.footprint)
        grids.append((min(finest[0], 2 * tiling.grid[0]), min(finest[1], 2 * tiling.grid[1])))
    for grid in dict.fromkeys(grids):
        if grid != tiling.grid:
            yield f"--grid {grid[0]} {grid[1]}", replace(question, grid=grid)


def summary_text(heading: str, answer: dict[str, Any], sections: list[str]) -> str:
    """Return at most 25 lines of at most 80 columns. `heading`: the raster and the network."""
    part = answer["summary"]
    lines = [line for each in heading.splitlines() for line in textwrap.wrap(each, WIDTH)][:MOST_HEADING]
    lines += ["", *_row("memory", _memory(part))]
    halo = f"halo {part['halo']} px, contexts of {words(part['context'])} px at most"
    lines += _row("grid", f"{words(part['grid'])}: {counted(part['tiles'], 'tile')}, {halo}")
    if part["modes"]:
        first, *others = (
            f"{mode_words(row['mode'], row['fusion'])}{':' * (not at)} {duration(row['milliseconds'] / 1000)}"
            for at, row in enumerate(part["modes"])
        )
        lines += _row("halo mode", f"{first} a step{', against ' * bool(others)}{', '.join(others)}")
        nodes = counted(math.ceil(part["gpus"] / part["gpus_per_node"]), "node")
        lines += _row("GPUs", f"{part['gpus']:,} at work, on {nodes} of {part['gpus_per_node']}")
        kind, number = ("tile", "micro_batches") if "stages" in answer else ("image", "images_per_step")
        items = counted(part[number], kind)
        lines += _row("step", f"{duration(part['milliseconds'] / 1000)} for {items}, predicted: {part['machine']}")
        lines += _row("epoch", f"{duration(part['epoch_seconds'])} for {counted(part['images'], 'image')}")
    lines += _further(answer)
    for place, other in enumerate(part["better"]):
        figures = f"{mode_words(other['mode'], other['fusion'])}, epoch {duration(other['epoch_seconds'])}"
        text = f"{other['flags']}: {figures}, {size(other['memory'])}, {other['gpus']:,} GPUs"
        lines += _row("" if place else "better", text)
    return "\n".join([*lines, *_row("more", f"--show {','.join(sections)} or all; --help")])


def _memory(part: dict[str, Any]) -> str:
    if "reason" in part:
        return f"no mode can be: {part['reason']}"
    if part["fits"] is None:
        return f"{size(part['memory'])} a GPU; --machine or --gpu-memory says whether that fits"
    fits = "fits" if part["fits"] else "does NOT fit"
    again = f", recomputing {part['recomputed']} tensors: {part['recompute_percent']:.0f} % more time"
    of_gpu = f"{size(part['memory'])} of {size(part['gpu'])} a GPU"
    return f"{of_gpu}: {fits}{again if part['recomputed'] else ''}"


def _further(answer: dict[str, Any]) -> list[str]:
    """Return a row for each question that only some plans ask."""
    lines: list[str] = []
    if "stages" in answer:
        part = answer["stages"]
        text = (
            f"{part['stages']} of {','.join(map(str, part['balance']))} layers, {part['micro_batches']} micro-batches"
        )
        lines += _row("stages", f"{text}, {part['step']['speed_up']:.2f} x one GPU")
    if "windows" in answer:
        part = answer["windows"]
        kinds = (f"{size(part[key]['bytes'])} {word}" for key, word in (("exact", "with its halo"), ("none", "alone")))
        lines += _row("window", f"{part['side']} px, a step: {', '.join(kinds)}")
    if "rebuilding" in answer:
        part = answer["rebuilding"]
        text = f"{size(part['budget'])}; everything kept takes {size(part['kept_all'])}"
        if part["grids"]:
            best = min(part["grids"], key=lambda row: row["time"])
            text += f"; quickest: grid {words(best['grid'])}, {best['way']}, {100 * best['extra']:.0f} % more time"
        lines += _row("budget", text)
    return lines


def _row(label: str, text: str) -> list[str]:
    lead = label.ljust(_LABEL)
    return textwrap.wrap(text, WIDTH, initial_indent=lead, subsequent_indent=" " * _LABEL, break_on_hyphens=False)
