"""The pipeline in the planner's answer: its balance, what each stage has, and the parts of a step's time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tiledseg.geometry.tiling import Tiling
from tiledseg.pipeline.schedule import kept_of
from tiledseg.planning.answer.text import Section, milliseconds, tabled, time_of, words
from tiledseg.planning.run.pipeline import StagedPipeline, balanced_pipeline, layer_times, stage_memory
from tiledseg.planning.run.question import RunQuestion
from tiledseg.planning.run.spread import MicroBatchSize, Parallelism
from tiledseg.units import size


def stage_pipeline(question: RunQuestion, tiling: Tiling, settings: Parallelism) -> StagedPipeline:
    """Return the pipeline with its balance. It has 4 micro-batches a stage by default, at most the tiles of an image.
    Raises ConfigError for a balance that does not fit the network or the schedule, or where none fits the memory."""
    graph, bands = question.graph, question.network.bands
    tiles = settings.micro_batches or min(4 * settings.stages, len(tiling))
    largest = MicroBatchSize(tiling.context_max, tiles, question.value_bytes)
    times = layer_times(question.figures, graph, bands, largest, settings.stages)
    return balanced_pipeline(settings, graph, bands, largest, question.limit, times, "--balance")


def stages_part(question: RunQuestion, tiling: Tiling, settings: Parallelism, staged: StagedPipeline) -> Section:
    """Return the pipeline's balance, stages and step; bytes, milliseconds, shares of 1."""
    held = staged.timeline().in_flight(len(staged.pipeline.ranks))
    rows = [_stage(staged, rank, held, question.limit) for rank in range(settings.stages)]
    work, step = [row["multiply_adds"] for row in rows], _step(staged)
    rows = [row | {"share": round(row["multiply_adds"] / sum(work), 4)} for row in rows]
    values = {
        "stages": settings.stages,
        "schedule": settings.schedule,
        "recompute": list(settings.recompute),
        "micro_batches": staged.case.micro_batches,
        "context": list(tiling.context_max),
        "balance": list(staged.balance),
        "automatic": settings.balance is None,
        "by_stage": rows,
        "cap": round(sum(work) / max(work), 4),
        "step": step,
        "bytes_step": sum(row["bytes_step"] for row in rows),
    }
    modes = settings.recompute
    again = modes[0] if len(set(modes)) == 1 else f"[{','.join(modes)}]"
    parts = ("work", "imbalance", *(["recompute"] if step["recompute_milliseconds"] else []), "bubble", "transfer")
    shown = " + ".join(f"{name}{'s' * (name == 'transfer')} {step[f'{name}_milliseconds']:.4g}" for name in parts)
    text = tabled(
        f"stages: a step of {values['micro_batches']} micro-batches of {words(tiling.context_max)} px, "
        f"{settings.stages} stages, schedule {settings.schedule}{'' if again == 'never' else f', recompute {again}'}",
        rows,
        {
            "#": lambda row: str(row["stage"]),
            "layers": lambda row: ", ".join(f"{first}-{stop - 1}" for first, stop in row["layers"]),
            "work": lambda row: f"{100 * row['share']:.1f} %",
            "time": lambda row: time_of(row["milliseconds"]),
            "held": lambda row: ", ".join(map(str, row["in_flight"])),
            "memory": lambda row: size(row["memory"]["total"]),
            "sent on": lambda row: size(row["activation_bytes"]),
            "skips": lambda row: size(row["skip_bytes"]),
            "": lambda row: "" if row.get("fits", True) else "does NOT fit",
        },
        [
            f"balance, {'automatic' if values['automatic'] else 'given'}: [{','.join(map(str, staged.balance))}]",
            f"the slowest stage has {100 / values['cap']:.1f} % of the work, so the cap is {values['cap']:.2f} x",
            f"step {step['milliseconds']:.4g} ms = {shown}",
            f"predicted speed-up {step['speed_up']:.2f} x over one GPU, {100 * step['busy_share']:.1f} % busy, "
            f"{size(values['bytes_step'])} sent a step",
        ],
    )
    return Section(values, text)


def _stage(staged: StagedPipeline, rank: int, held: Sequence[int], limit: int | None) -> dict[str, Any]:
    """Return the figures of a stage. `held`: micro-batches in flight of each chunk."""
    case, walk = staged.case, staged.case.walk
    chunks = [chunk for chunk, place in enumerate(staged.pipeline.ranks) if place == rank]
    runs = [staged.pipeline.runs[chunk] for chunk in chunks]
    memories = [stage_memory(walk)(*run) for run in runs]
    kept = [kept_of(case.schedule, held[chunk], case.modes[rank]) for chunk in chunks]
    memory = {key: sum(getattr(each, key) for each in memories) for key in ("weights", "gradients", "optimizer")}
    memory["activations"] = sum(each.kept(*counts) for each, counts in zip(memories, kept, strict=True))
    memory["backward"] = max(each.backward for each in memories)
    memory["total"] = sum(memory.values())
    sent = {False: 0, True: 0}  # to the next stage, and of skips
    for route in staged.pipeline.routes:
        sent[staged.pipeline.is_skip(route)] += staged.route_bytes(route) * (route.source in chunks)
    back = (route for route in staged.pipeline.routes if route.target in chunks and route.returns)
    gradients = sum(map(staged.route_bytes, back))
    forward, backward = (sum(passes[c] for c in chunks) for passes in (staged.times.forward, staged.times.backward))
    row: dict[str, Any] = {
        "stage": rank,
        "layers": [list(run) for run in runs],
        "multiply_adds": sum(cost.multiply_adds for a, b in runs for cost in walk.costs[a:b]),
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
        "speed_up": round(case.alone / real.makespan, 4),
        "busy_share": round(real.busy_share, 4),
    }
