r"""The paper's table of pipelines, by SIMULATION from measured layer times: their balance against ours, 1 to 6 stages.

    python benchmarks/pipeline/paper_table.py --times benchmarks/pipeline/paper_times.json   simulates again
    python benchmarks/pipeline/paper_table.py --save times.json                              measures first
    python benchmarks/pipeline/paper_table.py --check --models small --sizes 192 512         sums against wholes

Each layer's time is measured by itself on this machine. All times of a case are then divided by one number, so that
the whole network runs at --flops: messages, at --bandwidth and --latency, stand to computing as they do on such a
device. A schedule is replayed with these times (`tiledseg.pipeline.simulation`): no pipeline runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # how tables are written
import torch
from paper_network import BANDS, NETWORKS, network_layers
from paper_report import caps_table, shares_table, speed_table, sums_table
from paper_times import Case, Measurement, legal_size, measure, sums_and_wholes

from tiledseg.architecture.presets import PRESETS
from tiledseg.errors import ConfigError
from tiledseg.pipeline.balance import cuts, parse_balance
from tiledseg.pipeline.schedule import SCHEDULES, chunk_ranks
from tiledseg.planning.balance_choice import choose
from tiledseg.planning.cost import layer_costs
from tiledseg.planning.halo_traffic import Sent
from tiledseg.planning.machine import Machine, parse_bandwidth, parse_flops, parse_latency
from tiledseg.planning.staged_pipeline import PipelineCase, stage
from tiledseg.planning.stages_cost import StagePrices

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
        self.layers = network_layers(case.network, case.model, measurement.base_channels)
        self.costs = layer_costs(self.layers, BANDS, (case.size, case.size), VALUE_BYTES)
        self.prices = StagePrices(self.layers, self.costs, VALUE_BYTES)
        self.work = [cost.multiply_adds for cost in self.costs]
        times = measurement.cases[case]
        self.measured = sum(t.forward + t.backward for t in times)
        scale = machine.compute_seconds(sum(self.work)) / self.measured
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
        case = PipelineCase(
            schedule,
            ("never",) * stages,
            self.micro_batches,
            self.prices,
            self.forward,
            self.backward,
            lambda size: self.machine.message_seconds(Sent(1, size)),
            None,
        )
        staged = stage(case, by_hand) if by_hand else choose(case)
        free, real = staged.timeline(transfers=False).makespan, staged.timeline().makespan
        cap = self.cap(staged.balance, self.both, schedule)
        alone = self.micro_batches * sum(self.both)
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


def main(argv: Sequence[str] | None = None) -> int:
    """Measures or reads, simulates, prints."""
    options = _parser().parse_args(argv)
    try:
        _run(options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(options: argparse.Namespace) -> None:
    cases = [
        Case(network, model, legal_size(model, size))
        for network in options.networks
        for model in options.models
        for size in options.sizes
    ]
    if options.check:
        torch.set_num_threads(options.threads)
        found = sums_and_wholes(cases, options.base_channels, options.repeats)
        print(sums_table(found))
        return
    if options.times is not None:
        measurement = Measurement.load(options.times)
        missing = [case.key for case in cases if case not in measurement.cases]
        if missing:
            raise ConfigError(
                f"{options.times} has no times of {', '.join(missing)}; leave --times out to measure them"
            )
    else:
        torch.set_num_threads(options.threads)
        measurement = measure(cases, options.base_channels, options.repeats, torch.device(options.device))
        if options.save is not None:
            measurement.save(options.save)
    machine = Machine(parse_flops(options.flops), parse_bandwidth(options.bandwidth), parse_latency(options.latency))
    simulated = [Simulated(case, measurement, machine, options.micro_batches) for case in cases]
    rows = [row for one in simulated for row in all_rows(one, options.stages)]
    print(_heading(measurement, options))
    if BY_HAND_STAGES in options.stages:
        print(caps_table(simulated, rows), shares_table(rows, max(options.sizes)), sep="\n\n", end="\n\n")
    print(speed_table(rows))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows]))
    if options.plot is not None:
        from paper_plot import write_plot

        write_plot(options.plot, rows, _heading(measurement, options))


def _heading(measurement: Measurement, options: argparse.Namespace) -> str:
    return (
        f"SIMULATED from layer times measured on {measurement.machine}, float32, {measurement.base_channels} base "
        f"channels, least of {measurement.repeats}; scaled to {options.flops} flop/s; {options.bandwidth}/s and "
        f"{options.latency} a message; {options.micro_batches} micro-batches a step"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add: Callable[..., argparse.Action] = parser.add_argument
    add("--times", type=Path, metavar="FILE", help="measured before: measure nothing")
    add("--save", type=Path, metavar="FILE", help="where to keep what is measured")
    add("--check", action="store_true", help="only compare the sums of layer times with whole networks, on the CPU")
    add("--networks", nargs="+", choices=NETWORKS, default=NETWORKS)
    add("--models", nargs="+", choices=tuple(PRESETS), default=tuple(PRESETS))
    add("--sizes", nargs="+", type=int, default=(192, 512, 1024), help="px a side; rounded up to legal ones")
    add("--stages", nargs="+", type=int, default=(1, 2, 3, 4, 5, 6))
    add("--base-channels", type=int, default=32)
    add("--repeats", type=int, default=2)
    add("--threads", type=int, default=1)
    add("--device", default="cpu")
    add("--micro-batches", type=int, default=24)
    add("--flops", default="10T", help="what the whole network is taken to run at (default 10T)")
    add("--bandwidth", default="40GB", help="between GPUs of a node (default 40GB; NVLink on Summit: 50 at most)")
    add("--latency", default="20us")
    add("--json", type=Path, metavar="FILE", help="all rows")
    add("--plot", type=Path, metavar="FILE.png")
    return parser


if __name__ == "__main__":
    sys.exit(main())
