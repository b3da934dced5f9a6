"""`plan --scaling`: predicted time and efficiency at each number of GPUs, as plain values, a table, and CSV."""

from __future__ import annotations

import csv
import io
from typing import Any

from tiledseg.planning.answer.search import steps, with_stores
from tiledseg.planning.answer.table import heading
from tiledseg.planning.answer.text import columns, figures_basis, wrapped
from tiledseg.planning.question import Question
from tiledseg.planning.run.parallelism import Parallelism
from tiledseg.planning.search.scaling import Point, quicker, strong, weak

_KEYS = ("scaling", "gpus", "images_per_step", "step_seconds", "epoch_seconds", "efficiency", "limit", "settings")
_HEAD = ("", "GPUs", "images a step", "step", "epoch", "efficiency", "limited by", "settings")
_STUDIES = (
    "strong: the step keeps its images, and the result; weak: its images grow with the GPUs, up to those of an epoch; "
    "both in the mode that is quickest on the first number"
)


def scaling_part(question: Question, images_per_step: int, numbers: tuple[int, ...]) -> dict[str, Any]:
    """Return seconds of a step and of an epoch; efficiency 1 at the first number."""
    run = with_stores(question.run(Parallelism(), numbers[0], question.grid, images_per_step))
    machine = question.machine
    same_step = strong(run, numbers, machine.ranks_per_host)
    studies = {"strong": same_step, "weak": weak(run, numbers, same_step[0].priced, question.images)}
    rows = [_row(question, name, point) for name, points in studies.items() for point in points if len(points) > 1]
    other = quicker(run, same_step[-1], machine.ranks_per_host)
    return {
        "size": list(question.size),
        "images": question.images,
        "machine": {"profile": machine.name, "measured": machine.measured},
        "points": rows,
        "quicker": other and {"gpus": numbers[-1], "settings": other.in_words, "step_seconds": round(other.seconds, 6)},
    }


def _row(question: Question, name: str, point: Point) -> dict[str, Any]:
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
    return "\n".join([title, columns([_HEAD, *rows]), *map(wrapped, remarks)])


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
