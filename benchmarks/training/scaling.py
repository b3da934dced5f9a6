"""Strong scaling of training: one scene on one rank of a thread, and over several, in mode read and in mode layer.

    python -m benchmarks.training.scaling [--side 4096] [--ranks 2] [--rounds 3] [--epochs 7] [--json FILE]

Each job is alone on the machine, one after the other in each round; of its epochs, an optimizer step each, the first
three touch memory and do not count, and the median of the others does. Ratios are of one round. Exits 1 where losses
differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from benchmarks.spread import Spread, markdown, ratios
from benchmarks.training.job import Job
from benchmarks.training.running import TOLERANCE, drawn_scene, end, epoch_of, started, worst_difference

TOUCHING = 3  # epochs in which memory is touched for the first time
ALONE = "one rank"


def scaling_jobs(image: str, labels: str, side: int, ranks: int, levels: int, channels: int) -> dict[str, Job]:
    """By name."""

    def job(ranks: int, halo: str) -> Job:
        tiles = (ranks, 1)
        return Job("benchmarks.training.ours", image, labels, side, tiles, levels, channels, 1, True, True, ranks, halo)

    return {ALONE: job(1, "read"), **{f"{ranks} ranks, mode {halo}": job(ranks, halo) for halo in ("read", "layer")}}


def epochs_of(job: Job, epochs: int) -> list[dict[str, float]]:
    """Of a job that has the machine to itself, without the first ones."""
    process = started(job)
    found = [epoch_of(process) for _ in range(TOUCHING + epochs)]
    end(process)
    process.wait(60)
    return found[TOUCHING:]


def main() -> int:
    options = _parser().parse_args()
    with drawn_scene(options.side) as (image, labels):
        jobs = scaling_jobs(image, labels, options.side, options.ranks, options.levels, options.base_channels)
        rounds = [{name: epochs_of(job, options.epochs) for name, job in jobs.items()} for _ in range(options.rounds)]
    medians = {name: [statistics.median(e["seconds"] for e in each[name]) for each in rounds] for name in jobs}
    network = f"U-Net L={options.levels}, {options.base_channels} channels, fp32"
    print(f"Raster {options.side} x {options.side} x 4, {network}, a thread a rank;")
    print(f"{options.rounds} rounds of {options.epochs} epochs that count\n")
    rows = [
        (
            name,
            Spread.of(medians[name]),
            ratios(medians[ALONE], medians[name]),
            f"{job.efficiency:.3f}",
            f"{statistics.median(e['cpu_seconds'] for each in rounds for e in each[name]):.2f}",
        )
        for name, job in jobs.items()
    ]
    print(markdown(("who", "seconds an epoch", "speed-up", "E", "CPU seconds an epoch"), rows))
    worst = worst_difference(epoch for each in rounds for epochs in each.values() for epoch in epochs)
    print(f"\nLosses differ by {worst:.1e} relative at most.")
    if options.json:
        Path(options.json).write_text(json.dumps({"options": vars(options), "rounds": rounds}, indent=1) + "\n")
    return 0 if worst < TOLERANCE else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--side", type=int, default=4096, help="pixels a side of the raster")
    parser.add_argument("--levels", type=int, default=5)
    parser.add_argument("--base-channels", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=7, help="of each job, besides the first three")
    parser.add_argument("--json", help="file for the figures")
    return parser


if __name__ == "__main__":
    sys.exit(main())
