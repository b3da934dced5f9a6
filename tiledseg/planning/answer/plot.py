"""The plan as a figure: the tiled raster with a context and its halo, and E against the grid; or predicted time and
efficiency against GPUs."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, NullLocator, PercentFormatter

from tiledseg.architecture.unet import UNet
from tiledseg.geometry.box import Box
from tiledseg.geometry.halo import paper_efficiency, paper_efficiency_linear, paper_halo, paper_shrink
from tiledseg.geometry.tiling import Tiling, context_sizes, finest_grid, tiling_efficiency
from tiledseg.planning.answer.table import heading
from tiledseg.planning.answer.text import figures_basis
from tiledseg.planning.run.question import RunQuestion
from tiledseg.system.files import replacing

_INK, _CORE, _HALO, _OTHER = "#333333", "#1f6fb4", "#f2a541", "#c23b5a"
_STYLES = {"strong": (_CORE, "o"), "weak": (_OTHER, "s")}
_IDEAL: dict[str, Any] = {"color": "#888888", "linestyle": "--", "linewidth": 0.9, "zorder": 3}


def efficiency_curves(question: RunQuestion, tiling: Tiling) -> dict[str, list[float]]:
    """Return the efficiency E for grids of 1 x 1, 2 x 2, ... tiles to well beyond the chosen grid, as far as the
    alignment allows: exactly, and for the paper's own U-Nets by its formula and its linear form."""
    footprint, network, (height, width) = tiling.footprint, question.network, question.shape
    last = min(*finest_grid(question.shape, footprint), max(12, 2 * max(tiling.grid)))
    grids = [(q, q) for q in range(1, last + 1)]
    computed = [[sum(context_sizes(side, q, footprint)) for side in (height, width)] for q, _ in grids]
    curves = {"exact": [rows * cols / (height * width) for rows, cols in computed]}
    if isinstance(network, UNet):
        halo = paper_halo(network.levels, network.convs_per_level, paper_shrink(network.kernel))
        curves["paper"] = [paper_efficiency(question.shape, grid, halo) for grid in grids]
        curves["linear"] = [paper_efficiency_linear(question.shape, grid, halo) for grid in grids]
    return curves


def write(path: str, figure: Figure) -> None:
    """Write a figure as a PNG, whole or not at all. Raises WriteError where the disk does not take it."""
    with replacing(path) as part:
        figure.savefig(part, format="png", dpi=120)


def draw(question: RunQuestion, tiling: Tiling) -> Figure:
    """Draw the figure, without a display."""
    figure = Figure(figsize=(13, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    raster, efficiency = figure.subplots(1, 2)
    _draw_raster(raster, tiling)
    _draw_efficiency(efficiency, question, tiling)
    figure.legend(*raster.get_legend_handles_labels(), loc="outside lower left", ncols=3, frameon=False)
    first, *network = heading(question).split("\n")
    figure.suptitle(f"{first}\n{', '.join(network)}", fontsize=10)
    return figure


def _draw_raster(axes: Axes, tiling: Tiling) -> None:
    """Draw all cores, and a tile in the middle and one at the corner, where contexts are clipped or mirrored."""
    (height, width), (rows, cols) = tiling.raster, tiling.grid
    for tile in tiling.tiles:
        _add(axes, tile.core, facecolor="#eef2f5", edgecolor="#9aa7b0", linewidth=min(0.6, 20 / max(tiling.grid)))
    _add(axes, Box.of_shape(tiling.raster), facecolor="none", edgecolor=_INK, linewidth=1.4)
    shown = [tiling.tiles[(rows // 2) * cols + cols // 2], *tiling.tiles[: int(len(tiling) >= 9)]]
    for place, tile in enumerate(shown):
        halo, core, context = (None, None, None) if place else ("halo", "core", "context")
        _add(axes, tile.context, facecolor=_HALO, alpha=0.6, linewidth=0, label=halo)
        _add(axes, tile.core, facecolor=_CORE, alpha=0.9, linewidth=0, label=core)
        _add(axes, tile.context, facecolor="none", edgecolor=_INK, linewidth=1.1, label=context)
    reach = min(b for t in shown for b in (t.context.row.start, t.context.col.start))
    margin = max(0.02 * max(height, width), -reach * 1.1)
    axes.set(xlim=(-margin, width + margin), ylim=(height + margin, -margin), aspect="equal")
    axes.set(xlabel="column (px)", ylabel="row (px)")
    core_max, context_max, footprint = tiling.core_max, tiling.context_max, tiling.footprint
    border = "mirrored" if footprint.mirror else "clipped"
    axes.set_title(
        f"{rows} x {cols} tiles, halo {max(footprint.before, footprint.after)} px, {border} at the border\n"
        f"largest core {core_max[0]} x {core_max[1]}, largest context {context_max[0]} x {context_max[1]} px",
        fontsize=10,
    )


def _add(axes: Axes, box: Box, **style: object) -> None:
    axes.add_patch(Rectangle((box.col.start, box.row.start), box.width, box.height, **style))  # type: ignore[arg-type]


def _draw_efficiency(axes: Axes, question: RunQuestion, tiling: Tiling) -> None:
    curves = efficiency_curves(question, tiling)
    q = range(1, len(curves["exact"]) + 1)
    if "paper" in curves:
        axes.plot(q, curves["paper"], color=_OTHER, label=r"paper: $(T/T')^2$")
        axes.plot(q, curves["linear"], color=_OTHER, linestyle="--", label=r"paper, linear: $1 + 4q\varepsilon/N$")
    axes.plot(q, curves["exact"], color=_CORE, marker="o", markersize=3, label="exact, over the whole raster")
    rows, cols = tiling.grid
    x, chosen = (rows * cols) ** 0.5, tiling_efficiency(tiling)
    where = "" if rows == cols else rf", drawn at $\sqrt{{{rows} \times {cols}}}$"
    axes.axvline(x, color="#bbbbbb", linewidth=0.8, zorder=0)
    ring = {"marker": "o", "markersize": 10, "markerfacecolor": "none", "markeredgecolor": _INK, "linestyle": "none"}
    axes.plot([x], [chosen], label=f"chosen: {rows} x {cols} tiles, E = {chosen:.4f}{where}", **ring)  # type: ignore[arg-type]
    axes.axhline(1, color="#bbbbbb", linewidth=0.8, zorder=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="q (tiles along a side of a q x q grid)", ylabel="E (pixels computed / pixels owned; ideally 1)")
    axes.set_xlim(left=0)
    axes.set_title("Efficiency against the grid", fontsize=10)
    axes.legend(loc="upper left", edgecolor="none", framealpha=1)
    axes.spines[["top", "right"]].set_visible(False)


def draw_scaling(part: dict[str, Any], title: str) -> Figure:
    """Draw the figure of `scaling_part`, without a display."""
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
    times.set(ylabel="a step (s)", title="Time of a step", yscale="log")
    times.yaxis.set_major_formatter("{x:g}")
    times.yaxis.set_minor_formatter("{x:g}")
    numbers = sorted({point["gpus"] for point in part["points"]})
    for axes in (times, shares):
        axes.set(xscale="log", xlabel="GPUs")
        axes.set_xticks(numbers, [f"{number:,}" for number in numbers], rotation=45 if len(numbers) > 7 else 0)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(visible=True, which="both", axis="y", linewidth=0.3)
        axes.legend(loc="lower left", edgecolor="none", framealpha=0.9, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Predicted scaling: {title}\n{figures_basis(part['machine'])}", fontsize=11)
    return figure
