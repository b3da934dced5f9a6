"""`plan --scaling --plot`: predicted time and efficiency against GPUs, strong and weak, and what limits."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    LogLocator,
    MultipleLocator,
    NullFormatter,
    NullLocator,
    PercentFormatter,
)

from tiledseg.system.writing import replacing

_STYLES = {"strong": ("#1f6fb4", "o"), "weak": ("#c23b5a", "s")}
_IDEAL = "#888888"

Points = list[dict[str, Any]]


def write_scaling_plot(path: str, part: dict[str, Any], title: str) -> None:
    """Writes the figure as a PNG, whole or not at all. Raises WriteError where the disk does not take it."""
    figure = draw_scaling(part, title)
    with replacing(path) as unfinished:
        figure.savefig(unfinished, format="png", dpi=120)


def draw_scaling(part: dict[str, Any], title: str) -> Figure:
    """The figure of `scaling_part`; drawn without a display. `title`: what was run."""
    figure = Figure(figsize=(13, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    times, shares = figure.subplots(1, 2)
    limits = dict.fromkeys(point["limit"] for point in part["points"] if point["limit"])
    marks = {limit: str(number) for number, limit in enumerate(limits, 1)}
    for name in dict.fromkeys(point["scaling"] for point in part["points"]):
        points = [point for point in part["points"] if point["scaling"] == name]
        _draw_times(times, name, points)
        _draw_shares(shares, name, points, marks)
    for limit, mark in marks.items():
        shares.plot([], [], " ", label=f"{mark}: {limit}")
    shares.set_ylim(0, 1.1 * max(1, *(point["efficiency"] for point in part["points"])))
    _finish(times, shares, [point["gpus"] for point in part["points"]])
    machine = part["machine"]
    basis = "measured" if machine["measured"] else "by datasheets and assumed shares of them, not measured"
    figure.suptitle(f"Predicted scaling: {title}\n{machine['profile']}, {basis}", fontsize=11)
    return figure


def _draw_times(axes: Axes, name: str, points: Points) -> None:
    color, marker = _STYLES[name]
    gpus, seconds = [point["gpus"] for point in points], [point["step_seconds"] for point in points]
    label = f"{name}: {_images(points)} a step"
    axes.plot(gpus, seconds, color=color, marker=marker, label=label)
    ideal = [seconds[0] * (gpus[0] / each if name == "strong" else 1) for each in gpus]
    axes.plot(
        gpus, ideal, color=_IDEAL, linestyle="--", linewidth=0.9, zorder=3, label="ideal" if name == "strong" else None
    )


def _images(points: Points) -> str:
    first, last = points[0]["images_per_step"], points[-1]["images_per_step"]
    return f"{first:,} to {last:,} images" if first != last else f"{first:,} image{'s' * (first > 1)}"


def _draw_shares(axes: Axes, name: str, points: Points, marks: dict[str, str]) -> None:
    """What limits is marked by its number where it first does: of strong scaling below the curve, of weak above it."""
    color, marker = _STYLES[name]
    gpus, shares = [point["gpus"] for point in points], [point["efficiency"] for point in points]
    axes.plot(gpus, shares, color=color, marker=marker, label=name)
    place, before = (0, -14 if name == "strong" else 12), ""
    for point in points:
        if point["limit"] and point["limit"] != before:
            at = point["gpus"], point["efficiency"]
            axes.annotate(marks[point["limit"]], at, place, textcoords="offset points", color=color, ha="center",
                          va="center", weight="bold")  # fmt: skip
        before = point["limit"]


def _finish(times: Axes, shares: Axes, numbers: list[int]) -> None:
    shares.axhline(1, color=_IDEAL, linestyle="--", linewidth=0.9, zorder=3, label="ideal")
    shares.yaxis.set_major_locator(MultipleLocator(0.2))
    shares.yaxis.set_major_formatter(PercentFormatter(1))
    shares.set(ylabel="efficiency (of the first number's, a GPU)", title="Efficiency, and what limits from there on")
    times.set_yscale("log")
    times.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    times.yaxis.set_minor_formatter(NullFormatter())
    times.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds:g}"))
    times.set(ylabel="a step (s)", title="Time of a step")
    times.grid(visible=True, which="both", axis="y", linewidth=0.3)
    for axes in (times, shares):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("GPUs")
        axes.xaxis.set_major_locator(FixedLocator(sorted(set(numbers))))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda gpus, _: f"{gpus:,.0f}"))
        axes.tick_params(axis="x", rotation=45 if len(set(numbers)) > 7 else 0)
        axes.legend(loc="lower left", edgecolor="none", framealpha=0.9, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.14)
