"""A pipeline in the planner's answer: the balance, what each stage costs, and how long a step takes.

Times are the multiply-adds of the layers at the machine's speed; a step is so many tiles of the largest context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tiledseg.geometry.tiling import Tiling
from tiledseg.pipeline.balance import cuts
from tiledseg.pipeline.schedule import is_skip, kept_of
from tiledseg.pipeline.simulation import draw, in_flight
from tiledseg.planning.answer.text import WIDTH, milliseconds
from tiledseg.planning.run.pipeline import MicroBatchSize, balanced_pipeline, modelled
from tiledseg.planning.run.question import RunQuestion
from tiledseg.planning.run.spread import Parallelism
from tiledseg.planning.staged_pipeline import StagedPipeline


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
