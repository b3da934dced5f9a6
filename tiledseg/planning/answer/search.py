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
from tiledseg.planning.run.parallelism import Parallelism
from tiledseg.planning.run.question import RunQuestion
from tiledseg.planning.search.best import TERMS, Searched, search
from tiledseg.planning.search.price import Priced
from tiledseg.planning.search.scaling import Point, quicker, strong, weak

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
    "strong: the step keeps its images, and the result; weak: its images grow with the GPUs, up to those of an epoch; "
    "both in the mode that is quickest on the first number"
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
    assert question.gpus is not None, "searchable"
    run = question.run(Parallelism(), question.gpus, question.grid, images_per_step)
    return search(with_stores(run), question.machine.ranks_per_host)


def with_stores(asked: RunQuestion) -> RunQuestion:
    """Return the question with the stores of its machine, where they are known. Blocks have a disk. Tensors of autograd
    have the memory of a GPU's host, or a disk where ranks have no device of their own."""
    assert asked.machine is not None, "searchable"
    if not asked.machine.known or asked.recompute != "auto":
        return asked
    disk = disk_of(asked.machine)
    blocks = asked.blocks if disk is None else BlocksAsked(None, True, store=disk)
    return replace(asked, store=store_of(asked.machine), blocks=blocks)


def search_part(question: Question, images_per_step: int, found: Searched) -> dict[str, Any]:
    """Return the settings; bytes, milliseconds, seconds an epoch."""
    machine = question.machine
    return {
        "size": list(question.size),
        "gpus": question.gpus,
        "images": question.images,
        "images_per_step": images_per_step,
        "machine": {"profile": machine.name, "measured": machine.measured},
        "memory": question.gpu_memory,
        "candidates": found.candidates,
        "discarded": found.discarded,
        "examples": {why: f"{each.candidate.in_words}: {each.reason}" for why, each in found.examples.items()},
        "best": [_row(question, images_per_step, each) for each in found.best],
        "other": None if found.other is None else _row(question, images_per_step, found.other),
        "reason": found.reason,
    }


def _row(question: Question, images_per_step: int, priced: Priced) -> dict[str, Any]:
    candidate, plan = priced.candidate, priced.plan
    return {
        "settings": priced.in_words,
        "grid": list(candidate.grid),
        "parallel": candidate.keys(plan),
        "memory_keys": memory_keys(question, priced),
        "away": plan.offloaded.kept if plan.offloaded else 0,
        "recomputes": plan.rebuilt is not None or candidate.recompute != "never",
        "ranks": priced.ranks,
        "milliseconds": round(1000 * priced.seconds, 6),
        "epoch_seconds": round(steps(question.images, images_per_step) * priced.seconds, 6),
        "by_term": {name: round(1000 * getattr(priced.time, name), 4) for name in TERMS},
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


def steps(images: int, images_per_step: int) -> int:
    """Return the steps of an epoch; the last one may have fewer images."""
    return -(-images // images_per_step)


def search_table(part: dict[str, Any]) -> str:
    """Return a row for each of the best, one for the best of another kind, the discarded settings, and the reason."""
    rows = [_HEAD, *(_cells(row, "chosen" * (not place)) for place, row in enumerate(part["best"]))]
    if part["other"] and part["other"] not in part["best"]:
        rows.append(_cells(part["other"], "best of another kind"))
    why = ", ".join(f"{count:,} {_WHY[word]}" for word, count in part["discarded"].items())
    job = (
        f"{part['images']} images of {' x '.join(map(str, part['size']))} px, {part['images_per_step']} a step, on "
        f"{part['gpus']} GPUs"
    )
    remarks = [
        f"machine: {figures_basis(part['machine'])}",
        f"{part['candidates']:,} settings: {why or 'all are above'}",
        f"choice: {part['reason']}",
    ]
    return "\n".join([f"search: {job} of {size(part['memory'])}", columns(rows), *map(wrapped, remarks)])


def _cells(row: dict[str, Any], remark: str) -> tuple[str, ...]:
    terms, keys = row["by_term"], row["memory_keys"]
    talking = terms["messages"] + terms["norms"] + terms["all_reduce"] + terms["copies"]
    shown = row["milliseconds"] - talking - terms["waiting"], talking, terms["waiting"]
    host = f"memory.offload auto, memory.store host for {size(row['away'])}"
    away = host if "store" in keys else "a store" if keys else ""
    return (
        row["settings"],
        f"{row['milliseconds']:.4g} ms",
        f"{row['epoch_seconds']:.4g} s",
        *(f"{value:.4g} ms" for value in shown),
        size(row["memory"]),
        ", ".join(filter(None, (remark, "recomputing" if row["recomputes"] else "", away))),
    )


def scaling_part(question: Question, images_per_step: int, numbers: tuple[int, ...]) -> dict[str, Any]:
    """Return seconds of a step and of an epoch; efficiency 1 at the first number."""
    run = with_stores(question.run(Parallelism(), numbers[0], question.grid, images_per_step))
    machine = question.machine
    same_step = strong(run, numbers, machine.ranks_per_host)
    studies = {"strong": same_step, "weak": weak(run, numbers, same_step[0].priced, question.images)}
    rows = [
        _point_row(question, name, point) for name, points in studies.items() for point in points if len(points) > 1
    ]
    other = quicker(run, same_step[-1], machine.ranks_per_host)
    return {
        "size": list(question.size),
        "images": question.images,
        "machine": {"profile": machine.name, "measured": machine.measured},
        "points": rows,
        "quicker": other and {"gpus": numbers[-1], "settings": other.in_words, "step_seconds": round(other.seconds, 6)},
    }


def _point_row(question: Question, name: str, point: Point) -> dict[str, Any]:
    seconds = point.priced.seconds
    epoch = steps(question.images, point.images) * seconds
    figures = point.ranks, point.images, round(seconds, 6), round(epoch, 6), round(point.efficiency, 4)
    return dict(zip(_KEYS, (name, *figures, point.limit or "", point.priced.in_words), strict=True))


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
    remarks, other = [f"machine: {figures_basis(part['machine'])}", _STUDIES], part["quicker"]
    if other:
        step = f"{other['settings']}, {1000 * other['step_seconds']:.4g} ms a step"
        remarks.append(f"on {other['gpus']:,} GPUs another mode is quicker: {step}")
    title = f"scaling: {images} an epoch; efficiency 1 is that of the first number"
    return "\n".join([title, columns([_SCALING_HEAD, *rows]), *map(wrapped, remarks)])


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
