"""Strong scaling of training: one scene on one rank of a thread, and over several, in mode read and in mode layer.

    python -m benchmarks.training.scaling [--side 4096] [--ranks 2] [--rounds 3] [--epochs 7] [--json FILE]

Each job is alone on the machine, one after the other in each round; of its epochs, an optimizer step each, the first
three touch memory and do not count, and the median of the others does. Ratios are of one round. Exits 1 where losses
differ.

Beside them the machine's limit: as many processes as ranks at once, which share nothing, each with a scene of its own
that has its part of the pixels. What they lack of a speed-up by their number, cores take from each other.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

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

ALONE = "one rank"
Epochs = list[dict[str, float]]


class Contestant(NamedTuple):
    """A job, and how many processes run one each `at_once`; `pixels`: of all of them."""

    job: Job
    at_once: int = 1

    @property
    def pixels(self) -> int:
        return self.at_once * self.job.side**2


def contestants(options: argparse.Namespace, whole: Scene, part: Scene) -> dict[str, Contestant]:
    """By name."""
    ranks, network = options.ranks, (options.levels, options.base_channels)

    def job(scene: Scene, ranks: int = 1, halo: str = "read") -> Job:
        return Job("benchmarks.training.ours", *scene, (ranks, 1), *network, 1, True, True, ranks, halo)

    return {
        ALONE: Contestant(job(whole)),
        f"{ranks} processes that share nothing": Contestant(job(part), ranks),
        **{f"{ranks} ranks, mode {halo}": Contestant(job(whole, ranks, halo)) for halo in ("read", "layer")},
    }


def side_of_part(side: int, ranks: int, levels: int) -> int:
    """Pixels a side of a scene that has one of so many parts of the pixels, in whole steps of the network's."""
    step = 1 << levels - 1
    return round(side / math.sqrt(ranks) / step) * step


def epochs_of(contestant: Contestant, epochs: int) -> Epochs:
    """Of one that has the machine to itself, without the first ones."""
    processes = [started(contestant.job) for _ in range(contestant.at_once)]
    found = [epoch_of(*processes) for _ in range(TOUCHING + epochs)]
    for process in processes:
        end(process)
        process.wait(60)
    return found[TOUCHING:]


def table(all_of_them: Mapping[str, Contestant], rounds: list[dict[str, Epochs]]) -> str:
    whole = all_of_them[ALONE].pixels

    def seconds(name: str) -> list[float]:
        """Of each round, for as many pixels as the whole has."""
        scale = whole / all_of_them[name].pixels
        return [scale * statistics.median(e["seconds"] for e in each[name]) for each in rounds]

    rows = [
        (
            name,
            Spread.of(seconds(name)),
            ratios(seconds(ALONE), seconds(name)),
            f"{contestant.job.efficiency:.3f}",
            f"{whole / contestant.pixels * statistics.median(e['cpu_seconds'] for r in rounds for e in r[name]):.2f}",
        )
        for name, contestant in all_of_them.items()
    ]
    return markdown(("who", "seconds an epoch", "speed-up", "E", "CPU seconds an epoch"), rows)


def main() -> int:
    options = _parser().parse_args()
    side_beside = side_of_part(options.side, options.ranks, options.levels)
    with drawn_scene(options.side) as whole, drawn_scene(side_beside) as part:
        all_of_them = contestants(options, whole, part)
        rounds = [
            {name: epochs_of(contestant, options.epochs) for name, contestant in all_of_them.items()}
            for _ in range(options.rounds)
        ]
    network = f"U-Net L={options.levels}, {options.base_channels} channels, fp32"
    print(f"Raster {options.side} x {options.side} x 4, {network}, a thread a rank;")
    print(f"{options.rounds} rounds of {options.epochs} epochs that count\n")
    print(table(all_of_them, rounds))
    trained = [name for name, contestant in all_of_them.items() if contestant.at_once == 1]
    worst = worst_difference(epoch for each in rounds for name in trained for epoch in each[name])
    print(f"\nLosses differ by {worst:.1e} relative at most.")
    if options.json:
        found: dict[str, Any] = {"options": vars(options), "rounds": rounds}
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
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
