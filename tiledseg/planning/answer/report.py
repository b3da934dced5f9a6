"""The planner's answer: the paper's figures, the exact ones, and what the network, its memory, stages and cluster cost.

Plain values in nested dicts, ready for JSON. Lengths in pixels, memory in bytes, E to four decimals. Times of stages
are the multiply-adds of the layers at the machine's speed; a step is so many tiles of the largest context.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from tiledseg.architecture.unet import UNet
from tiledseg.errors import ConfigError
from tiledseg.geometry.halo import (
    minimum_halo,
    network_footprint,
    paper_efficiency,
    paper_efficiency_linear,
    paper_halo,
    paper_shrink,
)
from tiledseg.geometry.layers.declared import Crops
from tiledseg.geometry.tiling import Tiling, finest_grid, largest_window, make_tiling, tiling_efficiency
from tiledseg.pipeline.balance import cuts
from tiledseg.pipeline.schedule import is_skip, kept_of
from tiledseg.pipeline.simulation import draw, in_flight
from tiledseg.planning.answer.modes import mode_plans, modes_part, summary_part
from tiledseg.planning.answer.rebuilding import blocks_within, rebuilding_part
from tiledseg.planning.answer.text import WIDTH, milliseconds
from tiledseg.planning.run.grid import check_tiles, finer_grid
from tiledseg.planning.run.pipeline import StagedPipeline, balanced_pipeline, modelled
from tiledseg.planning.run.plan import run_grid
from tiledseg.planning.run.question import RunQuestion
from tiledseg.planning.run.spread import MicroBatchSize, Parallelism, exact_modes
from tiledseg.planning.walk.cost import layer_costs
from tiledseg.planning.walk.step_memory import training_memory


def stage_pipeline(question: RunQuestion, tiling: Tiling, asked: Parallelism) -> StagedPipeline:
    """Return the pipeline with its balance; by default of 4 micro-batches a stage, or the tiles of an image where these
    are fewer. Raises ConfigError for a balance that does not fit the network or the schedule, or where none fits the
    memory."""
    graph, bands = question.graph, question.network.bands
    tiles = asked.micro_batches or min(4 * asked.stages, len(tiling))
    largest = MicroBatchSize(tiling.context_max, tiles, question.value_bytes)
    times = modelled(question.figures, graph, bands, largest, asked.stages)
    return balanced_pipeline(asked, graph, bands, largest, question.limit, times, "--balance")


def stages_part(question: RunQuestion, tiling: Tiling, asked: Parallelism, staged: StagedPipeline) -> dict[str, Any]:
    """Return the pipeline's balance, stages, step and drawing; bytes, milliseconds, shares of 1."""
    held = in_flight(staged.actions, len(staged.pipeline.ranks))
    by_stage = [_stage(staged, rank, held, question.limit) for rank in range(asked.stages)]
    work = [row["multiply_adds"] for row in by_stage]
    return {
        "stages": asked.stages,
        "schedule": asked.schedule,
        "recompute": list(asked.recompute),
        "micro_batches": staged.case.micro_batches,
        "context": list(tiling.context_max),
        "balance": list(staged.balance),
        "automatic": asked.balance is None,
        "by_stage": [row | {"share": round(row["multiply_adds"] / sum(work), 4)} for row in by_stage],
        "cap": round(sum(work) / max(work), 4),
        "step": _step(staged),
        "bytes_step": sum(row["bytes_step"] for row in by_stage),
        "drawing": draw(staged.actions, staged.pipeline, WIDTH - 2).splitlines(),
    }


def _stage(staged: StagedPipeline, rank: int, held: Sequence[int], limit: int | None) -> dict[str, Any]:
    case, prices, every = staged.case, staged.case.prices, cuts(staged.balance)
    chunks = [chunk for chunk, place in enumerate(staged.pipeline.ranks) if place == rank]
    runs = [every[chunk] for chunk in chunks]
    memories = [prices.memory(*run) for run in runs]
    kept = [kept_of(case.schedule, held[chunk], case.modes[rank]) for chunk in chunks]
    memory = {key: sum(getattr(each, key) for each in memories) for key in ("weights", "gradients", "optimizer")}
    memory["activations"] = sum(each.kept(*counts) for each, counts in zip(memories, kept, strict=True))
    memory["backward"] = max(each.backward for each in memories)
    memory["total"] = sum(memory.values())
    sent = {False: 0, True: 0}  # to the next stage, and of skips
    for route in staged.pipeline.routes:
        sent[is_skip(route, every)] += staged.route_bytes(route) * (route.source in chunks)
    back = (route for route in staged.pipeline.routes if route.target in chunks and route.returns)
    gradients = sum(map(staged.route_bytes, back))
    forward, backward = (sum(passes[c] for c in chunks) for passes in (staged.times.forward, staged.times.backward))
    row: dict[str, Any] = {
        "stage": rank,
        "layers": [list(run) for run in runs],
        "multiply_adds": sum(cost.multiply_adds for a, b in runs for cost in prices.costs[a:b]),
        "forward_milliseconds": milliseconds(forward),
        "milliseconds": milliseconds(forward + backward),
        "recompute": case.modes[rank],
        "in_flight": [held[chunk] for chunk in chunks],
        "memory": memory,
        "activation_bytes": sent[False],
        "skip_bytes": sent[True],
        "gradient_bytes": gradients,
        "bytes_step": case.micro_batches * (sum(sent.values()) + gradients),
    }
    return row if limit is None else row | {"fits": memory["total"] <= limit}


def _step(staged: StagedPipeline) -> dict[str, float]:
    """Return the parts of a step's time: five that sum to it, then what follows from them."""
    case, times, ranks = staged.case, staged.times, staged.pipeline.ranks
    again, busy = [0.0] * case.stages, [0.0] * case.stages  # of a micro-batch: recomputation, and all passes
    for chunk, rank in enumerate(ranks):
        again[rank] += times.forward[chunk] * case.recomputes(rank)
        busy[rank] += times.forward[chunk] + times.backward[chunk]
    slowest = case.micro_batches * max(all_passes - twice for all_passes, twice in zip(busy, again, strict=True))
    busiest = case.micro_batches * max(busy)
    free, real, mean = staged.timeline(transfers=False), staged.timeline(), case.alone / case.stages
    parts = {
        "work": mean,
        "imbalance": slowest - mean,
        "recompute": busiest - slowest,
        "bubble": free.makespan - busiest,
        "transfer": real.makespan - free.makespan,
    }
    return {f"{name}_milliseconds": milliseconds(seconds) for name, seconds in parts.items()} | {
        "milliseconds": milliseconds(real.makespan),
        "one_rank_milliseconds": milliseconds(case.alone),
        "speed_up": round(case.alone / real.makespan, 4),
        "busy_share": round(real.busy_share, 4),
        "bubble_share": round(parts["bubble"] / real.makespan, 4),
    }


Answer = dict[str, Any]
MOST_TILES = 2**15  # some 0.3 ms each
_OF_LAYER = "name", "kind", "shape", "parameters", "multiply_adds"


class Planned(NamedTuple):
    """The answer, the tiling that it is about, and the pipeline if there is one."""

    answer: Answer
    tiling: Tiling | None
    pipeline: StagedPipeline | None


def plan(
    question: RunQuestion, stages: Parallelism | None = None, budget: int | None = None, window: int | None = None
) -> Planned:
    """Answer the question; with `stages` on a pipeline too, with a `budget` on ways to a step of so many bytes, with a
    `window` on random windows of such a side. Raises GeometryError for a grid or size that cannot be."""
    tiling = plan_tiling(question, budget)
    modes = mode_plans(question, tiling, exact=False)
    staged = None if stages is None else stage_pipeline(question, tiling, stages)
    of_step = training_memory(question.graph, question.network.bands, tiling.context_max, question.value_bytes)
    memory: Answer = {"precision": question.precision, **asdict(of_step), "total": of_step.total}
    if question.limit is not None:
        memory |= {"gpu": question.limit, "fits": of_step.total <= question.limit}
        if not memory["fits"]:
            asked = question.graph, question.network.bands, question.limit, question.value_bytes
            memory["remedy"] = finer_grid(tiling, *asked)
    answer = {
        "paper": paper_part(question, tiling.grid),
        "exact": _exact_part(question, tiling),
        "network": _network_part(question, tiling),
        "memory": memory,
        "modes": modes_part(modes),
    }
    if stages is not None and staged is not None:
        answer["stages"] = stages_part(question, tiling, stages, staged)
    if window is not None:
        answer["windows"] = _windows_part(question, tiling, window)
    if budget is not None:
        answer["rebuilding"] = rebuilding_part(question, tiling, budget)
    answer["cluster"] = cluster_part(question, tiling.grid)
    return Planned({"summary": summary_part(question, answer, modes)} | answer, tiling, staged)


def formula(question: RunQuestion, stride: int) -> Planned:
    """Answer with the paper's figures only: this project's networks convolve with stride 1, so there is no network, and
    no tiling, to be exact about for another `stride`."""
    assert question.grid is not None, "the command refuses grid auto with another stride"
    reason = f"networks of this project convolve with stride 1, so nothing is exact for stride {stride}"
    parts: Answer = {"paper": paper_part(question, question.grid, stride), "omitted": reason}
    return Planned(parts | {"cluster": cluster_part(question, question.grid)}, None, None)


def plan_tiling(question: RunQuestion, budget: int | None = None) -> Tiling:
    """Return the tiling of the given grid, or of the one that fits the memory. Kernels take its tiles whole, unless the
    `budget` of a step takes them in blocks."""
    graph, size, grid = question.graph, question.shape, question.grid
    footprint = network_footprint(graph)
    if grid is None:  # of a run in the first of the halo modes that can be exact on several tiles
        ranks = -(-max(1, question.ranks) // question.images)  # tiles of an image that give every GPU one
        asked = replace(question, ranks=ranks, parallel=Parallelism(halo=exact_modes(graph, tiles=2)[0]))
        grid = run_grid(asked, footprint, question.rasters[0])
    finest = finest_grid(size, footprint)
    if math.prod(grid) > MOST_TILES and grid[0] <= finest[0] and grid[1] <= finest[1]:
        raise ConfigError(
            f"--grid is {grid[0]} x {grid[1]}, {math.prod(grid)} tiles, but plan computes {MOST_TILES} at most; "
            "give a part of the raster as --size, with a grid in proportion"
        )
    tiling = make_tiling(size, grid, footprint)
    if budget is None or blocks_within(question, tiling.context_max, budget) is None:
        check_tiles(tiling, graph, question.network.bands, question.memory, question.value_bytes)
    return tiling


def paper_part(question: RunQuestion, grid: tuple[int, int], stride: int = 1) -> Answer | None:
    """Return the paper's d, epsilon, T', T and E, with its P = 0; for sides that differ, lengths are [rows, cols]. None
    where the network is no U-Net of the paper's kind: its formula is about nothing else."""
    network, size = question.network, question.shape
    if not isinstance(network, UNet):
        return None
    shrink = paper_shrink(network.kernel, stride, size=max(size))
    halo = paper_halo(network.levels, network.convs_per_level, shrink)
    tile = size[0] / grid[0], size[1] / grid[1]
    return {
        "shrink": _number(shrink),
        "halo": _number(halo),
        "tile": _number(*tile),
        "context": _number(*(side + 2 * halo for side in tile)),
        "efficiency": round(paper_efficiency(size, grid, halo), 4),
        "efficiency_linear": round(paper_efficiency_linear(size, grid, halo), 4),
    }


def _exact_part(question: RunQuestion, tiling: Tiling) -> Answer:
    """Return the real tiles: snapped cores, the smallest halo that changes nothing, and E over the whole raster."""
    footprint = tiling.footprint
    before, after = minimum_halo(question.graph)
    return {
        "alignment": footprint.alignment,
        "halo_minimum": max(before, after),
        "halo_minimum_sides": [before, after],
        "halo": max(footprint.before, footprint.after),
        "halo_sides": [footprint.before, footprint.after],
        "border": "mirrored" if footprint.mirror else "clipped",
        "grid": list(tiling.grid),
        "tiles": len(tiling),
        "core_max": list(tiling.core_max),
        "core_min": [min(t.core.height for t in tiling.tiles), min(t.core.width for t in tiling.tiles)],
        "context_max": list(tiling.context_max),
        "efficiency": round(tiling_efficiency(tiling), 4),
    }


def _network_part(question: RunQuestion, tiling: Tiling) -> Answer:
    """Return parameters, multiply-adds of a forward pass, and each layer on the largest context."""
    graph, bands = question.network.graph(), question.network.bands

    def work(context: tuple[int, int]) -> int:
        return sum(cost.multiply_adds for cost in layer_costs(graph, bands, context))

    costs = layer_costs(graph, bands, tiling.context_max, question.value_bytes)
    contexts = Counter(tile.context.shape for tile in tiling.tiles)
    kept = [{"shape": list(cost.shape), "activation_bytes": cost.kept_bytes} for cost in costs]
    return {
        "layers": len(graph),
        "parameters": sum(cost.parameters for cost in costs),
        "multiply_adds_context": work(tiling.context_max),
        "multiply_adds_image": sum(count * work(shape) for shape, count in contexts.items()),
        "by_layer": [{key: getattr(c, key) for key in _OF_LAYER} | k for c, k in zip(costs, kept, strict=True)],
    }


def _windows_part(question: RunQuestion, tiling: Tiling, side: int) -> Answer:
    """Return the cost of a random window with its exact halo, and as a small image of its own. The cost is the largest
    context, its pixels over those of the window, and bytes of a training step on it. `epoch`: as many windows as cover
    the raster's pixels once."""
    graph, size = question.graph, question.shape
    footprint = network_footprint(graph)
    grid = next((layer.grid for layer in graph.layers if isinstance(layer, Crops)), None)
    kinds: Answer = {}
    if grid is not None:  # crops have no halo; where each tile is another rank's, both compute what two need
        (height, width), tiles = tiling.raster, [tile.context for tile in tiling.tiles]
        computed = sum(len(grid.needed(at.row, height)) * len(grid.needed(at.col, width)) for at in tiles)
        every = len(grid.crops(height)) * len(grid.crops(width))
        figures = {"number": every, "computed": computed, "twice": round(computed / every - 1, 4)}
        kinds["crops"] = {"overlap": grid.overlap} | figures
    contexts = {"exact": largest_window(size, side, footprint)} if grid is None else {}
    for kind, raster in (contexts | {"none": (side, side)}).items():
        context = make_tiling(raster, (1, 1), footprint).context_max
        kinds[kind] = {
            "context": list(context),
            "efficiency": round(math.prod(context) / side**2, 4),
            "bytes": training_memory(graph, question.network.bands, context, question.value_bytes).total,
        }
    return {"side": side, "epoch": math.ceil(math.prod(size) / side**2), **kinds}


def cluster_part(question: RunQuestion, grid: tuple[int, int]) -> Answer:
    """Return GPUs and nodes an image, one tile a GPU, and the rounds of an epoch: a tile for every GPU each, but the
    last one may leave GPUs idle."""
    tiles, per_node = grid[0] * grid[1], question.figures.ranks_per_host
    gpus, every = question.ranks or tiles, question.images * tiles
    rounds = -(-every // gpus)
    return {
        "gpus_per_image": tiles,
        "gpus_per_node": per_node,
        "nodes_per_image": round(tiles / per_node, 2),  # images share nodes
        "images": question.images,
        "gpus": gpus,
        "tiles": every,
        "rounds": rounds,
        "idle_gpus_last_round": rounds * gpus - every,
        "utilisation": round(every / (rounds * gpus), 4),
    }


def _number(*values: float) -> int | float | list[int | float]:
    """Return a whole number as an int, any other to two decimals; a list of two where they differ."""
    rounded = [int(value) if value == int(value) else round(value, 2) for value in values]
    return rounded if values[0] != values[-1] else rounded[0]
