"""The map of a scene against MONAI's sliding window, with the same weights: whole commands, taken in turn.

    python -m benchmarks.whole_scene.sliding_window [--side 4096] [--repeats 3] [--threads 2] [--json FILE]

Ours is `tiledseg predict` as a user types it: one process, then one rank a thread, and the one process with freed
memory returned. The others read the scene by rasterio, normalise it, predict it by windows of 512 px that overlap by a
quarter, four at a time, and write the classes by rasterio (`sliding_window_job`): by MONAI's `sliding_window_inference`
where it is installed, else by windows of our own that do as it does. They run as they are, with the allocator told to
keep freed memory as our commands tell it, and then with channels last too.

Each map is held against that of the undivided scene (`--tiling.grid 1`): in how many pixels does it differ? Exits 1
where one of ours differs in any.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import rasterio

from benchmarks.launching import python, python_ranks
from benchmarks.spread import Spread, markdown, ratios

OURS, RANKS, RETURNED = "tiledseg predict", "tiledseg predict, ranks", "tiledseg predict, freed memory returned"
WINDOWS = "sliding window"
KEPT, LAST = "sliding window, freed memory kept", "sliding window, kept, channels last"
NAMES = (OURS, RANKS, RETURNED, WINDOWS, KEPT, LAST)


@dataclass(frozen=True)
class Job:
    """A command that writes a map; `threads` of each of its processes; `variables` of its environment."""

    command: Sequence[str]
    output: Path
    threads: int
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Taken:
    """By one map. `system`: the part of `cpu` that the kernel took; `memory` in bytes, of the largest process."""

    seconds: float
    cpu: float
    system: float
    memory: int


def contestants(root: Path, options: argparse.Namespace) -> dict[str, Job]:
    """By name."""
    outputs = {name: root / f"{number}.tif" for number, name in enumerate(NAMES)}
    threads = options.threads

    def ours(name: str, start: Sequence[str], count: int, **variables: str) -> Job:
        return Job([*start, *_predict(root, outputs[name])], outputs[name], count, variables)

    def windows(name: str, *flags: str) -> Job:
        words = [str(root / "run"), str(root / "scene.tif"), str(outputs[name]), *flags]
        return Job(python("benchmarks.whole_scene.sliding_window_job", *words), outputs[name], threads)

    return {
        OURS: ours(OURS, [sys.executable], threads),
        RANKS: ours(RANKS, python_ranks(threads), 1),
        RETURNED: ours(RETURNED, [sys.executable], threads, TILEDSEG_KEEP_FREED_MEMORY="0"),
        WINDOWS: windows(WINDOWS),
        KEPT: windows(KEPT, "--kept"),
        LAST: windows(LAST, "--kept", "--channels-last"),
    }


def _predict(root: Path, output: Path, *more: str) -> list[str]:
    files = ["--checkpoint", str(root / "run"), "--image", str(root / "scene.tif"), "--output", str(output)]
    return ["-m", "tiledseg.predict", *files, "--verbosity", "0", *more]


def run(job: Job, limit: float) -> Taken:
    """Runs a command to its end; RuntimeError where it fails or takes longer than `limit` seconds."""
    job.output.unlink(missing_ok=True)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "TILEDSEG_"))}
    environ = {**inherited, "OMP_NUM_THREADS": str(job.threads), **job.variables}
    begun = time.perf_counter()
    with tempfile.TemporaryFile("w+") as said:
        timed = [sys.executable, "-c", _TIMED, str(limit), *job.command]
        done = subprocess.run(timed, stdout=subprocess.PIPE, stderr=said, text=True, env=environ, check=False)
        seconds = time.perf_counter() - begun
        if done.returncode:
            said.seek(0)
            raise RuntimeError(f"{job.command[-1]} ended with code {done.returncode}: {said.read()[-500:]}")
    user, system, memory = json.loads(done.stdout.splitlines()[-1])
    return Taken(seconds, user + system, system, memory)


# A process of its own, whose children are one job: the system counts theirs together.
_TIMED = """
import json, resource, subprocess, sys
code = subprocess.run(sys.argv[2:], timeout=float(sys.argv[1]), stdout=subprocess.DEVNULL).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([used.ru_utime, used.ru_stime, used.ru_maxrss * 1024]))
sys.exit(code)
"""


def prepare(root: Path, options: argparse.Namespace) -> None:
    """The scene, and a network that has seen a small one."""
    for name, side in (("small", "256"), ("scene", str(options.side))):
        files = ["--image", f"{root}/{name}.tif", "--labels", f"{root}/{name}-labels.tif"]
        _quietly(python("tiledseg.scene", "--size", side, side, "--seed", "1", *files))
    network = ["--model.levels", str(options.levels), "--model.base_channels", str(options.base_channels)]
    data = ["--data.images", f"{root}/small.tif", "--data.labels", f"{root}/small-labels.tif", "--data.classes", "5"]
    how = ["--train.epochs", "30", "--tiling.grid", "1", "--run.output", f"{root}/run", "--run.verbosity", "0"]
    _quietly(python("tiledseg.train", *data, *network, *how))
    _quietly([sys.executable, *_predict(root, root / "exact.tif", "--tiling.grid", "1")])


def _quietly(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def differing(one: Path, other: Path) -> int:
    """Pixels in which two maps differ."""
    with rasterio.open(one) as first, rasterio.open(other) as second:
        return int((first.read(1) != second.read(1)).sum(dtype=np.int64))


def table(taken: Mapping[str, Sequence[Taken]], wrong: Mapping[str, int]) -> str:
    ours = [name for name in (OURS, RANKS) if name in taken]
    head = (
        "who",
        "seconds",
        *(f"over that of {name}" for name in ours),
        "CPU s",
        "of the kernel",
        "peak GB",
        "wrong px",
    )
    return markdown(head, [_row(name, taken, ours, wrong[name]) for name in taken])


def _row(name: str, taken: Mapping[str, Sequence[Taken]], ours: Sequence[str], wrong: int) -> tuple[object, ...]:
    def of(who: str, key: str) -> list[float]:
        return [getattr(one, key) for one in taken[who]]

    over = [ratios(of(name, "seconds"), of(measure, "seconds")) for measure in ours]
    cpu, system, memory = (Spread.of(of(name, key)).median for key in ("cpu", "system", "memory"))
    return (
        name,
        Spread.of(of(name, "seconds")),
        *over,
        f"{cpu:.1f}",
        f"{system:.1f}",
        f"{memory / 1e9:.2f}",
        f"{wrong:,}",
    )


def main() -> int:
    options = _parser().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        prepare(root, options)
        jobs = {name: job for name, job in contestants(root, options).items() if name in (options.only or NAMES)}
        taken: dict[str, list[Taken]] = {name: [] for name in jobs}
        for _ in range(options.repeats):
            for name, job in jobs.items():
                taken[name].append(run(job, options.limit))
        wrong = {name: differing(job.output, root / "exact.tif") for name, job in jobs.items()}
    print(f"Scene {options.side} x {options.side} x 4, U-Net L={options.levels}, {options.base_channels} channels,")
    print(f"fp32; {options.threads} threads or ranks, load {os.getloadavg()[0]:.1f}\n")
    print(table(taken, wrong))
    if options.json:
        plain = {name: [vars(one) for one in every] for name, every in taken.items()}
        Path(options.json).write_text(json.dumps({"options": vars(options), "taken": plain, "wrong": wrong}) + "\n")
    return 1 if any(wrong[name] for name in jobs if name in (OURS, RANKS, RETURNED)) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--side", type=int, default=4096, help="pixels a side of the scene")
    parser.add_argument("--levels", type=int, default=4)
    parser.add_argument("--base-channels", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=float, default=300, help="seconds a map may take")
    parser.add_argument("--only", nargs="+", choices=NAMES, help="contestants (default: all)")
    parser.add_argument("--json", help="file for the figures")
    return parser


if __name__ == "__main__":
    sys.exit(main())
