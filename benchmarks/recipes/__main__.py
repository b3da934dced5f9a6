"""The recipes of `jobs/recipes` on small data in their data sets' layouts: trained, mapped, scored; on 1, 2, 4 ranks.

    python -m benchmarks.recipes [--recipes NAME ...] [--ranks 1 2 4] [--epochs 4] [--precision fp64]
        [--limit 300]

Writes the data and seeded stand-ins for published weights into a folder that it removes again. Of a recipe only
the number after `mpirun -n` differs from run to run. Prints a table; ends with 1 where losses or scores differ, in
fp64 or fp32.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.launching import Done, mpirun, python, run_process
from benchmarks.recipes.layouts import write_workplace
from benchmarks.recipes.small import MAPPED, SMALL
from tiledseg.errors import CommunicationError

BOUND = 1e-8
"""Losses, after some steps, relative to those of the first run."""


class Result(NamedTuple):
    """Of one run: losses of its steps, pixels a second of its median step, its last validation, score of its map."""

    losses: tuple[float, ...]
    speed: float
    validation: float
    score: float


def main() -> int:
    options = _parser().parse_args()
    print("| recipe | ranks | steps | loss, first to last | largest difference | Mpx/s | mean IoU | of one map |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        write_workplace(Path(folder))
        return max(_recipe(name, options) for name in options.recipes)


def _recipe(name: str, options: argparse.Namespace) -> int:
    """Prints a line a number of ranks; 1 where they differ."""
    found = [measure(name, ranks, options) for ranks in options.ranks]
    for ranks, result in zip(options.ranks, found, strict=True):
        losses = f"{result.losses[0]:.6f} to {result.losses[-1]:.6f}"
        print(
            f"| {name} | {ranks} | {len(result.losses)} | {losses} | {difference(result, found[0]):.1e} "
            f"| {result.speed / 1e6:.3f} | {result.validation:.6f} | {result.score:.6f} |",
            flush=True,
        )
    return int(any(difference(result, found[0]) > BOUND for result in found))


def difference(result: Result, first: Result) -> float:
    """The largest of the losses' relative differences, and of the scores' differences."""
    losses = [abs(a / b - 1) for a, b in zip(result.losses, first.losses, strict=True)]
    return max(*losses, abs(result.validation - first.validation), abs(result.score - first.score))


def measure(name: str, ranks: int, options: argparse.Namespace) -> Result:
    """Train on so many ranks, in the folder where the data lies; map an image that was held out, and score the map."""
    output = Path("runs") / f"{name}-{ranks}"
    limit, epochs = options.limit, str(options.epochs)
    flags = ["--config", f"jobs/recipes/{name}.yaml", *SMALL[name], "--train.epochs", epochs]
    flags += ["--train.validate_every", epochs, "--train.precision", options.precision, "--run.output", str(output)]
    _done(mpirun(ranks, "tiledseg.train", *flags, "--run.verbosity", "0"), limit)
    image, labels = MAPPED[name]
    classes = f"{output}/map.tif"
    mapped = ["--checkpoint", str(output), "--image", image, "--output", classes, "--verbosity", "0"]
    _done(mpirun(ranks, "tiledseg.predict", *mapped, "--tiling.grid", "1"), limit)
    named = _read_yaml(Path(f"jobs/recipes/{name}.yaml"))["data"]["classes"]
    told = ["--prediction", classes, "--labels", labels, "--classes", named, "--format", "json"]
    scores = json.loads(_done(python("tiledseg.evaluate", *told), limit).out)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    return Result(
        tuple(line["loss"] for line in steps),
        statistics.median(line["pixels"] / line["seconds"] for line in steps),
        _read(output / "summary.json")["val"]["mean_iou"],
        scores["mean_iou"],
    )


def _done(command: Sequence[str], limit: float) -> Done:
    done = run_process(command, limit)
    if done.code:
        raise CommunicationError(f"'{' '.join(command)}' ended with code {done.code}: {done.reason}")
    return done


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _read_yaml(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=tuple(SMALL), default=tuple(SMALL))
    parser.add_argument("--ranks", nargs="+", type=int, default=(1, 2, 4))
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--precision", choices=("fp64", "fp32"), default="fp64")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds a command")
    return parser


if __name__ == "__main__":
    sys.exit(main())
