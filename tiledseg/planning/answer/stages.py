"""A pipeline in the planner's answer: the balance, what each stage costs, and how long a step takes.

Times are the multiply-adds of the layers at the machine's speed; a step is so many tiles of the largest context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tiledseg.config.checks import counts_of
from tiledseg.config.words import RECOMPUTE, chunk_ranks
from tiledseg.errors import ConfigError
from tiledseg.geometry.tiling import Tiling
from tiledseg.pipeline.balance import cuts
from tiledseg.pipeline.schedule import is_skip, kept_of
from tiledseg.pipeline.simulation import draw, in_flight
from tiledseg.planning.answer.text import columns
from tiledseg.planning.question import Question
from tiledseg.planning.run.parallelism import Parallelism
from tiledseg.planning.run.pipeline import MicroBatchSize, balanced_pipeline, modelled
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
    """A pipeline of `stages` ranks; no `balance` for an automatic one, no `micro_batches` for 4 a stage.

    Without `micro_batches` there are at most as many as an image has tiles. `recompute`: one mode, or one a stage.
    Raises ConfigError for what cannot be.
    """
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
    """Recompute modes of 'always' or '[always,never]'. Raises ConfigError for others."""
    modes = tuple(word.strip() for word in text.strip().strip("[]").split(","))
    for mode in modes:
        if mode not in RECOMPUTE:
            raise ConfigError(
                f"--recompute is '{text}'; give one of auto, none, compact, all, {', '.join(RECOMPUTE)}, or a list "
                "of one a stage: [always,never]"
            )
    return modes


def parse_counts(text: str) -> tuple[int, ...] | None:
    """Layer counts of '[14,24,30]', '{14,24,30}' or '14,24,30'; None for 'auto'. Raises ConfigError for others."""
    if text.strip() == "auto":
        return None
    counts = counts_of(text)
    if counts is None:
        raise ConfigError(f"--balance is '{text}'; give auto, or counts of layers: [14,24,30,22,12,7]")
    return counts


@dataclass(frozen=True)
class _Plan:
    """A pipeline with its balance."""

    asked: Parallelism
    staged: StagedPipeline
    held: tuple[int, ...]  # micro-batches that each chunk keeps at once

    @property
    def work(self) -> tuple[int, ...]:
        costs = self.staged.case.prices.costs
        return tuple(sum(cost.multiply_adds for cost in costs[a:b]) for a, b in cuts(self.staged.balance))

    def of_rank(self, rank: int) -> list[int]:
        """The chunks of a rank, in order of layers."""
        return [chunk for chunk, place in enumerate(self.staged.pipeline.ranks) if place == rank]

    def rank_work(self, rank: int) -> int:
        return sum(self.work[chunk] for chunk in self.of_rank(rank))

    def computing(self, rank: int) -> float:
        """Seconds of a micro-batch, forward and backward, without recomputation."""
        case, runs = self.staged.case, cuts(self.staged.balance)
        own = [runs[chunk] for chunk in self.of_rank(rank)]
        return sum(sum(case.forward[a:b]) + sum(case.backward[a:b]) for a, b in own)

    def seconds(self, rank: int) -> float:
        """Of a micro-batch, forward and backward, with recomputation."""
        times = self.staged.times
        return sum(times.forward[chunk] + times.backward[chunk] for chunk in self.of_rank(rank))


def stage_pipeline(question: Question, tiling: Tiling, asked: Parallelism) -> StagedPipeline:
    """The pipeline asked for, with its balance.

    Raises ConfigError for a balance that does not fit the network or the schedule, or where no balance fits the memory.
    """
    network, layers = question.network, question.graph
    tiles = asked.micro_batches or min(4 * asked.stages, len(tiling))
    largest = MicroBatchSize(tiling.context_max, tiles, question.bytes_per_value)
    times = modelled(question.machine, layers, network.bands, largest, asked.stages)
    return balanced_pipeline(asked, layers, network.bands, largest, question.gpu_memory, times, "--balance")


def stages_part(question: Question, tiling: Tiling, asked: Parallelism, staged: StagedPipeline) -> dict[str, Any]:
    """The pipeline's balance, stages, step and drawing; bytes, milliseconds, shares of 1."""
    held = in_flight(staged.actions, len(staged.pipeline.ranks))
    found = _Plan(asked, staged, held)
    by_stage = [_stage(found, rank, question.gpu_memory) for rank in range(asked.stages)]
    return {
        "stages": asked.stages,
        "schedule": asked.schedule,
        "recompute": list(asked.recompute),
        "micro_batches": staged.case.micro_batches,
        "context": list(tiling.context_max),
        "balance": list(staged.balance),
        "automatic": asked.balance is None,
        "by_stage": by_stage,
        "cap": round(sum(found.work) / max(found.rank_work(rank) for rank in range(asked.stages)), 4),
        "step": _step(found),
        "bytes_step": sum(stage["bytes_step"] for stage in by_stage),
        "drawing": draw(staged.actions, staged.pipeline).splitlines(),
    }


def _stage(found: _Plan, rank: int, limit: int | None) -> dict[str, Any]:
    chunks, staged = found.of_rank(rank), found.staged
    prices = staged.case.prices
    runs = [cuts(staged.balance)[chunk] for chunk in chunks]
    memories = [prices.memory(*run) for run in runs]
    kept = [kept_of(found.asked.schedule, found.held[chunk], found.asked.recompute[rank]) for chunk in chunks]
    work = found.rank_work(rank)
    memory = {
        "weights": sum(m.weights for m in memories),
        "gradients": sum(m.gradients for m in memories),
        "optimizer": sum(m.optimizer for m in memories),
        "activations": sum(m.kept(*counts) for m, counts in zip(memories, kept, strict=True)),
        "backward": max(m.backward for m in memories),
    }
    memory["total"] = sum(memory.values())
    activation, skips = (_sent(found, chunks, of_skips) for of_skips in (False, True))
    back = [route for route in staged.pipeline.routes if route.target in chunks and route.returns]
    gradients = sum(map(staged.route_bytes, back))
    names = prices.graph.names[1:]
    row: dict[str, Any] = {
        "stage": rank,
        "layers": [list(run) for run in runs],
        "names": [[names[first], names[stop - 1]] for first, stop in runs],
        "multiply_adds": work,
        "share": round(work / sum(found.work), 4),
        "forward_milliseconds": _milliseconds(sum(sum(staged.case.forward[a:b]) for a, b in runs)),
        "milliseconds": _milliseconds(found.seconds(rank)),
        "recompute": found.asked.recompute[rank],
        "in_flight": [found.held[chunk] for chunk in chunks],
        "memory": memory,
        "activation_bytes": activation,
        "skip_bytes": skips,
        "gradient_bytes": gradients,
        "bytes_step": staged.case.micro_batches * (activation + skips + gradients),
    }
    return row if limit is None else row | {"fits": memory["total"] <= limit}


def _sent(found: _Plan, chunks: Sequence[int], of_skips: bool) -> int:
    """Bytes that a rank's chunks send on in a forward pass of one micro-batch."""
    runs = cuts(found.staged.balance)
    routes = [r for r in found.staged.pipeline.routes if r.source in chunks and is_skip(r, runs) == of_skips]
    return sum(found.staged.route_bytes(route) for route in routes)


def _step(found: _Plan) -> dict[str, float]:
    """Where the time of a step goes: five parts that sum to it, then what follows from them."""
    ranks, micro_batches = found.asked.stages, found.staged.case.micro_batches
    alone = found.staged.case.alone
    slowest = max(map(found.computing, range(ranks))) * micro_batches
    busiest = max(map(found.seconds, range(ranks))) * micro_batches
    free, real = found.staged.timeline(transfers=False), found.staged.timeline()
    return {
        "work_milliseconds": _milliseconds(alone / ranks),
        "imbalance_milliseconds": _milliseconds(slowest - alone / ranks),
        "recompute_milliseconds": _milliseconds(busiest - slowest),
        "bubble_milliseconds": _milliseconds(free.makespan - busiest),
        "transfer_milliseconds": _milliseconds(real.makespan - free.makespan),
        "milliseconds": _milliseconds(real.makespan),
        "one_rank_milliseconds": _milliseconds(alone),
        "speed_up": round(alone / real.makespan, 4),
        "busy_share": round(real.busy_share, 4),
        "bubble_share": round((free.makespan - busiest) / real.makespan, 4),
    }


def _milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 4)


def stages_title(part: dict[str, Any]) -> str:
    rows, cols = part["context"]
    modes = part["recompute"]
    again = modes[0] if len(set(modes)) == 1 else f"[{','.join(modes)}]"
    return (
        f"stages: a step of {part['micro_batches']} micro-batches of {rows} x {cols} px, {part['stages']} stages, "
        f"schedule {part['schedule']}{'' if again == 'never' else f', recompute {again}'}"
    )


def stages_table(part: dict[str, Any], size: Callable[[int], str]) -> str:
    """A row a stage, the balance, where the time goes, and the schedule drawn. `size` writes bytes."""
    lines = [columns([_HEAD, *(_cells(row, size) for row in part["by_stage"])])]
    step = part["step"]
    kind = "automatic" if part["automatic"] else "given"
    lines += [
        f"  balance, {kind}: [{','.join(map(str, part['balance']))}]",
        f"  the slowest stage has {100 / part['cap']:.1f} % of the work, so the cap is {part['cap']:.2f} x",
        f"  step {step['milliseconds']:.4g} ms = work {step['work_milliseconds']:.4g} + imbalance "
        f"{step['imbalance_milliseconds']:.4g} + "
        + (f"recompute {step['recompute_milliseconds']:.4g} + " if step["recompute_milliseconds"] else "")
        + f"bubble {step['bubble_milliseconds']:.4g} + transfers {step['transfer_milliseconds']:.4g}",
        f"  predicted speed-up {step['speed_up']:.2f} x over one GPU, {100 * step['busy_share']:.1f} % busy, "
        f"{size(part['bytes_step'])} sent a step",
        "  drawn for equal stages: F forward, B backward (two slots), . waiting"
        + ("; f, b: the stage's second chunk" if len(part["balance"]) > part["stages"] else ""),
        *(f"  {line}" for line in part["drawing"]),
    ]
    return "\n".join(lines)


def _cells(row: dict[str, Any], size: Callable[[int], str]) -> tuple[str, ...]:
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
