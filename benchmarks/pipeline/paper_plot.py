"""The paper's table as a picture: speed-ups against stages, and where the time of a step goes on 6 of them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.pipeline.paper_simulation import BY_HAND_STAGES, Row

matplotlib.use("Agg")
COLOURS = {"by hand": "#d95f02", "1f1b": "#1b9e77", "gpipe": "#7570b3", "folded": "#e7298a"}
PARTS = {"work": "#4daf4a", "imbalance": "#ff7f00", "bubble": "#bdbdbd", "transfers": "#377eb8"}


def write_plot(path: Path, rows: Sequence[Row], heading: str) -> None:
    """A column for each model of the first network, at the largest size."""
    network, size = rows[0].network, max(row.size for row in rows)
    models = list(dict.fromkeys(row.model for row in rows))
    figure = Figure(figsize=(13, 8.2), layout="constrained")
    grid = figure.subplots(2, len(models), squeeze=False, gridspec_kw={"height_ratios": (3, 2)})
    for column, model in enumerate(models):
        chosen = [row for row in rows if (row.network, row.model, row.size) == (network, model, size)]
        _speed_ups(grid[0][column], chosen, f"{model}, {size} x {size} px")
        _shares(grid[1][column], [row for row in chosen if row.stages == BY_HAND_STAGES])
    whose = "the paper's network" if network == "paper" else "this project's preset"
    title = f"{whose}: {heading}"
    figure.suptitle("\n".join(textwrap.wrap(title, 125)), fontsize=10)
    figure.savefig(path, dpi=110)


def _speed_ups(axes: Axes, rows: Sequence[Row], title: str) -> None:
    stages = sorted({row.stages for row in rows})
    axes.plot(stages, stages, color="0.7", linestyle="--", label="as many times as stages")
    for schedule in ("folded", "1f1b", "gpipe"):
        line = sorted((r.stages, r.speed_up) for r in rows if r.schedule == schedule and not r.by_hand)
        axes.plot(*zip(*line, strict=True), marker="o", color=COLOURS[schedule], label=f"our balance, {schedule}")
    for row in (row for row in rows if row.by_hand):
        mark = "s" if row.schedule == "gpipe" else "^"
        label = f"the paper's balance, {row.schedule}"
        axes.plot(row.stages, row.speed_up, mark, color=COLOURS["by hand"], markersize=8, label=label)
    axes.set_title(title)
    axes.set_xlabel("stages (GPUs)")
    axes.set_ylabel("simulated speed-up over one GPU")
    axes.set_xticks(stages)
    axes.set_ylim(0, max(stages) + 0.3)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper left")


def _shares(axes: Axes, rows: Sequence[Row]) -> None:
    ordered = sorted(rows, key=lambda row: (row.by_hand, row.schedule))
    labels = [f"{'paper' if row.by_hand else 'ours'}, {row.schedule}" for row in ordered]
    left = [0.0] * len(ordered)
    for part, colour in PARTS.items():
        widths = [100 * getattr(row, part) for row in ordered]
        axes.barh(labels, widths, left=left, color=colour, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, row in enumerate(ordered):
        axes.text(101, place, f"{row.speed_up:.2f} x", va="center", fontsize=9)
    axes.set_xlim(0, 125)
    axes.set_xlabel(f"share of a step on {BY_HAND_STAGES} stages (%)")
    axes.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.16), frameon=False)
