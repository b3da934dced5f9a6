"""`plan --search` and `plan --scaling`: the best settings for a cluster, and the time on each number of GPUs."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from typing import Any

from tiledseg.errors import ConfigError
from tiledseg.planning.answer.table import heading
from tiledseg.planning.answer.text import columns, figures_basis, size, wrapped
from tiledseg.planning.memory.store import disk_of, store_of
from tiledseg.planning.question import Question
from tiledseg.planning.run.blocks import BlocksAsked
from tiledseg.planning.run.question import RunQuestion
from tiledseg.planning.run.spread import Parallelism
from tiledseg.planning.search.best import TERMS, Point, Priced, Searched, scaling, search

_WHY = {
    "memory": "do not fit the memory",
    "not exact": "would change what a norm sees",
    "not possible": "cannot be",
    "slower": "are slower, most by an estimate alone",
}
_HEAD = ("settings", "step", "epoch", "computing", "communication", "waiting", "memory", "")
_KEYS = ("scaling", "gpus", "images_per_step", "step_seconds", "epoch_seconds", "efficiency", "limit", "settings")
_SCALING_HEAD = ("", "GPUs", "images a step", "step", "epoch", "efficiency", "limited by", "settings")
_STUDIES = (
    "strong: the step keeps its images, and the result; weak: its images grow with the GPUs, up to those of an epoch, "
    "in the settings of the first number"
)


def searchable(question: Question, grid: tuple[int, int] | None) -> Question:
    """Return the question with that grid, None for any. Raises ConfigError where a search lacks a figure."""
    if not question.machine.known:
        raise ConfigError(
            "--search ranks by predicted time, but no machine is known; give --machine summit say, or a file of "
            "plan --calibrate"
        )
    if question.gpus is None:
        raise ConfigError("--search spreads a run over GPUs, but --gpus is not given; give their number")
    if question.gpu_memory is None:
        raise ConfigError(
            f"--search fits runs to a memory, which the profile {question.machine.name} lacks; give --gpu-memory"
        )
    return replace(question, grid=grid)


def searched(question: Question, images_per_step: int) -> Searched:
    """Return the best settings for the GPUs of a `searchable` question. Raises ConfigError where nothing can be."""
    return search(_run(question, images_per_step), question.machine.ranks_per_host)


def _run(question: Question, images_per_step: int) -> RunQuestion:
    return with_stores(question.run(Parallelism(), question.gpus or 1, question.grid, images_per_step))


def with_stores(asked: RunQuestion) -> RunQuestion:
    """Return the question with the stores of its machine, where they are known. Blocks have a disk. Tensors of autograd
    have the memory of a GPU's host, or a disk where ranks have no device of their own."""
    machine = asked.machine
    if machine is None or asked.recompute != "auto":
        return asked
    disk = disk_of(machine)
    blocks = asked.blocks if disk is None else BlocksAsked(None, True, store=disk)
    return replace(asked, store=store_of(machine), blocks=blocks)


def search_part(question: Question, images_per_step: int, result: Searched) -> dict[str, Any]:
    """Return the settings; bytes, milliseconds, seconds an epoch."""
    machine = question.machine
    return {
        "size": list(question.size),
        "gpus": question.gpus,
        "images": question.images,
        "images_per_step": images_per_step,
        "machine": {"profile": machine.name, "measured": machine.measured},
        "memory": question.gpu_memory,
        "candidates": result.candidates,
        "discarded": result.discarded,
        "examples": {why: f"{each.candidate.in_words}: {each.reason}" for why, each in result.examples.items()},
        "best": [_row(question, images_per_step, each) for each in result.best],
        "other": None if result.other is None else _row(question, images_per_step, result.other),
        "reason": result.reason,
    }


def _row(question: Question, images_per_step: int, priced: Priced) -> dict[str, Any]:
    candidate, plan = priced.candidate, priced.plan
    return {
        "settings": candidate.in_words,
        "grid": list(candidate.grid),
        "parallel": candidate.keys(plan),
        "memory_keys": memory_keys(question, priced),
        "away": plan.offloaded.kept if plan.offloaded else 0,
        "recomputes": plan.rebuilt is not None or candidate.parallel.recompute[0] != "never",
        "ranks": priced.ranks,
        "milliseconds": round(1000 * priced.seconds, 6),
        "epoch_seconds": round(-(-question.images // images_per_step) * priced.seconds, 6),
        "by_term": {name: round(1000 * seconds, 4) for name, seconds in zip(TERMS, priced.time, strict=True)},
        "memory": priced.memory,
    }


def memory_keys(question: Question, priced: Priced) -> dict[str, Any]:
    """Return the keys of the group `memory` besides a budget, and besides a store that is a folder on the nodes."""
    blocks = priced.plan.blocks
    if blocks:
        return {"blocks": list(blocks.shape)}
    if priced.plan.offloaded is None:
        return {}
    return {"offload": "auto"} | ({"store": "host"} if question.machine.has_devices else {})


def search_table(part: dict[str, Any]) -> str:
    """Return a row for each of the best, one for the best of another kind, the discarded settings, and the reason."""
    rows = [_HEAD, *(_cells(row, "chosen" * (not place)) for place, row in enumerate(part["best"]))]
    if part["other"] and part["other"] not in part["best"]:
        rows.append(_cells(part["other"], "best of another kind"))
    why = ", ".join(f"{count:,} {_WHY[word]}" for word, count in part["discarded"].items())
    remarks = [
        f"machine: {figures_basis(part['machine'])}",
        f"{part['candidates']:,} settings: {why or 'all are above'}",
        f"choice: {part['reason']}",
    ]
    images = f"{part['images']} images of {' x '.join(map(str, part['size']))} px, {part['images_per_step']} a step"
    title = f"search: {images}, on {part['gpus']} GPUs of {size(part['memory'])}"
    return "\n".join([title, columns(rows), *map(wrapped, remarks)])


def _cells(row: dict[str, Any], remark: str) -> tuple[str, ...]:
    terms, keys = row["by_term"], row["memory_keys"]
    talking = terms["messages"] + terms["all_reduce"]
    parts = row["milliseconds"] - talking - terms["waiting"], talking, terms["waiting"]
    host = f"memory.offload auto, memory.store host for {size(row['away'])}"
    away = host if "store" in keys else "a store" if keys else ""
    return (
        row["settings"],
        f"{row['milliseconds']:.4g} ms",
        f"{row['epoch_seconds']:.4g} s",
        *(f"{value:.4g} ms" for value in parts),
        size(row["memory"]),
        ", ".join(filter(None, (remark, "recomputing" if row["recomputes"] else "", away))),
    )


def scaling_part(question: Question, images_per_step: int, numbers: tuple[int, ...]) -> dict[str, Any]:
    """Return seconds of a step and of an epoch; efficiency 1 at the first number."""
    machine = question.machine
    studies = scaling(_run(question, images_per_step), numbers, machine.ranks_per_host, question.images)
    return {
        "size": list(question.size),
        "images": question.images,
        "machine": {"profile": machine.name, "measured": machine.measured},
        "points": [
            _point_row(question, name, point) for name, points in studies.items() for point in points if len(points) > 1
        ],
    }


def _point_row(question: Question, name: str, point: Point) -> dict[str, Any]:
    seconds = point.priced.seconds
    epoch = -(-question.images // point.images) * seconds
    figures = point.ranks, point.images, round(seconds, 6), round(epoch, 6), round(point.efficiency, 4)
    return dict(zip(_KEYS, (name, *figures, point.limit or "", point.priced.candidate.in_words), strict=True))


def scaling_table(part: dict[str, Any]) -> str:
    """Return strong, then weak scaling: a row for each number."""
    rows = [
        (
            row["scaling"],
            f"{row['gpus']:,}",
            f"{row['images_per_step']:,}",
            f"{1000 * row['step_seconds']:.4g} ms",
            f"{row['epoch_seconds']:.4g} s",
            f"{100 * row['efficiency']:.1f} %",
            row["limit"] or "-",
            row["settings"],
        )
        for row in part["points"]
    ]
    images = f"{part['images']} images of {' x '.join(map(str, part['size']))} px"
    title = f"scaling: {images} an epoch; efficiency 1 is that of the first number"
    remarks = wrapped(f"machine: {figures_basis(part['machine'])}"), wrapped(_STUDIES)
    return "\n".join([title, columns([_SCALING_HEAD, *rows]), *remarks])


def scaling_title(question: Question, images_per_step: int, numbers: tuple[int, ...]) -> str:
    """Return the title of a figure: a line or two."""
    images = f"{images_per_step} a step on {numbers[0]:,} GPUs, {question.precision}"
    return f"images of {heading(question)}; {images}"


def scaling_csv(part: dict[str, Any]) -> str:
    """Return the points with a head; seconds, and efficiency as a share of 1."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _KEYS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(part["points"])
    return text.getvalue()
