r"""The paper's table of pipelines, by SIMULATION from measured layer times: their balance against ours, 1 to 6 stages.

    python -m benchmarks.pipeline.paper_table --times benchmarks/pipeline/paper_times.json

The time of each layer was measured by itself, by the program of commit 34d75aec. All times of a case are divided by one
number, so that the whole network runs at --flops: messages, at --bandwidth and --latency, stand to computing as they do
on such a device. A schedule is replayed with these times (`tiledseg.pipeline.simulation`): no pipeline runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.pipeline.paper_network import NETWORKS
from benchmarks.pipeline.paper_report import caps_table, shares_table, speed_table
from benchmarks.pipeline.paper_simulation import BY_HAND_STAGES, Simulated, all_rows
from benchmarks.pipeline.paper_times import Case, Measurement, legal_size
from tiledseg.architecture.presets import PRESETS
from tiledseg.errors import ConfigError
from tiledseg.planning.walk.cost_model import Machine


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
    measurement = Measurement.load(options.times)
    missing = [case.key for case in cases if case not in measurement.cases]
    if missing:
        raise ConfigError(f"{options.times} has no times of {', '.join(missing)}; give others")
    machine = Machine(options.flops, options.bandwidth, options.latency)
    simulated = [Simulated(case, measurement, machine, options.micro_batches) for case in cases]
    rows = [row for one in simulated for row in all_rows(one, options.stages)]
    print(_heading(measurement, options))
    if BY_HAND_STAGES in options.stages:
        print(caps_table(simulated, rows), shares_table(rows, max(options.sizes)), sep="\n\n", end="\n\n")
    print(speed_table(rows))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows]))
    if options.plot is not None:
        from benchmarks.pipeline.paper_plot import write_plot

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
    add("--times", type=Path, metavar="FILE", required=True, help="times of the layers")
    add("--networks", nargs="+", choices=NETWORKS, default=NETWORKS)
    add("--models", nargs="+", choices=tuple(PRESETS), default=tuple(PRESETS))
    add("--sizes", nargs="+", type=int, default=(192, 512, 1024), help="px a side; rounded up to legal ones")
    add("--stages", nargs="+", type=int, default=(1, 2, 3, 4, 5, 6))
    add("--micro-batches", type=int, default=24)
    add("--flops", type=float, default=1e13, help="what the whole network is taken to run at (default 1e13)")
    add("--bandwidth", type=float, default=4e10, help="between GPUs of a node (default 4e10; NVLink on Summit: 5e10)")
    add("--latency", type=float, default=20e-6)
    add("--json", type=Path, metavar="FILE", help="all rows")
    add("--plot", type=Path, metavar="FILE.png")
    return parser


if __name__ == "__main__":
    sys.exit(main())
