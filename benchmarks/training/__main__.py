"""How fast does this machine train, against the loop that a user would write? All in one run, taken in turn.

    python -m benchmarks.training [--side 2048] [--repeats 5] [--threads 2] [--grid 1] [--json FILE]

The plain loop: 512 px tiles with the same exact halo (so the same gradient), rasterio windows through a DataLoader with
one worker, one loss and one backward a tile; as torch has it by default, then with the allocator told to keep freed
memory as our commands tell it, then with channels last too. Ours: the trainer's own step and reader; one process with
--threads threads, its tiles as large as --grid makes them, and as many ranks of one thread each: in mode read, a tile
a rank, and in mode layer. Same network, raster and weights; an epoch of one optimizer step each. Each contestant is a
job of its own, which waits while another one works; ratios are taken turn by turn. Exits 1 where losses differ.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.spread import Spread, markdown, ratios
from benchmarks.training.job import Job
from benchmarks.training.running import (
    TOLERANCE,
    TOUCHING,
    Scene,
    drawn_scene,
    end,
    epoch_of,
    started,
    worst_difference,
)

PLAIN, KEPT, LAST = "plain loop", "plain loop, freed memory kept", "plain loop, kept, channels last"
RETURNED, OURS = "tiledseg, freed memory returned", "tiledseg, one process"
READ, LAYER = "tiledseg, ranks, mode read", "tiledseg, ranks, mode layer"
NAMES = (PLAIN, KEPT, LAST, RETURNED, OURS, READ, LAYER)
Turns = dict[str, list[dict[str, float]]]


def contestants(options: argparse.Namespace, scene: Scene) -> dict[str, Job]:
    """By name."""
    tiles = {"plain": (-(-options.side // 512),) * 2, "ours": (options.grid,) * 2}

    def job(who: str, kept: bool = True, last: bool = True, ranks: int = 1, halo: str = "read") -> Job:
        files = f"benchmarks.training.{who}", *scene
        cut = (ranks, 1) if ranks > 1 else tiles[who]
        network = options.levels, options.base_channels
        return Job(*files, cut, *network, options.threads // ranks, kept, last, ranks, halo)

    return {
        PLAIN: job("plain", kept=False, last=False),
        KEPT: job("plain", last=False),
        LAST: job("plain"),
        RETURNED: job("ours", kept=False),
        OURS: job("ours"),
        READ: job("ours", ranks=options.threads),
        LAYER: job("ours", ranks=options.threads, halo="layer"),
    }


def take_turns(jobs: Mapping[str, Job], repeats: int) -> Turns:
    """What each epoch of each job has taken, without the first ones, in which memory is touched for the first time."""
    with ExitStack() as stack:
        running = {name: stack.enter_context(started(job)) for name, job in jobs.items()}
        turns = [{name: epoch_of(process) for name, process in running.items()} for _ in range(TOUCHING + repeats)]
        for process in running.values():
            end(process)
    return {name: [turn[name] for turn in turns[TOUCHING:]] for name in jobs}


def table(jobs: Mapping[str, Job], turns: Turns, pixels: int) -> str:
    head = (
        "who",
        "core pixels a second, million",
        *(f"its time over that of {name}" for name in _measures(turns)),
        "E",
        "CPU seconds an epoch",
        "of the kernel",
        "peak GB",
    )
    return markdown(head, [_row(name, job, turns, pixels) for name, job in jobs.items()])


def _measures(turns: Turns) -> list[str]:
    """Ours in one process, and whoever of us is the fastest."""
    fastest = min(
        (name for name in turns if "tiledseg" in name), key=lambda name: sum(e["seconds"] for e in turns[name])
    )
    return list(dict.fromkeys((OURS, fastest)))


def _row(name: str, job: Job, turns: Turns, pixels: int) -> tuple[object, ...]:
    def of(who: str, key: str) -> list[float]:
        return [epoch[key] for epoch in turns[who]]

    rates = Spread.of([pixels / seconds / 1e6 for seconds in of(name, "seconds")])
    cpu, kernel, memory = (Spread.of(of(name, key)).median for key in ("cpu_seconds", "kernel_seconds", "memory_bytes"))
    over = [ratios(of(name, "seconds"), of(measure, "seconds")) for measure in _measures(turns)]
    return name, rates, *over, f"{job.efficiency:.3f}", f"{cpu:.1f}", f"{kernel:.2f}", f"{memory / 1e9:.2f}"


def main() -> int:
    options = _parser().parse_args()
    with drawn_scene(options.side) as scene:
        jobs = contestants(options, scene)
        if options.only:
            jobs = {name: jobs[name] for name in dict.fromkeys((*options.only, OURS))}
        turns = take_turns(jobs, options.repeats)
    worst = worst_difference([epoch for epochs in turns.values() for epoch in epochs])
    print(
        f"Raster {options.side} x {options.side} x 4, U-Net L={options.levels}, {options.base_channels} channels, fp32;"
    )
    print(
        f"{options.threads} threads or ranks, grid of the one process {options.grid}, load {os.getloadavg()[0]:.1f}\n"
    )
    print(table(jobs, turns, options.side**2))
    print(f"\nLosses differ by {worst:.1e} relative at most.")
    if options.json:
        found: dict[str, Any] = {"options": vars(options), "turns": turns, "losses_differ_by": worst}
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    return 0 if worst < TOLERANCE else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--side", type=int, default=2048, help="pixels a side of the raster")
    parser.add_argument("--grid", type=int, default=1, help="our tiles a side")
    parser.add_argument("--levels", type=int, default=5)
    parser.add_argument("--base-channels", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=NAMES, help="contestants besides ours")
    parser.add_argument("--json", help="file for the figures")
    return parser


if __name__ == "__main__":
    sys.exit(main())
