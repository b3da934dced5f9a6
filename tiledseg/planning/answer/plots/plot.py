"""The plan as a figure: the tiled raster with a context and its halo, E against the grid, and a pipeline's step."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, FigureBase
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from tiledseg.architecture.unet import UNet
from tiledseg.geometry.box import Box
from tiledseg.geometry.halo import paper_efficiency, paper_efficiency_linear, paper_halo, paper_shrink
from tiledseg.geometry.tiling import Tile, Tiling, context_sizes, finest_grid, tiling_efficiency
from tiledseg.planning.answer.plots.schedule_plot import draw_schedule
from tiledseg.planning.answer.table import heading
from tiledseg.planning.question import Question
from tiledseg.planning.stages.staged_pipeline import StagedPipeline
from tiledseg.system.writing import replacing

_INK, _CORE, _HALO, _OTHER = "#333333", "#1f6fb4", "#f2a541", "#c23b5a"


@dataclass(frozen=True)
class EfficiencyCurve:
    """E for grids of q x q tiles: by the paper's formula, its linear form, and exactly."""

    q: tuple[int, ...]
    paper: tuple[float, ...]
    linear: tuple[float, ...]
    exact: tuple[float, ...]


def efficiency_curve(question: Question, tiling: Tiling) -> EfficiencyCurve:
    """The curve from one tile to well beyond the chosen grid, as far as the alignment allows; of networks other than
    the paper's U-Nets its formula says nothing."""
    footprint, (height, width) = tiling.footprint, question.size
    last = min(*finest_grid(question.size, footprint), max(12, 2 * max(tiling.grid)))
    network, q = question.network, tuple(range(1, last + 1))
    halo, of_paper = 0.0, q[:0]
    if isinstance(network, UNet):
        halo, of_paper = paper_halo(network.levels, network.convs_per_level, paper_shrink(network.kernel)), q
    return EfficiencyCurve(
        q=q,
        paper=tuple(paper_efficiency(question.size, (n, n), halo) for n in of_paper),
        linear=tuple(paper_efficiency_linear(question.size, (n, n), halo) for n in of_paper),
        exact=tuple(
            sum(context_sizes(height, n, footprint)) * sum(context_sizes(width, n, footprint)) / (height * width)
            for n in q
        ),
    )


def write_plot(path: str, question: Question, tiling: Tiling, staged: StagedPipeline | None = None) -> None:
    """Writes the figure as a PNG, whole or not at all. Raises WriteError where the disk does not take it."""
    figure = draw(question, tiling, staged)
    with replacing(path) as part:
        figure.savefig(part, format="png", dpi=120)


def draw(question: Question, tiling: Tiling, staged: StagedPipeline | None = None) -> Figure:
    """The figure; drawn without a display."""
    below = 0.0 if staged is None else 1.6 + 0.35 * staged.case.stages  # inches
    figure = Figure(figsize=(13, 6.4 + below), layout="constrained")
    FigureCanvasAgg(figure)
    tiles: FigureBase = figure
    if staged is not None:
        tiles, steps = figure.subfigures(2, 1, height_ratios=(6.4, below), squeeze=False)[:, 0]
        draw_schedule(steps.subplots(), staged)
    raster, efficiency = tiles.subplots(1, 2)
    _draw_raster(raster, question, tiling)
    _draw_efficiency(efficiency, question, tiling)
    tiles.legend(*raster.get_legend_handles_labels(), loc="outside lower left", ncols=3, frameon=False)
    first, *network = heading(question).split("\n")
    figure.suptitle(f"{first}\n{', '.join(network)}", fontsize=10)
    return figure


def _draw_raster(axes: Axes, question: Question, tiling: Tiling) -> None:
    height, width = tiling.raster
    everything = Box.of_shape(tiling.raster)
    for tile in tiling.tiles:
        axes.add_patch(
            _patch(tile.core, facecolor="#eef2f5", edgecolor="#9aa7b0", linewidth=min(0.6, 20 / max(tiling.grid)))
        )
    axes.add_patch(_patch(everything, facecolor="none", edgecolor=_INK, linewidth=1.4))
    chosen = _shown(tiling)
    for tile in chosen:
        label = tile is chosen[0]
        axes.add_patch(_patch(tile.context, facecolor=_HALO, alpha=0.6, linewidth=0, label="halo" if label else None))
        axes.add_patch(_patch(tile.core, facecolor=_CORE, alpha=0.9, linewidth=0, label="core" if label else None))
        axes.add_patch(
            _patch(tile.context, facecolor="none", edgecolor=_INK, linewidth=1.1, label="context" if label else None)
        )
    reach = [b for t in chosen for b in (t.context.row.start, t.context.col.start)]
    margin = max(0.02 * max(height, width), -min(reach) * 1.1)
    axes.set(xlim=(-margin, width + margin), ylim=(height + margin, -margin), aspect="equal")
    axes.set(xlabel="column (px)", ylabel="row (px)")
    rows, cols = tiling.grid
    core, context = tiling.core_max, tiling.context_max
    halo = max(tiling.footprint.before, tiling.footprint.after)
    border = "mirrored" if tiling.footprint.mirror else "clipped"
    axes.set_title(
        f"{rows} x {cols} tiles, halo {halo} px, {border} at the border\nlargest core {core[0]} x {core[1]}, "
        f"largest context {context[0]} x {context[1]} px",
        fontsize=10,
    )


def _shown(tiling: Tiling) -> list[Tile]:
    """A tile in the middle, and one at the corner, where contexts are clipped or mirrored."""
    rows, cols = tiling.grid
    middle = tiling.tiles[(rows // 2) * cols + cols // 2]
    return [middle] if len(tiling) < 9 else [middle, tiling.tiles[0]]


def _patch(box: Box, **style: object) -> Rectangle:
    return Rectangle((box.col.start, box.row.start), box.width, box.height, **style)  # type: ignore[arg-type]


def _draw_efficiency(axes: Axes, question: Question, tiling: Tiling) -> None:
    curve = efficiency_curve(question, tiling)
    if curve.paper:
        axes.plot(curve.q, curve.paper, color=_OTHER, label=r"paper: $(T/T')^2$")
        axes.plot(curve.q, curve.linear, color=_OTHER, linestyle="--", label=r"paper, linear: $1 + 4q\varepsilon/N$")
    axes.plot(curve.q, curve.exact, color=_CORE, marker="o", markersize=3, label="exact, over the whole raster")
    rows, cols = tiling.grid
    x, chosen = (rows * cols) ** 0.5, tiling_efficiency(tiling)
    where = "" if rows == cols else rf", drawn at $\sqrt{{{rows} \times {cols}}}$"
    axes.axvline(x, color="#bbbbbb", linewidth=0.8, zorder=0)
    axes.plot([x], [chosen], marker="o", markersize=10, markerfacecolor="none", markeredgecolor=_INK, linestyle="none",
              label=f"chosen: {rows} x {cols} tiles, E = {chosen:.4f}{where}")  # fmt: skip
    axes.axhline(1, color="#bbbbbb", linewidth=0.8, zorder=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="q (tiles along a side of a q x q grid)", ylabel="E (pixels computed / pixels owned; ideally 1)")
    axes.set_xlim(left=0)
    axes.set_title("Efficiency against the grid", fontsize=10)
    axes.legend(loc="upper left", edgecolor="none", framealpha=1)
    axes.spines[["top", "right"]].set_visible(False)
