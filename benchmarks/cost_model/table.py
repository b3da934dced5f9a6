"""Predicted against measured: of each run, and what all of them together show."""

from __future__ import annotations

import base64
import json
import pickle
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.cost_model.cases import cases
from benchmarks.spread import markdown
from tiledseg.geometry.tiling import Tiling
from tiledseg.planning.cost_model.layer_work import CONVOLUTIONS
from tiledseg.planning.cost_model.machine import Machine
from tiledseg.planning.run.plan import plan_run
from tiledseg.planning.run.question import RunQuestion


@dataclass(frozen=True)
class Row:
    """A run: seconds of a step as measured, each time anew, and as predicted."""

    case: str
    group: str
    ranks: int
    measured: tuple[float, ...]
    predicted: float

    @property
    def quickest(self) -> float:
        return min(self.measured)

    @property
    def error(self) -> float:
        return self.predicted / self.quickest - 1

    @property
    def noise(self) -> float:
        """How much the slowest of the measurements is above the quickest."""
        return max(self.measured) / self.quickest - 1


def read(folders: Sequence[Path], machine: Machine) -> list[Row]:
    """One a run, measured once in each folder, by the clock: its quickest step there, as what disturbs a machine makes
    it slower."""
    groups = {case.name: case.group for case in cases()}
    found: dict[str, tuple[dict[str, Any], list[float]]] = {}
    for folder in folders:
        for path in sorted(folder.glob("ranks-*.jsonl")):
            for line in map(json.loads, path.read_text().splitlines()):
                held = found.setdefault(line["case"], (line, []))
                held[1].append(min(line["clock"][1:]))  # the first step touches memory for the first time
    return [
        Row(name, groups[name], line["ranks"], tuple(values), predicted(line, machine))
        for name, (line, values) in found.items()
    ]


def predicted(line: dict[str, Any], machine: Machine) -> float:
    question: RunQuestion = pickle.loads(base64.b64decode(line["question"]))
    plan = plan_run(replace(question, machine=machine))
    assert plan.seconds is not None, "the machine has a profile"
    return plan.seconds


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's, of values without ties: 1 - 6 sum d^2 / (n (n^2 - 1))."""
    places = [{value: place for place, value in enumerate(sorted(values))} for values in (one, other)]
    squares = sum((places[0][a] - places[1][b]) ** 2 for a, b in zip(one, other, strict=True))
    return 1 - 6 * squares / (len(one) * (len(one) ** 2 - 1))


def chosen_over_best(rows: Iterable[Row]) -> dict[str, float]:
    """Of each group of two runs or more: how much longer the one takes that is predicted to be the quickest."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    return {
        name: min(own, key=lambda row: row.predicted).quickest / min(row.quickest for row in own)
        for name, own in groups.items()
        if len(own) > 1
    }


def report(rows: Sequence[Row]) -> str:
    """Tables in markdown."""
    errors = sorted(abs(row.error) for row in rows)
    within = sum(error <= 0.1 for error in errors) / len(errors)
    ratios = chosen_over_best(rows)
    repeated = [row.noise for row in rows if len(row.measured) > 1]
    figures = [
        ("runs", len(rows)),
        ("median error", f"{statistics.median(errors):.1%}"),
        ("worst error", f"{errors[-1]:.1%}"),
        ("within 10 %", f"{within:.0%}"),
        ("rank correlation", f"{rank_correlation([r.predicted for r in rows], [r.quickest for r in rows]):.3f}"),
        ("chosen over best, median and worst", f"{statistics.median(ratios.values()):.3f}, {max(ratios.values()):.3f}"),
    ]
    if repeated:
        figures.append(("noise, median and worst", f"{statistics.median(repeated):.1%}, {max(repeated):.1%}"))
    lines = [
        (row.case, row.ranks, f"{row.quickest:.3f}", f"{row.predicted:.3f}", f"{100 * row.error:+.0f} %")
        for row in rows
    ]
    choice = [(name, f"{ratio:.3f}") for name, ratio in ratios.items()]
    return "\n\n".join(
        (
            markdown(("figure", "value"), figures),
            markdown(("group", "chosen / best"), choice),
            markdown(("run", "ranks", "measured, s", "predicted, s", "error"), lines),
        )
    )


KERNEL_BYTES = 69 * 1024
"""That oneDNN's code for one shape of one convolution takes, in one direction: measured of U-Nets of 3 and 4 levels, by
what a process holds more after a step on a context of another size (`python -m benchmarks.cost_model.kernels`)."""

DIRECTIONS = 3  # forward, and backward to inputs and to weights


def kernel_bytes(question: RunQuestion, tilings: Sequence[Tiling]) -> int:
    """Of the kernels of a run on one rank, for each size of context; float64 goes without oneDNN."""
    if question.precision == "fp64":
        return 0
    convolutions = sum(layer.speed in CONVOLUTIONS for layer in question.graph.layers)
    sizes = {tile.context.shape for tiling in tilings for tile in tiling.tiles}
    return KERNEL_BYTES * DIRECTIONS * convolutions * len(sizes)


def memory_report(path: Path, base: int) -> str:
    """Planned bytes against those allocated, and with the `base` of the runtime and the code of kernels against those
    that were resident."""
    rows = []
    for line in map(json.loads, path.read_text().splitlines()):
        question: RunQuestion = pickle.loads(base64.b64decode(line["question"]))
        plan = plan_run(question)
        rows.append(
            (line["case"], plan.memory, line["allocated"], kernel_bytes(question, plan.tilings), line["resident"])
        )
    errors = [
        [planned / allocated - 1, (planned + base + code) / there - 1] for _, planned, allocated, code, there in rows
    ]
    figures = [
        (name, f"{statistics.median(map(abs, each)):.1%}", f"{max(map(abs, each)):.1%}")
        for name, each in zip(("allocated", "resident"), zip(*errors, strict=True), strict=True)
    ]
    lines = [
        (
            case,
            *(f"{size / 2**20:.1f}" for size in (planned, allocated, code, planned + base + code, there)),
            *(f"{e:+.1%}" for e in error),
        )
        for (case, planned, allocated, code, there), error in zip(rows, errors, strict=True)
    ]
    head = ("run", "planned, MiB", "allocated", "kernels", "planned + base + kernels", "resident", "error", "error")
    return markdown(("memory", "median error", "worst"), figures) + "\n\n" + markdown(head, lines)
