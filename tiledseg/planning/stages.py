"""A pipeline in the planner's answer: the balance, what each stage costs, and how long a step takes.

Times are the multiply-adds of the layers at the machine's speed; a step is so many tiles of the largest context.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tiledseg.errors import ConfigError
from tiledseg.geometry.tiling import Tiling
from tiledseg.pipeline.balance import TOLERANCES, choose_balance, choose_folded, cuts, parse_balance
from tiledseg.pipeline.folding import ChunkTimes
from tiledseg.pipeline.schedule import (
    RECOMPUTE,
    Pipeline,
    Program,
    Route,
    chunk_ranks,
    chunk_skips,
    kept_of,
    most_in_flight,
    program,
)
from tiledseg.pipeline.simulation import Timeline, draw, in_flight, simulate
from tiledseg.planning.cost import layer_costs
from tiledseg.planning.halo_traffic import Sent
from tiledseg.planning.machine import Machine
from tiledseg.planning.question import Question
from tiledseg.planning.stages_cost import StagePrices

MOST_STAGES = 32  # with these the simulation takes a few seconds at most
MOST_MICRO_BATCHES = 256
_SAMPLE = 24  # micro-batches on which an automatic balance is chosen


@dataclass(frozen=True)
class StagesQuestion:
    """A pipeline of `stages` ranks; no `balance` for an automatic one, no `micro_batches` for 4 a stage.

    Without `micro_batches` there are at most as many as an image has tiles. `recompute`: one mode, or one a stage.
    """

    stages: int
    balance: tuple[int, ...] | None = None
    micro_batches: int | None = None
    schedule: str = "1f1b"
    recompute: tuple[str, ...] = ("never",)

    @property
    def modes(self) -> tuple[str, ...]:
        """The recompute mode of each stage."""
        return self.recompute * self.stages if len(self.recompute) == 1 else self.recompute

    def __post_init__(self) -> None:
        if not 1 <= self.stages <= MOST_STAGES:
            raise ConfigError(f"--stages is {self.stages}; give 1 to {MOST_STAGES}")
        if self.micro_batches is not None and not 1 <= self.micro_batches <= MOST_MICRO_BATCHES:
            raise ConfigError(f"--micro-batches is {self.micro_batches}; give 1 to {MOST_MICRO_BATCHES}")
        chunks = len(chunk_ranks(self.schedule, self.stages))
        if self.balance is not None and len(self.balance) != chunks:
            twice = f", {chunks} parts when folded" if chunks != self.stages else ""
            raise ConfigError(
                f"--balance has {len(self.balance)} parts, but --stages is {self.stages}{twice}; give {chunks} counts "
                "of layers, or auto"
            )
        if len(self.modes) != self.stages:
            raise ConfigError(
                f"--recompute has {len(self.recompute)} parts, but --stages is {self.stages}; give one mode, or one a "
                "stage"
            )


def parse_modes(text: str) -> tuple[str, ...]:
    """Recompute modes of 'always' or '[always,never]'. Raises ConfigError for others."""
    modes = tuple(word.strip() for word in text.strip().strip("[]").split(","))
    for mode in modes:
        if mode not in RECOMPUTE:
            raise ConfigError(
                f"--recompute is '{text}'; give one of {', '.join(RECOMPUTE)}, or a list of one a stage: [always,never]"
            )
    return modes


def parse_counts(text: str) -> tuple[int, ...] | None:
    """Layer counts of '[14,24,30]', '{14,24,30}' or '14,24,30'; None for 'auto'. Raises ConfigError for others."""
    if text.strip() == "auto":
        return None
    inner = re.fullmatch(r"\s*(?:\[(.*)\]|\{(.*)\}|([^\[\]{}]*))\s*", text)
    words = next((part for part in inner.groups() if part is not None), "").split(",") if inner else []
    if not words or not all(re.fullmatch(r"\s*[+-]?\d+\s*", word) for word in words):
        raise ConfigError(f"--balance is '{text}'; give auto, or counts of layers: [14,24,30,22,12,7]")
    return tuple(map(int, words))


@dataclass(frozen=True)
class _Plan:
    """A pipeline with its balance and prices."""

    asked: StagesQuestion
    prices: StagePrices
    machine: Machine
    balance: tuple[int, ...]
    pipeline: Pipeline
    times: ChunkTimes  # seconds; recomputation is part of the backward pass
    actions: Program
    held: tuple[int, ...]  # micro-batches that each chunk keeps at once
    micro_batches: int

    @property
    def work(self) -> tuple[int, ...]:
        """Multiply-adds of each chunk."""
        return tuple(sum(c.multiply_adds for c in self.prices.costs[a:b]) for a, b in cuts(self.balance))

    def of_rank(self, rank: int) -> list[int]:
        """The chunks of a rank, in order of layers."""
        return [chunk for chunk, place in enumerate(self.pipeline.ranks) if place == rank]

    def rank_work(self, rank: int) -> int:
        return sum(self.work[chunk] for chunk in self.of_rank(rank))

    def seconds(self, rank: int) -> float:
        """Of a micro-batch, forward and backward, with recomputation."""
        return sum(self.times.forward[chunk] + self.times.backward[chunk] for chunk in self.of_rank(rank))

    def route_bytes(self, route: Route) -> int:
        """Bytes that travel along a route, one way, for one micro-batch."""
        if self.pipeline.is_local(route):
            return 0
        if route.skip:
            return self.prices.skip_bytes(route.skip)
        return self.prices.activation_bytes(cuts(self.balance)[route.target][0])


def stages_part(question: Question, tiling: Tiling, asked: StagesQuestion) -> dict[str, Any]:
    """The pipeline's balance, stages, step and drawing; bytes, milliseconds, shares of 1.

    Raises ConfigError for a balance that does not fit the network or the schedule, or where no balance fits the memory.
    """
    network = question.network
    layers = network.layers()
    costs = layer_costs(layers, network.bands, tiling.context_max, question.bytes_per_value)
    micro_batches = asked.micro_batches or min(4 * asked.stages, len(tiling))
    prices = StagePrices(layers, costs, question.bytes_per_value)
    found = _choose(asked, prices, question.machine, micro_batches, question.gpu_memory)
    by_stage = [_stage(found, rank, question.gpu_memory) for rank in range(asked.stages)]
    return {
        "stages": asked.stages,
        "schedule": asked.schedule,
        "recompute": list(asked.modes),
        "micro_batches": micro_batches,
        "context": list(tiling.context_max),
        "balance": list(found.balance),
        "automatic": asked.balance is None,
        "by_stage": by_stage,
        "cap": round(sum(found.work) / max(found.rank_work(rank) for rank in range(asked.stages)), 4),
        "step": _step(found),
        "bytes_step": sum(stage["bytes_step"] for stage in by_stage),
        "drawing": draw(found.actions, found.pipeline).splitlines(),
    }


def _choose(
    asked: StagesQuestion, prices: StagePrices, machine: Machine, micro_batches: int, limit: int | None
) -> _Plan:
    """The pipeline of the balance given, or of the automatic one that takes the least time, transfers included."""
    given = _given_balance(asked, prices)
    if given is not None:
        return _pipeline(asked, prices, machine, given, micro_batches)
    balances = _balances(asked, prices, micro_batches, limit)
    sample = min(micro_batches, _SAMPLE)
    return _pipeline(
        asked,
        prices,
        machine,
        min(balances, key=lambda balance: _timeline(_pipeline(asked, prices, machine, balance, sample), True).makespan),
        micro_batches,
    )


def _pipeline(
    asked: StagesQuestion, prices: StagePrices, machine: Machine, balance: tuple[int, ...], micro_batches: int
) -> _Plan:
    pipeline = Pipeline(chunk_ranks(asked.schedule, asked.stages), chunk_skips(prices.skips, cuts(balance)))
    recomputed = [_recomputes(asked, micro_batches, rank) for rank in pipeline.ranks]
    times = _chunk_times(prices, balance, recomputed, machine)
    actions = program(asked.schedule, pipeline, micro_batches, times)
    held = in_flight(actions, len(pipeline.ranks))
    return _Plan(asked, prices, machine, balance, pipeline, times, actions, held, micro_batches)


def _recomputes(asked: StagesQuestion, micro_batches: int, rank: int) -> bool:
    """Whether a stage goes forward twice; `except_last` counts as if it did with the last micro-batch too."""
    return asked.modes[rank] == "always" or (asked.modes[rank] == "except_last" and micro_batches > 1)


def _chunk_times(
    prices: StagePrices, balance: Sequence[int], recomputed: Sequence[bool], machine: Machine
) -> ChunkTimes:
    """Seconds of each chunk, and of the activation that it sends to the next."""
    runs = cuts(balance)
    work = [sum(cost.multiply_adds for cost in prices.costs[a:b]) for a, b in runs]
    forward = [machine.compute_seconds(chunk, training=False) for chunk in work]
    backward = [
        machine.compute_seconds(chunk) - (0 if again else f)
        for chunk, f, again in zip(work, forward, recomputed, strict=True)
    ]
    sent = [Sent(1, prices.activation_bytes(first)) for first, _ in runs[1:]]
    return ChunkTimes(forward, backward, list(map(machine.message_seconds, sent)))


def _given_balance(asked: StagesQuestion, prices: StagePrices) -> tuple[int, ...] | None:
    """The balance asked for, checked; None for an automatic one."""
    if asked.balance is None:
        return None
    balance = parse_balance(asked.balance, len(prices.layers))
    if asked.schedule == "folded":
        _check_fold(balance, prices, asked.stages)
    return balance


def _balances(
    asked: StagesQuestion, prices: StagePrices, micro_batches: int, limit: int | None
) -> list[tuple[int, ...]]:
    """The best balances, each for another price of bytes: how much longer a stage may take to save some."""
    ranks = chunk_ranks(asked.schedule, asked.stages)
    held = most_in_flight(asked.schedule, asked.stages, micro_batches)

    def memory(first: int, stop: int, chunk: int) -> int:
        kept = kept_of(asked.schedule, held[chunk], asked.modes[ranks[chunk]])
        return prices.memory(first, stop).total(*kept)

    work = [cost.multiply_adds for cost in prices.costs]
    if asked.schedule == "folded":
        ends = [(stash, pop) for _, stash, pop in prices.skips]
        found = [choose_folded(work, ends, memory, asked.stages, limit, prices.handed_on, t) for t in TOLERANCES]
    else:
        found = [choose_balance(work, memory, asked.stages, limit, prices.received, t) for t in TOLERANCES]
    return list(dict.fromkeys(found))


def _check_fold(balance: tuple[int, ...], prices: StagePrices, stages: int) -> None:
    """Raise ConfigError, naming all, where skips leave their rank."""
    ranks = chunk_ranks("folded", stages)
    routes = chunk_skips(prices.skips, cuts(balance))
    torn = [
        f"{route.skip} from stage {ranks[route.source]} to {ranks[route.target]}"
        for route in routes
        if ranks[route.source] != ranks[route.target]
    ]
    if torn:
        raise ConfigError(
            f"folded stages keep skips on their rank, but --balance [{','.join(map(str, balance))}] sends "
            f"{', '.join(torn)}; move the cuts, or give auto"
        )


def _stage(found: _Plan, rank: int, limit: int | None) -> dict[str, Any]:
    chunks = found.of_rank(rank)
    runs = [cuts(found.balance)[chunk] for chunk in chunks]
    memories = [found.prices.memory(*run) for run in runs]
    kept = [kept_of(found.asked.schedule, found.held[chunk], found.asked.modes[rank]) for chunk in chunks]
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
    gradients = sum(found.route_bytes(route) for route in found.pipeline.routes if route.target in chunks)
    names = [layer.name for layer in found.prices.layers]
    row: dict[str, Any] = {
        "stage": rank,
        "layers": [list(run) for run in runs],
        "names": [[names[first], names[stop - 1]] for first, stop in runs],
        "multiply_adds": work,
        "share": round(work / sum(found.work), 4),
        "forward_milliseconds": _milliseconds(found.machine.compute_seconds(work, training=False)),
        "milliseconds": _milliseconds(found.seconds(rank)),
        "recompute": found.asked.modes[rank],
        "in_flight": [found.held[chunk] for chunk in chunks],
        "memory": memory,
        "activation_bytes": activation,
        "skip_bytes": skips,
        "gradient_bytes": gradients,
        "bytes_step": found.micro_batches * (activation + skips + gradients),
    }
    return row if limit is None else row | {"fits": memory["total"] <= limit}


def _sent(found: _Plan, chunks: Sequence[int], of_skips: bool) -> int:
    """Bytes that a rank's chunks send on in a forward pass of one micro-batch."""
    routes = [r for r in found.pipeline.routes if r.source in chunks and bool(r.skip) == of_skips]
    return sum(found.route_bytes(route) for route in routes)


def _step(found: _Plan) -> dict[str, float]:
    """Where the time of a step goes: five parts that sum to it, then what follows from them."""
    ranks, machine = found.pipeline.size, found.machine
    alone = machine.compute_seconds(sum(found.work)) * found.micro_batches
    slowest = machine.compute_seconds(max(map(found.rank_work, range(ranks)))) * found.micro_batches
    busiest = max(map(found.seconds, range(ranks))) * found.micro_batches
    free, real = _timeline(found, False), _timeline(found, True)
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


def _timeline(found: _Plan, transfers: bool) -> Timeline:
    seconds = {
        route: found.machine.message_seconds(Sent(1, found.route_bytes(route))) if transfers else 0.0
        for route in found.pipeline.routes
    }
    return simulate(found.actions, found.times.forward, found.times.backward, seconds.__getitem__)


def _milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 4)
