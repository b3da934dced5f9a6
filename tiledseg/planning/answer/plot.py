"""The plan as a figure: the tiled raster with a context and its halo, and E against the grid."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from tiledseg.architecture.unet import UNet
from tiledseg.geometry.box import Box
from tiledseg.geometry.halo import paper_efficiency, paper_efficiency_linear, paper_halo, paper_shrink
from tiledseg.geometry.tiling import Tiling, context_sizes, finest_grid, tiling_efficiency
from tiledseg.planning.answer.text import heading
from tiledseg.planning.run.question import RunQuestion
from tiledseg.system.files import replacing

_INK, _CORE, _HALO, _OTHER = "#333333", "#1f6fb4", "#f2a541", "#c23b5a"


def efficiency_curves(question: RunQuestion, tiling: Tiling) -> dict[str, list[float]]:
    """Return the efficiency E for grids of 1 x 1, 2 x 2, ... tiles to well beyond the chosen grid, as far as the
    alignment allows: exactly, and for the paper's own U-Nets by its formula and its linear form."""
    footprint, network, (height, width) = tiling.footprint, question.network, question.shape
    last = min(*finest_grid(question.shape, footprint), max(12, 2 * max(tiling.grid)))
    grids = [(q, q) for q in range(1, last + 1)]
    computed = [[context_sizes(side, q, footprint)[1] for side in (height, width)] for q, _ in grids]
    curves = {"exact": [rows * cols / (height * width) for rows, cols in computed]}
    if isinstance(network, UNet):
        halo = paper_halo(network.levels, network.convs_per_level, paper_shrink(network.kernel))
        curves["paper"] = [paper_efficiency(question.shape, grid, halo) for grid in grids]
        curves["linear"] = [paper_efficiency_linear(question.shape, grid, halo) for grid in grids]
    return curves


def draw(path: str, question: RunQuestion, tiling: Tiling) -> Figure:
    """Draw the figure without a display, and write it as a PNG, whole or not at all. Raises WriteError."""
    figure = Figure(figsize=(13, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    raster, efficiency = figure.subplots(1, 2)
    _draw_raster(raster, tiling)
    _draw_efficiency(efficiency, question, tiling)
    first, *network = heading(question).split("\n")
    figure.suptitle(f"{first}\n{', '.join(network)}", fontsize=10)
    with replacing(path) as part:
        figure.savefig(part, format="png", dpi=120)
    return figure


def _draw_raster(axes: Axes, tiling: Tiling) -> None:
    """Draw all cores, and the context of a tile in the middle."""
    (height, width), (rows, cols) = tiling.raster, tiling.grid

    def add(box: Box, **style: Any) -> None:
        axes.add_patch(Rectangle((box.col.start, box.row.start), box.width, box.height, **style))

    for tile in tiling.tiles:
        add(tile.core, facecolor="#eef2f5", edgecolor="#9aa7b0", linewidth=min(0.6, 20 / max(tiling.grid)))
    add(Box.of_shape(tiling.raster), facecolor="none", edgecolor=_INK, linewidth=1.4)
    tile = tiling.tiles[(rows // 2) * cols + cols // 2]
    add(tile.context, facecolor=_HALO, edgecolor=_INK, label="halo")
    add(tile.core, facecolor=_CORE, label="core")
    reach = min(tile.context.row.start, tile.context.col.start)
    margin, halo = max(0.02 * max(height, width), -reach * 1.1), max(tiling.footprint.before, tiling.footprint.after)
    axes.set(xlim=(-margin, width + margin), ylim=(height + margin, -margin), aspect="equal")
    axes.set(xlabel="column (px)", ylabel="row (px)", title=f"{rows} x {cols} tiles, halo {halo} px")
    axes.legend(loc="upper left")


def _draw_efficiency(axes: Axes, question: RunQuestion, tiling: Tiling) -> None:
    curves = efficiency_curves(question, tiling)
    q = range(1, len(curves["exact"]) + 1)
    if "paper" in curves:
        axes.plot(q, curves["paper"], color=_OTHER, label=r"paper: $(T/T')^2$")
        axes.plot(q, curves["linear"], color=_OTHER, linestyle="--", label=r"paper, linear: $1 + 4q\varepsilon/N$")
    axes.plot(q, curves["exact"], color=_CORE, marker="o", markersize=3, label="exact, over the whole raster")
    (rows, cols), chosen = tiling.grid, tiling_efficiency(tiling)
    label = f"chosen: {rows} x {cols} tiles, E = {chosen:.4f}"
    axes.plot([(rows * cols) ** 0.5], [chosen], "o", color=_INK, markersize=10, fillstyle="none", label=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="q (tiles along a side of a q x q grid)", ylabel="E (pixels computed / pixels owned; ideally 1)")
    axes.set(xlim=(0, None), title="Efficiency against the grid")
    axes.legend(loc="upper left")
