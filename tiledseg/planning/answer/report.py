"""The planner's answer: the paper's figures, the exact ones, and what the network, its memory, stages and cluster cost.

Each part states its figures once, as values for JSON and as text. Lengths in pixels, memory in bytes, E to four
decimals. Times of stages are those of their layers; a step is so many tiles of the largest context.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from tiledseg.architecture.unet import UNet
from tiledseg.errors import ConfigError, InputError
from tiledseg.geometry.halo import (
    minimum_halo,
    network_footprint,
    paper_efficiency,
    paper_efficiency_linear,
    paper_halo,
    paper_shrink,
)
from tiledseg.geometry.layers.declared import CropGrid, Crops
from tiledseg.geometry.tiling import Tiling, finest_grid, make_tiling, tiling_efficiency
from tiledseg.planning.answer import text
from tiledseg.planning.answer.modes import ModePlans, mode_plans, modes_part
from tiledseg.planning.answer.rebuilding import blocks_within, rebuilding_part
from tiledseg.planning.answer.stages import stage_pipeline, stages_part
from tiledseg.planning.answer.text import PlannedStep, Row, Section, duration, listed, step_of, words, wrapped
from tiledseg.planning.run.grid import check_tiles, finer_grid
from tiledseg.planning.run.pipeline import StagedPipeline
from tiledseg.planning.run.plan import run_grid
from tiledseg.planning.run.question import RunQuestion
from tiledseg.planning.run.spread import Parallelism, measuring
from tiledseg.planning.walk.cost import tile_walk
from tiledseg.planning.walk.mode_cost import fusion_word, mode_words
from tiledseg.planning.walk.step_memory import training_memory
from tiledseg.system.console import counted
from tiledseg.units import size

MOST_TILES = 2**15  # some 0.3 ms each
SHORTER = 0.98  # longest epoch of a proposal, by the epoch of the plan
MOST_HEADING = 4  # lines of the raster and the network
_LABEL = 11  # columns of the name of a line
ALWAYS_SHOWN = "summary", "stages", "windows", "rebuilding"  # the last three only where flags or the network need them


class Planned(NamedTuple):
    """The parts of an answer by name, its tiling, the plans of its halo modes, and with stages its step and pipeline.
    The answer of the paper's formula has parts alone."""

    parts: dict[str, Section]
    tiling: Tiling | None = None
    modes: ModePlans | None = None
    step: PlannedStep | None = None
    pipeline: StagedPipeline | None = None

    @property
    def values(self) -> dict[str, Any]:
        """The answer as JSON has it."""
        return {"paper": None} | {name: part.values for name, part in self.parts.items()}

    def text(self, show: str | None = None) -> str:
        """Return the first lines of the answer, and the sections `show`. Raises ConfigError for one that it lacks."""
        sections = [name for name in self.parts if name != "summary"]
        shown = [] if show is None else [name.strip() for name in show.split(",")]
        for name in (name for name in shown if name not in (*sections, "all")):
            has = ",".join(sections)
            raise ConfigError(f"--show names '{name}', but this plan has {has}; give some of them, or all")
        every = "all" in shown or "summary" not in self.parts
        return "\n\n".join(
            part.text for name, part in self.parts.items() if every or name in shown or name in ALWAYS_SHOWN
        )


def plan(question: RunQuestion, stages: Parallelism | None = None, budget: int | None = None) -> Planned:
    """Answer the question. `stages`: settings of a pipeline to plan too. `budget`: bytes of a step; the answer then
    lists ways to meet it. Raises GeometryError for a grid or size that cannot be."""
    tiling = plan_tiling(question, budget)
    modes = mode_plans(question, tiling, exact=False)
    staged = None if stages is None else stage_pipeline(question, tiling, stages)
    parts = {"network": _network_part(question, tiling), "memory": _memory_part(question, tiling)}
    parts["modes"], step = modes_part(modes), None
    if stages is not None and staged is not None:
        parts["stages"] = stages_part(question, tiling, stages, staged)
        step = staged_step(question, parts["stages"].values, len(tiling))
    for crops in (layer.grid for layer in question.graph.layers if isinstance(layer, Crops)):
        if crops is not None:
            parts["windows"] = _windows_part(question, tiling, crops)
    if budget is not None:
        parts["rebuilding"] = rebuilding_part(question, tiling, budget)
    parts |= {"cluster": cluster_part(question, tiling.grid), "exact": _exact_part(question, tiling)}
    parts |= paper_part(question, tiling.grid)
    summary = summary_part(question, modes, step, list(parts))
    return Planned({"summary": summary} | parts, tiling, modes, step, staged)


def formula(question: RunQuestion, stride: int) -> Planned:
    """Answer with the paper's figures only. Networks of this project convolve with stride 1, so another `stride` has
    no exact tiling."""
    assert question.grid is not None, "the command refuses grid auto with another stride"
    reason = f"networks of this project convolve with stride 1, so nothing is exact for stride {stride}"
    cluster, paper = cluster_part(question, question.grid), paper_part(question, question.grid, stride)
    title = "\n".join(text.wrapped_lines(text.heading(question)))
    left_out = Section({"reason": reason}, wrapped(f"left out: {reason}", ""))
    return Planned({"cluster": Section(cluster.values, f"{title}\n\n{cluster.text}")} | paper | {"omitted": left_out})


def plan_tiling(question: RunQuestion, budget: int | None = None) -> Tiling:
    """Return the tiling of the given grid, or of the one that fits the memory. Kernels take its tiles whole, unless the
    `budget` of a step takes them in blocks."""
    graph, shape, grid, footprint = question.graph, question.shape, question.grid, network_footprint(question.graph)
    if grid is None:  # the grid of a run in the first halo mode that is exact on several tiles
        ranks = -(-max(1, question.ranks) // question.images)  # tiles of an image that give every GPU one
        halo = "layer" if measuring(graph) else "read"
        of_run = replace(question, ranks=ranks, parallel=Parallelism(halo=halo))
        grid = run_grid(of_run, footprint, question.rasters[0])
    finest = finest_grid(shape, footprint)
    if math.prod(grid) > MOST_TILES and grid[0] <= finest[0] and grid[1] <= finest[1]:
        raise ConfigError(
            f"--grid is {grid[0]} x {grid[1]}, {math.prod(grid)} tiles, but plan computes {MOST_TILES} at most; "
            "give a part of the raster as --size, with a grid in proportion"
        )
    tiling = make_tiling(shape, grid, footprint)
    if budget is None or blocks_within(question, tiling.context_max, budget) is None:
        check_tiles(tiling, graph, question.network.bands, question.memory, question.value_bytes)
    return tiling


def paper_part(question: RunQuestion, grid: tuple[int, int], stride: int = 1) -> dict[str, Section]:
    """Return the paper's d, epsilon, T', T and E, with its P = 0. Lengths are [rows, cols] where the sides differ. The
    formula holds for U-Nets alone; other networks have no such part."""
    network, shape = question.network, question.shape
    if not isinstance(network, UNet):
        return {}
    shrink = paper_shrink(network.kernel, stride, size=max(shape))
    halo = paper_halo(network.levels, network.convs_per_level, shrink)
    tile = shape[0] / grid[0], shape[1] / grid[1]
    linear = round(paper_efficiency_linear(shape, grid, halo), 4)
    rows = [
        Row("shrink", _number(shrink), "d, taken off by a convolution", "", "px"),
        Row("halo", _number(halo), "halo epsilon", "", "px"),
        Row("tile", _number(*tile), "tile T'", "", "px"),
        Row("context", _number(*(side + 2 * halo for side in tile)), "context T = T' + 2 epsilon", "", "px"),
        Row(
            "efficiency", round(paper_efficiency(shape, grid, halo), 4), "efficiency E = T^2 / T'^2", ".4f", "ideally 1"
        ),
        Row("efficiency_linear", linear, "its linear form", ".4f"),
    ]
    return {"paper": listed("paper: the formula, unpadded convolutions", rows)}


def _exact_part(question: RunQuestion, tiling: Tiling) -> Section:
    """Return the figures of the real tiles: aligned cores, the smallest exact halo, and E over the whole raster."""
    footprint = tiling.footprint
    halo, border = max(footprint.before, footprint.after), "mirrored" if footprint.mirror else "clipped"
    core_min = [min(span.core.size for span in spans) for spans in (tiling.rows, tiling.cols)]
    efficiency = round(tiling_efficiency(tiling), 4)
    rows = [
        Row("alignment", footprint.alignment, "alignment of core edges", "", "px"),
        Row("halo_minimum", max(minimum_halo(question.graph)), "smallest exact halo", "", "px"),
        Row("halo", halo, "halo, rounded to legal sizes", "", f"px; {border} at the raster's border"),
        Row("border", border),
        Row("grid", list(tiling.grid), "grid", "", f"rows x columns, {len(tiling)} tiles"),
        Row("tiles", len(tiling)),
        Row("core_max", list(tiling.core_max), "largest core", "", "px"),
        Row("core_min", core_min, "smallest core", "", "px"),
        Row("context_max", list(tiling.context_max), "largest context", "", "px"),
        Row("efficiency", efficiency, "efficiency E, whole raster", ".4f", "context pixels / core pixels"),
    ]
    return listed("exact: what changes nothing", rows)


def _network_part(question: RunQuestion, tiling: Tiling) -> Section:
    """Return parameters, multiply-adds of a forward pass, and each layer on the largest context."""
    graph, bands = question.network.graph(), question.network.bands

    def work(context: tuple[int, int]) -> int:
        return sum(cost.multiply_adds for cost in tile_walk(graph, bands, context).costs)

    costs = tile_walk(graph, bands, tiling.context_max, question.value_bytes).costs
    layers = [
        {key: getattr(cost, key) for key in ("name", "kind", "shape", "parameters", "multiply_adds")}
        | {"shape": list(cost.shape), "activation_bytes": cost.kept_bytes}
        for cost in costs
    ]
    image = sum(count * work(shape) for shape, count in Counter(tiling.contexts).items())
    rows = [
        Row("layers", len(graph), "layers"),
        Row("parameters", sum(cost.parameters for cost in costs), "parameters", ","),
        Row("multiply_adds_context", work(tiling.context_max), "multiply-adds, forward", "#", "a context"),
        Row("multiply_adds_image", image, "multiply-adds, forward", "#", "an image, halos included"),
        Row("by_layer", layers),
    ]
    return listed("network: on the largest context", rows)


def _memory_part(question: RunQuestion, tiling: Tiling) -> Section:
    graph, bands, limit = question.graph, question.network.bands, question.limit
    step = training_memory(graph, bands, tiling.context_max, question.value_bytes)
    rows = [
        Row("precision", question.precision),
        Row("weights", step.weights, "weights", "B", f"{question.precision}, and autocast's copies below fp32"),
        Row("gradients", step.gradients, "gradients", "B", "summed in float64"),
        Row("optimizer", step.optimizer, "optimizer", "B", "AdamW"),
        Row("activations", step.activations, "activations kept", "B", "with the loss"),
        Row("backward", step.backward, "backward pass on top", "B", "at its worst moment"),
        Row("total", step.total, "in all", "B", "beside the device's context and workspaces"),
    ]
    if limit is not None:
        fits, words = step.total <= limit, "fits"
        if not fits:
            remedy = finer_grid(tiling, graph, bands, limit, question.value_bytes)
            rows, words = [*rows, Row("remedy", remedy)], f"does NOT fit: {remedy}"
        rows += [Row("gpu", limit, "GPU", "B", words), Row("fits", fits)]
    return listed("memory: a training step on one tile, in mode read", rows)


def _windows_part(question: RunQuestion, tiling: Tiling, grid: CropGrid) -> Section:
    """Return the crops of a module that is not traced. Two ranks both compute a crop that their tiles share."""
    (height, width), tiles = tiling.raster, [tile.context for tile in tiling.tiles]
    computed = sum(len(grid.needed(at.row, height)) * len(grid.needed(at.col, width)) for at in tiles)
    every = len(grid.crops(height)) * len(grid.crops(width))
    twice, side = round(computed / every - 1, 4), (grid.window, grid.window)
    of_step = training_memory(question.graph, question.network.bands, side, question.value_bytes)
    rows = [
        Row("crops.overlap", grid.overlap),
        Row("crops.number", every, "crops of a map", ",", f"that share {grid.overlap} of a side"),
        Row("crops.computed", computed, "computed", ",", f"on a rank a tile: {twice:.1%} more; on one rank none"),
        Row("crops.twice", twice),
        Row("crops.bytes", of_step.total, "a training step on one", "B"),
    ]
    return listed("windows: crops of a module that is not traced", rows)


def cluster_part(question: RunQuestion, grid: tuple[int, int]) -> Section:
    """Return GPUs and nodes an image, at a tile a GPU, and the rounds of an epoch. Each round has a tile for every GPU;
    in the last round GPUs may idle."""
    tiles, per_node = grid[0] * grid[1], question.figures.ranks_per_host
    gpus, every = question.ranks or tiles, question.images * tiles
    rounds = -(-every // gpus)
    used = round(every / (rounds * gpus), 4)
    rows = [
        Row("gpus_per_image", tiles, "GPUs an image"),
        Row("gpus_per_node", per_node),
        Row("nodes_per_image", round(tiles / per_node, 2), "nodes an image", ".2f", f"of {per_node} GPUs"),  # shared
        Row("images", question.images, "images", ",", f"{every:,} tiles in all"),
        Row("gpus", gpus, "GPUs", ","),
        Row("tiles", every),
        Row("rounds", rounds, "rounds an epoch", ",", "a tile a GPU each"),
        Row("idle_gpus_last_round", rounds * gpus - every, "idle GPUs, last round", ","),
        Row("utilisation", used, "GPUs in use", ".1%", "of an epoch"),
    ]
    return listed("cluster: one tile a GPU", rows)


def _number(*values: float) -> int | float | list[int | float]:
    """Return a whole number as an int, any other to two decimals; a list of two where they differ."""
    rounded = [int(value) if value == int(value) else round(value, 2) for value in values]
    return rounded if values[0] != values[-1] else rounded[0]


def staged_step(question: RunQuestion, part: dict[str, Any], tiles: int) -> PlannedStep:
    """Return the step of as many pipelines as there are GPUs for; `part`: values of one."""
    pipelines, seconds = max(1, question.ranks // part["stages"]), part["step"]["milliseconds"] / 1000
    steps = -(-question.images * tiles // (part["micro_batches"] * pipelines))
    memory = max(row["memory"]["total"] for row in part["by_stage"])
    items = pipelines * part["micro_batches"]
    return PlannedStep(question, pipelines * part["stages"], memory, seconds, steps * seconds, items)


def summary_part(
    question: RunQuestion, modes: ModePlans, staged: PlannedStep | None, sections: Sequence[str]
) -> Section:
    """Return the first lines of the answer; bytes, milliseconds, seconds of an epoch. `staged`: the step of stages."""
    tiling, best, footprint = modes.tiling, modes.best, modes.tiling.footprint
    halo, context = max(footprint.before, footprint.after), tiling.context_max
    values = {"grid": list(tiling.grid), "tiles": len(tiling), "halo": halo, "context": list(context)}
    lines = {
        "precision": text.precision_words(question),
        "grid": f"{words(tiling.grid)}: {counted(len(tiling), 'tile')}, halo {halo} px, contexts of {words(context)} "
        "px at most",
    }
    better = [] if staged else _better(question, modes)
    step = staged or (step_of(modes.question, best) if best else None)
    if step is None:
        reason = next(iter(modes.impossible.values()), "no mode is exact on this grid")
        values |= {"fits": False, "reason": reason, "modes": []}
        lines = {"memory": f"no mode can be: {reason}"} | lines
    else:
        rows = [_mode("read", 0) | {"milliseconds": text.milliseconds(step.seconds)}]
        if best and not staged:
            costs = [best.cost, *(plan.cost for plan in modes.exact if plan is not best)]
            rows = [_mode(cost.mode, cost.fusion) | {"milliseconds": text.milliseconds(cost.seconds)} for cost in costs]
        items = {"micro_batches" if staged else "images_per_step": step.items}
        values |= rows[0] | step.values | items | {"modes": rows}
        proposed = question.images > 1 and not question.images_per_step and not staged
        first, *others = (
            f"{mode_words(row['mode'], row['fusion'])}{':' * (not at)} {duration(row['milliseconds'] / 1000)}"
            for at, row in enumerate(rows)
        )
        did = f"{counted(step.items, 'tile' if staged else 'image')}{text.PROPOSED * proposed}"
        unfit = "" if staged or modes.fitting else f"; {modes.remedy}"
        lines = {"memory": step.memory_words + unfit} | lines
        lines |= {
            "halo mode": f"{first} a step{', against ' * bool(others)}{', '.join(others)}",
            "GPUs": step.gpu_words,
            "step": f"{step.duration} for {did}, predicted: {text.machine_words(question)}",
            "epoch": step.epoch_words(in_steps=not staged),
        }
    offers = [
        f"{other['flags']}: {mode_words(other['mode'], other['fusion'])}, epoch {duration(other['epoch_seconds'])}, "
        f"{size(other['memory'])}, {other['gpus']:,} GPUs"
        for other in better
    ]
    shown = [*text.wrapped_lines(text.heading(question))[:MOST_HEADING], "", *(_line(*pair) for pair in lines.items())]
    shown += [_line("" if place else "better", offer) for place, offer in enumerate(offers)]
    shown += [_line("more", f"--show {','.join(sections)} or all; --help")]
    return Section(values | {"better": better}, "\n".join(shown))


def _line(label: str, text: str) -> str:
    return wrapped(text, label.ljust(_LABEL), " " * _LABEL)


def _mode(mode: str, fusion: int) -> dict[str, Any]:
    return {"mode": mode, "fusion": fusion_word(fusion)}


def _better(question: RunQuestion, here: ModePlans) -> list[dict[str, Any]]:
    """Return a narrower precision, and a finer grid unless the GPUs are counted, that fit and take a shorter epoch."""
    proposals, footprint = list[dict[str, Any]](), here.tiling.footprint
    longest = SHORTER * step_of(here.question, here.best).epoch_seconds if here.best and here.fitting else math.inf
    question = replace(question, recompute="none" if question.recompute == "auto" else question.recompute)
    others = list[tuple[str, RunQuestion, Tiling]]()
    if usual := text.better_precision(question):
        others.append((f"--precision {usual}", replace(question, precision=usual), here.tiling))
    finest = finest_grid(question.shape, footprint)
    rows, cols = (min(2 * tiles, most) for tiles, most in zip(here.tiling.grid, finest, strict=True))
    if not question.ranks and question.parallel.mesh is None and (rows, cols) != here.tiling.grid:
        others.append((f"--grid {rows} {cols}", question, make_tiling(question.shape, (rows, cols), footprint)))
    for flags, other, tiling in others:
        with suppress(InputError):
            modes = mode_plans(other, tiling)
            if modes.best and modes.fitting and (step := step_of(modes.question, modes.best)).epoch_seconds < longest:
                mode, figures = _mode(modes.best.cost.mode, modes.best.cost.fusion), ("memory", "gpus", "epoch_seconds")
                proposals.append({"flags": flags, **mode, **{key: step.values[key] for key in figures}})
    return proposals
