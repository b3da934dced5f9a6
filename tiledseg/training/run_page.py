"""The page of a run, `report.html`, made from the files in its folder."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tiledseg.errors import OutputError, TiledsegError, first_line, require
from tiledseg.execution.progress import duration
from tiledseg.reporting.page import count, draw_curves, draw_reliability, percent, png_of, png_url, render
from tiledseg.system.console import counted
from tiledseg.system.files import write_whole
from tiledseg.system.outputs import CONFIG, METRICS, STARTED, SUMMARY, VALIDATION
from tiledseg.training.run_files import read_json, read_metrics, read_validations

Facts = Mapping[str, Any]
MOST_MOMENTS = 24
"""Most validations with pictures on the page: evenly spread, with the first and the newest."""


def write_report(folder: Path, path: Path) -> None:
    """Write the page of a run. Raises ConfigError without jinja2 or matplotlib, OutputError and WriteError."""
    require("the page", "report", "jinja2", "matplotlib")
    try:
        text = render(page_of(folder))
    except TiledsegError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, OSError) as error:
        raise OutputError(
            f"{folder / VALIDATION}, or {SUMMARY} beside it, was not written by a run "
            f"({type(error).__name__}: {first_line(error)}); move it away, and make the page again: tiledseg report "
            f"--run {folder}"
        ) from error
    write_whole(path, text)


def page_of(folder: Path) -> dict[str, Any]:
    """Return the values of the page's template. Raises OutputError if the metrics are damaged."""
    summary, begun = read_json(folder / SUMMARY), read_json(folder / STARTED)
    if not summary or (begun and begun.get("begun") != summary.get("begun")):
        summary = begun  # the last start is running, or was killed before it wrote a summary
    config = ""
    with contextlib.suppress(OSError, ValueError):
        config = (folder / CONFIG).read_text()
    run = {key: summary[key] for key in ("command", "begun", "steps", "epochs", "parameters", "halo") if key in summary}
    spread = {key: summary[key] for key in ("ranks", "transport") if key in summary} | (summary.get("parallel") or {})
    pipeline = (summary.get("pipeline") or {}).items()
    spread |= {f"pipeline {key}": value for key, value in pipeline if isinstance(value, (str, int, float))}
    spread = {  # a mesh as its axes
        key: ", ".join(f"{axis} {n}" for axis, n in value.items()) if isinstance(value, dict) else value
        for key, value in spread.items()
    }
    about = {"Run": run, "Spread": spread, "Machine": summary.get("machine"), "Versions": summary.get("versions")}
    lines, validations = read_metrics(folder / METRICS), read_validations(folder)
    newest = validations[-1] if validations else None
    name, loss = folder.resolve().name, summary.get("loss", "")
    state = {True: "finished", False: "stopped early", None: "not finished"}[summary.get("finished")]
    return {
        "title": name,
        "subtitle": summary.get("title", "").removeprefix(f"{name}: "),
        "state": state,
        "verdict": verdict(lines, newest),
        "facts": _facts(lines, newest, summary),
        "warnings": summary.get("warnings", ()),
        "figures": newest,
        "curves": png_url(png_of(draw_curves(lines, validations, loss, ""))) if lines else None,
        "reliability": png_url(png_of(draw_reliability(newest["reliability"]))) if newest else None,
        "places": [_place(row) for row in (newest and newest["panel"]) or ()],
        "moments": _moments(folder, validations),
        "about": {title: [(k, str(value)) for k, value in table.items()] for title, table in about.items() if table},
        "config": config,
    }


def verdict(lines: Sequence[Mapping[str, Any]], newest: Mapping[str, Any] | None) -> str:
    """Return a sentence on the newest validation: mean IoU, best and weakest class, and the tiles seen in training."""
    seen = f"{counted(sum(line.get('tiles', 0) for line in lines), 'tile')} seen in training"
    scored = [each for each in (newest["classes"] if newest else ()) if each["iou"] is not None]
    if newest is None or not scored:
        return f"No validation; {seen}."
    best, weakest = (choose(scored, key=lambda each: each["iou"]) for choose in (max, min))
    words = f"Mean IoU {percent(newest['mean_iou'])}; best class {best['name']} ({percent(best['iou'])})"
    if weakest is not best:
        words += f", weakest {weakest['name']} ({percent(weakest['iou'])})"
    return f"{words}; {seen}."


def _facts(lines: Sequence[Facts], newest: Facts | None, summary: Facts) -> list[tuple[str, str, str]]:
    """Return the large figures at the top: name, value, note."""
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
        seconds, pixels = (sum(line[key] for line in steps) for key in ("seconds", "pixels"))
        loss, where = steps[-1]["loss"], f"step {steps[-1]['step']}, epoch {steps[-1]['epoch']}"
        facts.append(("training loss", "-" if loss is None else f"{loss:.4f}", where))
        facts.append(("throughput", f"{pixels / seconds / 1e6:.2f} Mpx/s", f"{duration(seconds)} in steps"))
    if "seconds" in summary:
        facts.append(("wall time", duration(summary["seconds"]), f"{counted(summary['ranks'], 'rank')}, all starts"))
    return facts


def _moments(folder: Path, validations: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return caption and panel (a data URL) of each validation whose panel shows the same places as the newest."""
    moments = []
    for figures in validations:
        panel = folder / VALIDATION / f"step-{figures['step']:06d}.png"
        if figures["panel"] and _places(figures) == _places(validations[-1]) and panel.exists():
            caption = f"step {figures['step']}, epoch {figures['epoch']}: mean IoU {percent(figures['mean_iou'])}"
            moments.append((caption, panel))
    if len(moments) > MOST_MOMENTS:
        moments = [moments[round(k * (len(moments) - 1) / (MOST_MOMENTS - 1))] for k in range(MOST_MOMENTS)]
    return [{"words": caption, "picture": png_url(panel.read_bytes())} for caption, panel in moments]


def _places(figures: Mapping[str, Any]) -> list[list[Any]]:
    return [[row[key] for key in ("image", "rows", "cols", "stride")] for row in figures["panel"] or ()]


def _place(row: Mapping[str, Any]) -> str:
    """Return the caption of a row of the panel."""
    name, (top, bottom), (left, right) = Path(row["image"]).name, row["rows"], row["cols"]
    if row["stride"] > 1:
        return f"{name}: all of it, one pixel of {row['stride']} a side"
    return f"{name}: rows {top} to {bottom}, columns {left} to {right}"
