"""What does it cost to give freed memory back to the system? Whole runs of `train` and `predict`, taken in turn.

    python -m benchmarks.memory_kept [--train-side 2048] [--map-side 4096] [--pairs 3] [--only NAME ...]

Each contestant is a set of environment variables, some with a library to preload; `kept` is none: it is the default. A
turn runs every contestant once, the next turn in the opposite order; ratios are taken turn by turn against `returned`,
what the C library does by itself. Seconds are those of a training step after the first (from metrics.jsonl) and of a
whole `predict`; CPU seconds and peak memory are those of the process, as the system counts them. `growth` is what the
last step's peak has over the third's: memory that is kept must not grow without end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.spread import Spread, markdown, ratios

ROOT = Path(__file__).resolve().parents[2]
BASE = "returned"
LEVELS, CHANNELS = {"train": 5, "map": 4}, {"train": 8, "map": 12}


@dataclass(frozen=True)
class Taken:
    """One run of one contestant. `system`: the part of `cpu` that the kernel took; `memory` in bytes."""

    seconds: float
    cpu: float
    system: float
    memory: int
    growth: float | None = None


@dataclass(frozen=True)
class Job:
    """A command whose seconds are its own, or those of the steps in `metrics`."""

    name: str
    command: tuple[str, ...]
    metrics: Path | None = None


def contestants(preload: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Environment variables by name. `preload`: allocators by name and path."""
    back = {"TILEDSEG_KEEP_FREED_MEMORY": "0"}
    partly = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**30)}
    found = {
        BASE: back,
        "kept": {},
        "kept up to 1 GiB": partly,
        "huge pages": {**back, "THP_MEM_ALLOC_ENABLE": "1"},
        "kept, huge pages": {"THP_MEM_ALLOC_ENABLE": "1"},
    }
    return found | {name: {**back, "LD_PRELOAD": path} for name, path in preload.items()}


def run(job: Job, variables: Mapping[str, str], threads: int, limit: float) -> Taken:
    """Runs a command to its end; RuntimeError where it fails, and TimeoutError after `limit` seconds."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "TILEDSEG_"))}
    environ = {**inherited, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT), **variables}
    begun = time.perf_counter()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(job.command, stdout=said, stderr=said, env=environ)
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            if time.perf_counter() - begun > limit:
                process.kill()
                raise TimeoutError(f"{job.name} ran longer than {limit:.0f} s")
            time.sleep(0.02)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - begun
        if process.returncode:
            said.seek(0)
            raise RuntimeError(f"{job.name} ended with code {process.returncode}: {said.read()[-500:]}")
    growth = None
    if job.metrics is not None:
        steps = [line for line in map(json.loads, job.metrics.read_text().splitlines()) if "loss" in line]
        seconds = statistics.mean(step["seconds"] for step in steps[1:])
        growth = steps[-1]["memory_bytes"] / steps[min(2, len(steps) - 1)]["memory_bytes"]
    return Taken(seconds, usage.ru_utime + usage.ru_stime, usage.ru_stime, usage.ru_maxrss * 1024, growth)


def jobs(folder: Path, options: argparse.Namespace) -> list[Job]:
    """Training with the whole image as a tile; maps with grid auto and 4. Scenes and a network are made here."""
    train = _scene(folder, "train", options.train_side)
    found = [_training(folder / "trained", train, "train", options.train_grid, options.steps)]
    if options.map_side:
        image, _ = _scene(folder, "map", options.map_side)
        small = _scene(folder, "small", 256)
        subprocess.run(_training(folder / "network", small, "map", 1, 1).command, check=True, env=_plain())
        for grid in ("auto", "4"):
            words = ["--checkpoint", str(folder / "network"), "--image", str(image), "--tiling.grid", grid]
            output = ["--output", str(folder / f"map-{grid}.tif"), "--verbosity", "0"]
            command = (sys.executable, "-m", "tiledseg.predict", *words, *output)
            found.append(Job(f"map, grid {grid}", command))
    return found


def _scene(folder: Path, name: str, side: int) -> tuple[Path, Path]:
    paths = folder / f"{name}.tif", folder / f"{name}-labels.tif"
    files = ["--image", str(paths[0]), "--labels", str(paths[1])]
    command = [sys.executable, "-m", "tiledseg.scene", "--size", str(side), str(side), "--seed", "1", *files]
    subprocess.run(command, check=True, env=_plain())
    return paths


def _plain() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def _training(folder: Path, scene: tuple[Path, Path], network: str, grid: int, steps: int) -> Job:
    keys = {
        "data.images": scene[0],
        "data.labels": scene[1],
        "data.classes": 5,
        "tiling.grid": grid,
        "model.levels": LEVELS[network],
        "model.base_channels": CHANNELS[network],
        "train.epochs": steps,
        "run.output": folder,
        "run.verbosity": 0,
    }
    flags = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    return Job(f"train, grid {grid}", (sys.executable, "-m", "tiledseg.train", *flags), folder / "metrics.jsonl")


def main() -> None:
    options = _parser().parse_args()
    preload = dict(pair.split("=", 1) for pair in options.preload)
    everyone = {k: v for k, v in contestants(preload).items() if not options.only or k in (BASE, *options.only)}
    found: dict[str, dict[str, list[Taken]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for job in jobs(Path(temporary), options):
            taken = found.setdefault(job.name, {name: [] for name in everyone})
            for turn in range(options.pairs):
                for name in sorted(everyone, key=list(everyone).index, reverse=bool(turn % 2)):
                    if job.metrics is not None:  # else it would go on from its checkpoint
                        subprocess.run(["rm", "-rf", str(job.metrics.parent)], check=True)
                    taken[name].append(run(job, everyone[name], options.threads, options.limit))
            print(f"\n{job.name}\n{table(taken)}", flush=True)
    if options.json:
        plain = {job: {n: [vars(t) for t in ts] for n, ts in runs.items()} for job, runs in found.items()}
        options.json.write_text(json.dumps(plain, indent=1) + "\n")


def table(taken: Mapping[str, list[Taken]]) -> str:
    head = (
        "memory is",
        "seconds",
        "time over returned",
        "CPU seconds over returned",
        "of the kernel, s",
        "peak GB",
        "growth",
    )
    return markdown(head, [_row(name, runs, taken[BASE]) for name, runs in taken.items()])


def _row(name: str, runs: list[Taken], base: list[Taken]) -> tuple[object, ...]:
    def over(key: str) -> Spread:
        return ratios([getattr(t, key) for t in runs], [getattr(t, key) for t in base])

    system, memory = (Spread.of([getattr(t, key) for t in runs]).median for key in ("system", "memory"))
    seconds = Spread.of([t.seconds for t in runs])
    growth = max((f"{t.growth:.3f}" for t in runs if t.growth), default="")
    return name, seconds, over("seconds"), over("cpu"), f"{system:.1f}", f"{memory / 1e9:.2f}", growth


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--train-side", type=int, default=2048)
    parser.add_argument("--train-grid", type=int, default=1)
    parser.add_argument("--map-side", type=int, default=4096, help="0: no maps")
    parser.add_argument("--steps", type=int, default=3, help="of training; the first is not counted")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=float, default=300, help="seconds a run")
    parser.add_argument("--only", nargs="+", default=[], help="contestants besides 'returned' (default: all)")
    parser.add_argument("--preload", nargs="+", default=[], metavar="NAME=PATH", help="allocators to preload")
    parser.add_argument("--json", type=Path, help="file for all single runs")
    return parser


if __name__ == "__main__":
    main()
