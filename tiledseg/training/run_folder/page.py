"""The page of a run, `report.html`, from the files that the run has left: it can be made again at any time."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiledseg.errors import OutputError, TiledsegError, first_line
from tiledseg.execution.progress import duration
from tiledseg.reporting.charts import Chart, Line, draw_chart
from tiledseg.reporting.embedded import drawing, photograph, read_picture
from tiledseg.reporting.page import Place, Report, can_render, count, percent, write_page
from tiledseg.reporting.panel import can_draw
from tiledseg.system.console import counted
from tiledseg.system.run_names import CONFIG, METRICS, STARTED, SUMMARY, VALIDATION
from tiledseg.training.run_folder.report import read_metrics
from tiledseg.training.run_folder.validations import read_validations

MOST_MOMENTS = 24
"""Validations whose pictures are on the page: all, or so many, evenly spread, the newest one among them."""
_TRAINING, _VALIDATION, _OTHER = "var(--accent)", "#d9822b", "var(--good)"
_STILL = ("image", "labels")


def page_of(folder: Path, told: Mapping[str, Any] | None = None) -> Report:
    """What the folder of a run has to show. `told`: what is known of a run that goes on, in the place of its summary,
    which is that of an earlier start. Raises OutputError where the metrics are damaged."""
    summary = told if told is not None else _of_last_start(folder)
    lines, validations = read_metrics(folder / METRICS), read_validations(folder)
    newest = validations[-1] if validations else None
    shown = _spread(
        [figures for figures in validations if _drawn_alike(folder, figures, validations[-1])], MOST_MOMENTS
    )
    return Report(
        title=folder.resolve().name,
        subtitle=summary.get("title", "").removeprefix(f"{folder.resolve().name}: "),
        state=_state(summary),
        facts=_facts(lines, newest, summary),
        warnings=summary.get("warnings", ()),
        figures=newest,
        charts=_charts(lines, validations, summary.get("loss", "")),
        places=_places(folder, shown),
        moments=[_moment(figures) for figures in shown],
        about=_about(summary),
        config=_text(folder / CONFIG),
    )


def write_report(folder: Path, path: Path, told: Mapping[str, Any] | None = None) -> bool:
    """Write the page of a run; False where jinja2 is not installed. `told`: see `page_of`. Raises OutputError and
    WriteError."""
    if not can_render():
        return False
    try:
        report = page_of(folder, told)
    except TiledsegError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, OSError) as error:
        raise OutputError(
            f"{folder / VALIDATION}, or {SUMMARY} beside it, holds what no run has written "
            f"({type(error).__name__}: {first_line(error)}); move it away, and make the page again: tiledseg report "
            f"--run {folder}"
        ) from error
    write_page(path, report)
    return True


def _of_last_start(folder: Path) -> Mapping[str, Any]:
    """Its summary; of one that was killed before it had any, what it knew from the start."""
    summary, started = _json(folder / SUMMARY), _json(folder / STARTED)
    if summary is None or (started is not None and started.get("begun") != summary.get("begun")):
        return started or {}
    return summary


def _json(path: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        return found if isinstance(found, dict) else None
    return None


def _text(path: Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        return path.read_text()
    return ""


def _spread(items: Sequence[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    if len(items) <= most:
        return list(items)
    return [items[round(k * (len(items) - 1) / (most - 1))] for k in range(most)]


def _drawn_alike(folder: Path, figures: Mapping[str, Any], newest: Mapping[str, Any]) -> bool:
    """Whether there is a panel of the places of the newest one: another start of the run may have had others."""
    keys = ("image", "rows", "cols", "stride")
    mine, theirs = ([[row[key] for key in keys] for row in each["panel"] or ()] for each in (figures, newest))
    return mine == theirs and _panel(folder, figures).exists()


def _panel(folder: Path, figures: Mapping[str, Any]) -> Path:
    return folder / VALIDATION / f"step-{figures['step']:06d}.png"


def _state(summary: Mapping[str, Any]) -> str:
    if "finished" not in summary:
        return "not finished"
    return "finished" if summary["finished"] else "stopped early"


def _facts(
    lines: Sequence[Mapping[str, Any]], newest: Mapping[str, Any] | None, summary: Mapping[str, Any]
) -> list[tuple[str, str, str]]:
    steps = [line for line in lines if "val" not in line]
    facts = []
    if newest is not None:
        error = newest["reliability"]["calibration_error"]
        facts += [
            ("mean IoU", percent(newest["mean_iou"]), f"validation at step {newest['step']}"),
            ("pixel accuracy", percent(newest["accuracy"]), f"of {count(newest['pixels'])} pixels"),
            ("calibration error", percent(error), "expected, 20 bins"),
        ]
    if steps:
        seconds = sum(line["seconds"] for line in steps)
        pixels = sum(line["pixels"] for line in steps)
        facts += [
            ("training loss", _number(steps[-1]["loss"]), f"step {steps[-1]['step']}, epoch {steps[-1]['epoch']}"),
            ("throughput", f"{pixels / seconds / 1e6:.2f} Mpx/s", f"{duration(seconds)} in steps"),
        ]
    if "seconds" in summary:
        facts.append(("wall time", duration(summary["seconds"]), f"{counted(summary['ranks'], 'rank')}, all starts"))
    return facts


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _charts(lines: Sequence[Mapping[str, Any]], validations: Sequence[Mapping[str, Any]], loss: str) -> list[Chart]:
    """`loss`: what the run was trained for, in words; "" where nobody knows any more."""
    steps = [line for line in lines if "val" not in line]
    checks = [(line["step"], line["val"]) for line in lines if "val" in line]

    def of_steps(key: str, factor: float = 1.0) -> list[tuple[float, float]]:
        return [(line["step"], line[key] * factor) for line in steps if line.get(key) is not None]

    def of_checks(key: str) -> list[tuple[float, float]]:
        return [(step, val[key]) for step, val in checks if val[key] is not None]

    drawn = [
        draw_chart(
            "Loss",
            f"training: {loss or 'of a step'}; validation: cross-entropy a pixel",
            [
                Line("training", of_steps("loss"), _TRAINING),
                Line("validation", of_checks("loss"), _VALIDATION, marks=True),
            ],
        ),
        draw_chart("IoU", "of the validation, each class", _iou_lines(of_checks("mean_iou"), validations), (0.0, 1.0)),
        draw_chart("Learning rate", "a step", [Line("rate", of_steps("lr"), _TRAINING)]),
        draw_chart(
            "Throughput",
            "million pixels a second, all ranks",
            [Line("training", of_steps("pixels_per_second", 1e-6), _OTHER)],
        ),
    ]
    return [chart for chart in drawn if chart is not None]


def _iou_lines(mean: list[tuple[float, float]], validations: Sequence[Mapping[str, Any]]) -> list[Line]:
    lines = [Line("mean", mean, "var(--ink)", marks=True)]
    for k, one in enumerate(validations[-1]["classes"] if validations else ()):
        points = [(figures["step"], figures["classes"][k]["iou"]) for figures in validations]
        known = [(step, iou) for step, iou in points if iou is not None]
        lines.append(Line(one["name"], known, one["colour"]))
    return lines


def _places(folder: Path, shown: Sequence[Mapping[str, Any]]) -> list[Place]:
    """The panels' rows, cut out of their files: image and labels once, the others of each validation."""
    if not shown or not can_draw():
        return []
    panels = [(figures["panel"], read_picture(_panel(folder, figures))) for figures in shown]
    places = []
    for number, row in enumerate(panels[-1][0]):
        cells = [(each[number]["cells"], picture) for each, picture in panels]
        still = {title: (photograph if title == "image" else drawing)(_cut(*cells[-1], title)) for title in _STILL}
        titles = [title for title in row["cells"] if title not in _STILL]
        changing = {title: [drawing(_cut(*cell, title)) for cell in cells] for title in titles}
        places.append(Place(Path(row["image"]).name, _where(row), still, changing))
    return places


def _cut(cells: Mapping[str, Sequence[int]], picture: NDArray[np.uint8], title: str) -> NDArray[np.uint8]:
    x, y, width, height = cells[title]
    return picture[y : y + height, x : x + width]


def _where(row: Mapping[str, Any]) -> str:
    if row["stride"] > 1:
        number = {2: "2nd", 3: "3rd"}.get(row["stride"], f"{row['stride']}th")
        return f"all of it, every {number} pixel"
    (top, bottom), (left, right) = row["rows"], row["cols"]
    return f"rows {top} to {bottom}, columns {left} to {right}"


def _moment(figures: Mapping[str, Any]) -> str:
    return f"step {figures['step']}, epoch {figures['epoch']}: mean IoU {percent(figures['mean_iou'])}"


def _spread_word(value: object) -> str:
    """A mesh as its axes."""
    return ", ".join(f"{key} {n}" for key, n in value.items()) if isinstance(value, dict) else str(value)


def _about(summary: Mapping[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """Tables of what was run, of what the summary knows."""
    run = [
        (name, str(summary[key]))
        for name, key in (
            ("command", "command"),
            ("begun", "begun"),
            ("steps", "steps"),
            ("epochs", "epochs"),
            ("parameters", "parameters"),
            ("halo", "halo"),
        )
        if key in summary
    ]
    parallel = [(key, _spread_word(value)) for key, value in (summary.get("parallel") or {}).items()]
    pipeline = [
        (f"pipeline {key}", str(value))
        for key, value in (summary.get("pipeline") or {}).items()
        if isinstance(value, (str, int, float))
    ]
    machine = [(name, str(value)) for name, value in (summary.get("machine") or {}).items()]
    versions = [(name, str(value)) for name, value in (summary.get("versions") or {}).items()]
    ranks = [(key, str(summary[key])) for key in ("ranks", "transport") if key in summary]
    tables = {"Run": run, "Spread": [*ranks, *parallel, *pipeline], "Machine": machine, "Versions": versions}
    return {title: rows for title, rows in tables.items() if rows}
