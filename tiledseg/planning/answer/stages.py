"""A pipeline in the planner's answer: the balance, what each stage costs, and how long a step takes.

Times are the multiply-adds of the layers at the machine's speed; a step is so many tiles of the largest context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tiledseg.config.checks import counts_of
from tiledseg.config.words import RECOMPUTE, chunk_ranks
from tiledseg.errors import ConfigError
from tiledseg.geometry.tiling import Tiling
from tiledseg.pipeline.balance import cuts
from tiledseg.pipeline.schedule import is_skip, kept_of
from tiledseg.pipeline.simulation import draw, in_flight
from tiledseg.planning.answer.text import columns, milliseconds, size
from tiledseg.planning.question import Question
from tiledseg.planning.run.pipeline import MicroBatchSize, balanced_pipeline, modelled
from tiledseg.planning.run.spread import Parallelism
from tiledseg.planning.stages.staged_pipeline import StagedPipeline

MOST_STAGES = 32  # with these the simulation takes a few seconds at most
MOST_MICRO_BATCHES = 256
_HEAD = ("stage", "layers", "work", "forward + backward", "in flight", "activations", "memory", "sent on", "skips", "")


def ask_stages(
    stages: int,
    balance: tuple[int, ...] | None = None,
    micro_batches: int | None = None,
    schedule: str = "1f1b",
    recompute: tuple[str, ...] = ("never",),
) -> Parallelism:
    """Return the settings of a pipeline of `stages` ranks; no `balance` for an automatic one. No `micro_batches` stand
    for 4 a stage, or the tiles of an image where these are fewer. `recompute`: one mode, or one a stage. Raises
    ConfigError for what cannot be."""
    if not 1 <= stages <= MOST_STAGES:
        raise ConfigError(f"--stages is {stages}; give 1 to {MOST_STAGES}")
    if micro_batches is not None and not 1 <= micro_batches <= MOST_MICRO_BATCHES:
        raise ConfigError(f"--micro-batches is {micro_batches}; give 1 to {MOST_MICRO_BATCHES}")
    chunks = len(chunk_ranks(schedule, stages))
    if balance is not None and len(balance) != chunks:
        several = f", {chunks} parts when {schedule}" if chunks != stages else ""
        raise ConfigError(
            f"--balance has {len(balance)} parts, but --stages is {stages}{several}; give {chunks} counts of layers, "
            "or auto"
        )
    modes = recompute * stages if len(recompute) == 1 else recompute
    if len(modes) != stages:
        raise ConfigError(
            f"--recompute has {len(recompute)} parts, but --stages is {stages}; give one mode, or one a stage"
        )
    return Parallelism(stages=stages, balance=balance, micro_batches=micro_batches, schedule=schedule, recompute=modes)


def parse_modes(text: str) -> tuple[str, ...]:
    """Parse 'always' or '[always,never]' into recompute modes. Raises ConfigError for others."""
    modes = tuple(word.strip() for word in text.strip().strip("[]").split(","))
    if not set(modes) <= set(RECOMPUTE):
        raise ConfigError(
            f"--recompute is '{text}'; give one of auto, none, compact, all, {', '.join(RECOMPUTE)}, or a list "
            "of one a stage: [always,never]"
        )
    return modes


def parse_counts(text: str) -> tuple[int, ...] | None:
    """Parse '[14,24,30]', '{14,24,30}' or '14,24,30' into layer counts, 'auto' into None. Raises ConfigError else."""
    counts = None if text.strip() == "auto" else counts_of(text)
    if counts is None and text.strip() != "auto":
        raise ConfigError(f"--balance is '{text}'; give auto, or counts of layers: [14,24,30,22,12,7]")
    return counts


def stage_pipeline(question: Question, tiling: Tiling, asked: Parallelism) -> StagedPipeline:
    """Return the pipeline with its balance. Raises ConfigError for a balance that does not fit the network or the
    schedule, or where none fits the memory."""
    graph, bands = question.graph, question.network.bands
    tiles = asked.micro_batches or min(4 * asked.stages, len(tiling))
    largest = MicroBatchSize(tiling.context_max, tiles, question.bytes_per_value)
    times = modelled(question.machine, graph, bands, largest, asked.stages)
    return balanced_pipeline(asked, graph, bands, largest, question.gpu_memory, times, "--balance")


def stages_part(question: Question, tiling: Tiling, asked: Parallelism, staged: StagedPipeline) -> dict[str, Any]:
    """Return the pipeline's balance, stages, step and drawing; bytes, milliseconds, shares of 1."""
    held = in_flight(staged.actions, len(staged.pipeline.ranks))
    by_stage = [_stage(staged, rank, held, question.gpu_memory) for rank in range(asked.stages)]
    work = [row["multiply_adds"] for row in by_stage]
    for row in by_stage:
        row["share"] = round(row["multiply_adds"] / sum(work), 4)
    return {
        "stages": asked.stages,
        "schedule": asked.schedule,
        "recompute": list(asked.recompute),
        "micro_batches": staged.case.micro_batches,
        "context": list(tiling.context_max),
        "balance": list(staged.balance),
        "automatic": asked.balance is None,
        "by_stage": by_stage,
        "cap": round(sum(work) / max(work), 4),
        "step": _step(staged),
        "bytes_step": sum(row["bytes_step"] for row in by_stage),
        "drawing": draw(staged.actions, staged.pipeline).splitlines(),
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
    gradients, names = sum(map(staged.route_bytes, back)), prices.graph.names[1:]
    row: dict[str, Any] = {
        "stage": rank,
        "layers": [list(run) for run in runs],
        "names": [[names[first], names[stop - 1]] for first, stop in runs],
        "multiply_adds": sum(cost.multiply_adds for a, b in runs for cost in prices.costs[a:b]),
        "share": 0.0,  # of all stages' work: see `stages_part`
        "forward_milliseconds": milliseconds(sum(staged.times.forward[chunk] for chunk in chunks)),
        "milliseconds": milliseconds(sum(staged.times.forward[c] + staged.times.backward[c] for c in chunks)),
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


def stages_text(part: dict[str, Any]) -> str:
    """Return a title, a row a stage, the balance, the parts of the time, and the schedule drawn."""
    (rows, cols), modes, step = part["context"], part["recompute"], part["step"]
    again = modes[0] if len(set(modes)) == 1 else f"[{','.join(modes)}]"
    kind = "automatic" if part["automatic"] else "given"
    parts = ("work", "imbalance", *(["recompute"] if step["recompute_milliseconds"] else []), "bubble", "transfer")
    shown = " + ".join(f"{name}{'s' * (name == 'transfer')} {step[f'{name}_milliseconds']:.4g}" for name in parts)
    lines = [
        f"stages: a step of {part['micro_batches']} micro-batches of {rows} x {cols} px, {part['stages']} stages, "
        f"schedule {part['schedule']}{'' if again == 'never' else f', recompute {again}'}",
        columns([_HEAD, *map(_cells, part["by_stage"])]),
        f"  balance, {kind}: [{','.join(map(str, part['balance']))}]",
        f"  the slowest stage has {100 / part['cap']:.1f} % of the work, so the cap is {part['cap']:.2f} x",
        f"  step {step['milliseconds']:.4g} ms = {shown}",
        f"  predicted speed-up {step['speed_up']:.2f} x over one GPU, {100 * step['busy_share']:.1f} % busy, "
        f"{size(part['bytes_step'])} sent a step",
        "  drawn for equal stages: F forward, B backward (two slots), . waiting"
        + ("; f, b: the stage's second chunk" if len(part["balance"]) > part["stages"] else ""),
        *(f"  {line}" for line in part["drawing"]),
    ]
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(row["stage"]),
        ", ".join(f"{first}-{stop - 1}" for first, stop in row["layers"]),
        f"{100 * row['share']:.1f} %",
        f"{row['milliseconds']:.4g} ms",
        ", ".join(map(str, row["in_flight"])),
        size(row["memory"]["activations"]),
        size(row["memory"]["total"]),
        size(row["activation_bytes"]),
        size(row["skip_bytes"]),
        "" if row.get("fits", True) else "does NOT fit",
    )
