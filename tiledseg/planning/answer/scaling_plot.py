"""`plan --scaling --plot`: predicted time and efficiency against GPUs, strong and weak."""

from __future__ import annotations

from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator, PercentFormatter

from tiledseg.planning.answer.text import figures_basis
from tiledseg.system.writing import replacing

_STYLES = {"strong": ("#1f6fb4", "o"), "weak": ("#c23b5a", "s")}
_IDEAL: dict[str, Any] = {"color": "#888888", "linestyle": "--", "linewidth": 0.9, "zorder": 3}


def write_scaling_plot(path: str, part: dict[str, Any], title: str) -> None:
    """Write the figure as a PNG, whole or not at all. Raises WriteError where the disk does not take it."""
    figure = draw_scaling(part, title)
    with replacing(path) as unfinished:
        figure.savefig(unfinished, format="png", dpi=120)


def draw_scaling(part: dict[str, Any], title: str) -> Figure:
    """Draw the figure of `scaling_part`, without a display. `title`: what was run."""
    figure = Figure(figsize=(13, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    times, shares = figure.subplots(1, 2)
    for name in dict.fromkeys(point["scaling"] for point in part["points"]):
        points = [point for point in part["points"] if point["scaling"] == name]
        color, marker = _STYLES[name]
        gpus, seconds = [point["gpus"] for point in points], [point["step_seconds"] for point in points]
        images = f"{points[0]['images_per_step']:,} to {points[-1]['images_per_step']:,} images a step"
        times.plot(gpus, seconds, color=color, marker=marker, label=f"{name}: {images}")
        ideal = [seconds[0] * (gpus[0] / each if name == "strong" else 1) for each in gpus]
        times.plot(gpus, ideal, label="ideal" if name == "strong" else None, **_IDEAL)
        shares.plot(gpus, [point["efficiency"] for point in points], color=color, marker=marker, label=name)
    shares.axhline(1, label="ideal", **_IDEAL)
    shares.set_ylim(0, 1.1 * max(1, *(point["efficiency"] for point in part["points"])))
    shares.yaxis.set_major_formatter(PercentFormatter(1))
    shares.set(ylabel="efficiency (of the first number's, a GPU)", title="Efficiency")
    times.set_yscale("log")
    times.yaxis.set_minor_formatter(NullFormatter())
    times.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds:g}"))
    times.set(ylabel="a step (s)", title="Time of a step")
    numbers = sorted({point["gpus"] for point in part["points"]})
    for axes in (times, shares):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("GPUs")
        axes.xaxis.set_major_locator(FixedLocator(numbers))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda gpus, _: f"{gpus:,.0f}"))
        axes.tick_params(axis="x", rotation=45 if len(numbers) > 7 else 0)
        axes.grid(visible=True, which="both", axis="y", linewidth=0.3)
        axes.legend(loc="lower left", edgecolor="none", framealpha=0.9, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Predicted scaling: {title}\n{figures_basis(part['machine'])}", fontsize=11)
    return figure
