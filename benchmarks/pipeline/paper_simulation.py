"""Steps of the paper's networks, simulated from measured layer times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from benchmarks.pipeline.paper_network import BANDS, network_graph
from benchmarks.pipeline.paper_times import Case, Measurement
from tiledseg.architecture.presets import PRESETS
from tiledseg.config.words import SCHEDULES, chunk_ranks
from tiledseg.pipeline.balance import cuts, parse_balance
from tiledseg.planning.run.pipeline import LayerTimes, PipelineCase, choose, stage
from tiledseg.planning.walk.cost import FLOPS_PER_MULTIPLY_ADD, tile_walk
from tiledseg.planning.walk.cost_model import Machine

BY_HAND_STAGES = 6
VALUE_BYTES = 4


@dataclass(frozen=True)
class Row:
    """One simulated step. Shares are of the step and sum to 1; `bytes` of all messages, both ways."""

    network: str
    model: str
    size: int
    schedule: str
    stages: int
    by_hand: bool
    balance: tuple[int, ...]
    cap: float
    speed_up: float
    work: float
    imbalance: float
    bubble: float
    transfers: float
    bytes: int


class Simulated:
    """A case with its times, from which rows are made."""

    def __init__(self, case: Case, measurement: Measurement, machine: Machine, micro_batches: int) -> None:
        self.case, self.machine, self.micro_batches = case, machine, micro_batches
        self.layers = network_graph(case.network, case.model, measurement.base_channels)
        self.walk = tile_walk(self.layers, BANDS, (case.size, case.size), VALUE_BYTES)
        self.costs = self.walk.costs
        self.work = [cost.multiply_adds for cost in self.costs]
        times = measurement.cases[case]
        self.measured = sum(t.forward + t.backward for t in times)
        work = sum(cost.multiply_adds * (1 + cost.passes) for cost in self.costs)
        scale = FLOPS_PER_MULTIPLY_ADD * work / machine.flops / self.measured
        self.forward = [scale * t.forward for t in times]
        self.backward = [scale * t.backward for t in times]

    @cached_property
    def both(self) -> list[float]:
        """Seconds of each layer, forward and backward."""
        return [f + b for f, b in zip(self.forward, self.backward, strict=True)]

    def by_hand(self) -> tuple[int, ...]:
        """The paper's list."""
        return parse_balance(PRESETS[self.case.model].balance, len(self.layers))

    def cap(self, balance: Sequence[int], times: Sequence[float], schedule: str = "1f1b") -> float:
        """All work / that of the slowest rank."""
        ranks = chunk_ranks(schedule, (len(balance) + 1) // 2 if schedule == "folded" else len(balance))
        load = [0.0] * (max(ranks) + 1)
        for rank, (first, stop) in zip(ranks, cuts(balance), strict=True):
            load[rank] += sum(times[first:stop])
        return sum(load) / max(load)

    def row(self, schedule: str, stages: int, by_hand: tuple[int, ...] | None = None) -> Row:
        """A step with the balance given, or with ours."""
        times = LayerTimes(self.forward, self.backward, lambda size: self.machine.message_seconds([size]))
        case = PipelineCase(schedule, ("never",) * stages, self.micro_batches, self.walk, times, None)
        staged = stage(case, by_hand) if by_hand else choose(case)
        free, real = staged.timeline(transfers=False).makespan, staged.timeline().makespan
        cap = self.cap(staged.balance, self.both, schedule)
        alone = case.alone
        sent = sum(map(staged.route_bytes, staged.pipeline.routes))
        return Row(
            *(self.case.network, self.case.model, self.case.size, schedule, stages, bool(by_hand), staged.balance),
            cap=cap,
            speed_up=alone / real,
            work=alone / stages / real,
            imbalance=(alone / cap - alone / stages) / real,
            bubble=(free - alone / cap) / real,
            transfers=(real - free) / real,
            bytes=2 * self.micro_batches * sent,
        )


def all_rows(simulated: Simulated, stages: Sequence[int]) -> list[Row]:
    """By hand on 6 stages, in gpipe as in the paper and in 1f1b; ours on all, in every schedule."""
    rows = [simulated.row(schedule, n) for schedule in SCHEDULES for n in stages]
    if BY_HAND_STAGES in stages:
        hand = simulated.by_hand()
        rows += [simulated.row(schedule, BY_HAND_STAGES, hand) for schedule in ("gpipe", "1f1b")]
    return rows
