"""Learning curves and reliability diagrams, drawn by matplotlib (an extra)."""

from __future__ import annotations

import importlib.util
import io
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Lines = Sequence[Mapping[str, Any]]
_MOST_DIAGRAMS = 12  # all classes together, and those that most pixels are mapped as
_MOST_NAMES = 24  # in a legend
_COUNTS = "pixels", "right", "confidence"


def can_plot() -> bool:
    """Return True if matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_curves(lines: Lines, validations: Lines, loss: str, title: str) -> Figure:
    """Draw losses, IoU, learning rate and throughput over the steps.

    `lines`: of `metrics.jsonl`; `validations`: figures of `validation/step-XXXXXX.json`; `loss`: the training loss in
    words.
    """
    from matplotlib.figure import Figure

    steps = [line for line in lines if "val" not in line]
    checks = [{"step": line["step"], **line["val"]} for line in lines if "val" in line]
    figure = Figure(figsize=(10, 7), layout="constrained")
    figure.suptitle(_plain(title))
    (losses, ious), (rates, pace) = figure.subplots(2, 2, sharex=True)
    losses.plot(*_points(steps, "loss"), linewidth=1, label=_plain(f"training: {loss or 'of a step'}"))
    losses.plot(*_points(checks, "loss"), "o-", markersize=3, label="validation: cross-entropy a pixel")
    losses.set(title="Loss")
    losses.legend(fontsize="small")
    ious.plot(*_points(checks, "mean_iou"), "o-", color="black", markersize=3, label="mean")
    for k, one in enumerate(validations[-1]["classes"] if validations else ()):
        points = [{"step": each["step"], "iou": each["classes"][k]["iou"]} for each in validations]
        ious.plot(*_points(points, "iou"), color=one["colour"], label=_plain(one["name"]) if k < _MOST_NAMES else None)
    ious.set(title="IoU of the validation, each class", ylim=(0, 1))
    ious.legend(fontsize="small", ncols=2)
    rates.plot(*_points(steps, "lr"), color="C3", linewidth=1)
    rates.set(title="Learning rate", xlabel="optimizer step")
    pace.plot(*_points(steps, "pixels_per_second", 1e-6), color="C2", linewidth=1)
    pace.set(title="Throughput [million pixels a second, all ranks]", xlabel="optimizer step")
    for axes in (losses, ious, rates, pace):
        axes.grid(alpha=0.3)
    return figure


def _points(lines: Iterable[Mapping[str, Any]], key: str, factor: float = 1.0) -> tuple[list[int], list[float]]:
    """Return steps and values of the lines that have a value."""
    known = [line for line in lines if line.get(key) is not None]
    return [line["step"] for line in known], [line[key] * factor for line in known]


def _plain(text: str) -> str:
    """Return a label for matplotlib: no dollar starts a formula, no first underscore hides it from the legend."""
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def diagrams_of(figures: Mapping[str, Any]) -> list[tuple[str, list[tuple[float, float, float, float]], float]]:
    """Return a reliability diagram of all classes together, then of each class that a pixel is mapped as.

    A diagram is its name, its bins (middle, share right, mean confidence, pixels), and its expected calibration error.
    """
    counts = figures["reliability"]
    classes = [list(zip(*of_class, strict=True)) for of_class in zip(*map(counts.get, _COUNTS), strict=True)]
    together = [tuple(map(sum, zip(*of_bin, strict=True))) for of_bin in zip(*classes, strict=True)]
    diagrams = []
    names = ["all classes", *(one["name"] for one in figures["classes"])]
    for name, bins in zip(names, [together, *classes], strict=True):
        shown = [
            ((k + 0.5) / len(bins), right / pixels, confidence / pixels, pixels)
            for k, (pixels, right, confidence) in enumerate(bins)
            if pixels
        ]
        total = sum(each[3] for each in shown)
        if total:
            diagrams.append((name, shown, sum(abs(right - mean) * n for _, right, mean, n in shown) / total))
    return diagrams


def draw_reliability(figures: Mapping[str, Any]) -> Figure:
    """Draw the share of right pixels against confidence, for all classes and the most frequent ones."""
    from matplotlib.figure import Figure

    together, *classes = diagrams_of(figures) or [("all classes", [], 0.0)]
    classes.sort(key=lambda diagram: -sum(each[3] for each in diagram[1]))
    shown = [together, *classes[: _MOST_DIAGRAMS - 1]]
    rows = -(-len(shown) // 4)
    figure = Figure(figsize=(10, 2.6 * rows), layout="constrained")
    grid = figure.subplots(rows, 4, sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat[len(shown) :]:
        axes.set_axis_off()
    for axes, (name, diagram, error) in zip(grid.flat, shown, strict=False):
        middles, right, _, pixels = zip(*diagram, strict=True) if diagram else ((), (), (), ())
        axes.bar(middles, right, 0.9 / figures["reliability"]["bins"], color="C0")
        axes.plot(middles, [n / sum(pixels) for n in pixels], color="0.4", drawstyle="steps-mid")
        axes.plot((0, 1), (0, 1), "--", color="black", linewidth=1)
        axes.set_title(_plain(f"{name[:24]}: error {100 * error:.1f} %"), fontsize="small")
        axes.set(xlim=(0, 1), ylim=(0, 1))
    return figure


def png_of(figure: Figure) -> bytes:
    """Return a figure as PNG; letters that the font lacks are boxes."""
    data = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        figure.savefig(data, format="png", dpi=110)
    return data.getvalue()
