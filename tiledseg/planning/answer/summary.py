"""The first lines of a plan: does it fit, on which GPUs, how long it takes, and what would be better."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tiledseg.planning.answer.modes import ModePlans, mode_plans
from tiledseg.planning.answer.step import (
    PROPOSED,
    PlannedStep,
    better_precision,
    heading,
    machine_words,
    precision_words,
)
from tiledseg.planning.answer.text import Part, duration, milliseconds, words, wrapped, wrapped_lines
from tiledseg.planning.run.question import RunQuestion
from tiledseg.planning.walk.mode_cost import fusion_word, mode_words
from tiledseg.system.console import counted
from tiledseg.units import size

SHORTER = 0.98  # times the epoch: what saves less is not named
MOST_HEADING = 4  # lines of the raster and the network
_LABEL = 11  # columns of the name of a line


def staged_step(question: RunQuestion, part: dict[str, Any], tiles: int) -> tuple[PlannedStep, int]:
    """Return the step of as many pipelines as there are GPUs for, and its micro-batches; `part`: values of one."""
    pipelines, seconds = max(1, question.ranks // part["stages"]), part["step"]["milliseconds"] / 1000
    steps = -(-question.images * tiles // (part["micro_batches"] * pipelines))
    memory = max(row["memory"]["total"] for row in part["by_stage"])
    step = PlannedStep(question, pipelines * part["stages"], memory, seconds, steps * seconds)
    return step, pipelines * part["micro_batches"]


def summary_part(
    question: RunQuestion, modes: ModePlans, staged: tuple[PlannedStep, int] | None, sections: Sequence[str]
) -> Part:
    """Return the figures of the first lines; bytes, milliseconds, seconds of an epoch. `staged`: the step of stages and
    its micro-batches, if there are some."""
    tiling, best, footprint = modes.tiling, modes.best, modes.tiling.footprint
    halo, context = max(footprint.before, footprint.after), tiling.context_max
    values = {"grid": list(tiling.grid), "tiles": len(tiling), "halo": halo, "context": list(context)}
    lines = {
        "precision": precision_words(question),
        "grid": f"{words(tiling.grid)}: {counted(len(tiling), 'tile')}, halo {halo} px, contexts of {words(context)} "
        "px at most",
    }
    better = [] if staged else _better(question, modes)
    step = staged[0] if staged else modes.step(best) if best else None
    if step is None:
        reason = next(iter(modes.impossible.values()), "no mode is exact on this grid")
        values |= {"fits": False, "reason": reason, "modes": []}
        lines = {"memory": f"no mode can be: {reason}"} | lines
    else:
        rows = [_mode("read", 0) | {"milliseconds": milliseconds(step.seconds)}]
        if best and not staged:
            costs = [best.cost, *(plan.cost for plan in modes.exact if plan is not best)]
            rows = [_mode(cost.mode, cost.fusion) | {"milliseconds": milliseconds(cost.seconds)} for cost in costs]
        number = staged[1] if staged else modes.question.images_per_step
        items = {"micro_batches" if staged else "images_per_step": number}
        values |= rows[0] | step.values | items | {"modes": rows}
        proposed = question.images > 1 and not question.images_per_step and not staged
        first, *others = (
            f"{mode_words(row['mode'], row['fusion'])}{':' * (not at)} {duration(row['milliseconds'] / 1000)}"
            for at, row in enumerate(rows)
        )
        did = f"{counted(number, 'tile' if staged else 'image')}{PROPOSED * proposed}"
        unfit = "" if staged or modes.fitting else f"; {modes.remedy}"
        lines = {"memory": step.memory_words + unfit} | lines
        lines |= {
            "halo mode": f"{first} a step{', against ' * bool(others)}{', '.join(others)}",
            "GPUs": step.gpu_words,
            "step": f"{duration(step.seconds)} for {did}, predicted: {machine_words(question)}",
            "epoch": step.epoch_words(in_steps=not staged),
        }
    offers = [
        f"{other['flags']}: {mode_words(other['mode'], other['fusion'])}, epoch {duration(other['epoch_seconds'])}, "
        f"{size(other['memory'])}, {other['gpus']:,} GPUs"
        for other in better
    ]
    text = [*wrapped_lines(heading(question))[:MOST_HEADING], "", *(_line(*pair) for pair in lines.items())]
    text += [_line("" if place else "better", offer) for place, offer in enumerate(offers)]
    text += [_line("more", f"--show {','.join(sections)} or all; --help")]
    return Part(values | {"better": better}, "\n".join(text))


def _line(label: str, text: str) -> str:
    return wrapped(text, label.ljust(_LABEL), " " * _LABEL)


def _mode(mode: str, fusion: int) -> dict[str, Any]:
    return {"mode": mode, "fusion": fusion_word(fusion)}


def _better(question: RunQuestion, here: ModePlans) -> list[dict[str, Any]]:
    """Return a narrower precision with its figures, where that fits and the epoch is shorter, or nothing fits here."""
    longest, usual = math.inf, better_precision(question)
    if here.best and here.fitting:
        longest = SHORTER * here.step(here.best).epoch_seconds
    if usual is None:
        return []
    kept = "none" if question.recompute == "auto" else question.recompute
    modes = mode_plans(replace(question, precision=usual, recompute=kept), here.tiling)
    if modes.best is None or not modes.fitting or modes.step(modes.best).epoch_seconds >= longest:
        return []
    figures = {key: modes.step(modes.best).values[key] for key in ("memory", "gpus", "epoch_seconds")}
    return [{"flags": f"--precision {usual}"} | _mode(modes.best.cost.mode, modes.best.cost.fusion) | figures]
