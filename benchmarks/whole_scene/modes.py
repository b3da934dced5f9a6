"""One scene trained in the three halo modes: the same losses, and time, bytes, messages and memory beside the plan's.

    python -m benchmarks.whole_scene.modes [--size 4096] [--ranks 2 4] [--steps 4] [--folder DIR] [--json FILE]
    python -m benchmarks.whole_scene.modes --image FILE --labels FILE --classes K [--bands 1 2 3 4] ...

The scene is a synthetic one of `--size` pixels a side, or the given one.
Each run is the command that a user would type. What `plan` predicts rests on three figures of the machine, taken in the
same run: operations a second from mode read on as many ranks, bandwidth and latency from `doctor`. Exits 1 where losses
differ, or where bytes or messages are not those planned.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.launching import python_ranks, run_process
from benchmarks.spatial.step_case import check_losses, mesh_of
from benchmarks.spread import Spread, markdown
from tiledseg.errors import CommunicationError, ConfigError, TiledsegError
from tiledseg.raster.reading.reader import open_raster

BANDS = 4
MODES = ("read", "exchange", "layer")
CLASSES = 5
TINY = 128  # pixels a side of a scene whose tensors weigh nothing beside the interpreter and its libraries


@dataclass(frozen=True)
class Scene:
    """An image with labels, and how it is tiled. `bands` None: all of them."""

    image: Path
    labels: Path
    shape: tuple[int, int]
    classes: int
    grid: int
    bands: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return f"{self.image.name}, {self.shape[0]} x {self.shape[1]} px, {self.classes} classes, grid {self.grid}"

    @property
    def channels(self) -> int:
        return len(self.bands) if self.bands else BANDS


@dataclass(frozen=True)
class Run:
    """A training run: its ranks, its mode, and the lines of metrics.jsonl."""

    ranks: int
    mode: str
    lines: list[dict[str, Any]]

    def __str__(self) -> str:
        return f"{self.mode} on {self.ranks} ranks"

    @property
    def seconds(self) -> list[float]:
        """Of each step but the first, which waits for its data."""
        return [line["seconds"] for line in self.lines[1:]]

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.lines]

    @property
    def memory(self) -> int:
        return int(self.lines[-1]["memory_bytes"])


def main() -> int:
    options = _parser().parse_args()
    try:
        found = measure(options)
    except TiledsegError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(
        f"Scene {found['scene']}, U-Net L = {options.levels}, {options.base_channels} base "
        f"channels, fp32, {options.steps} steps, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n"
    )
    print(modes_table(found["rows"]))
    print(f"\nLosses of all runs agree to {found['largest_difference_of_losses']:.1e} relative.")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    wrong = [row for row in found["rows"] if not row["traffic_as_planned"]]
    for row in wrong:
        print(f"error: {row['mode']} on {row['ranks']} ranks did not send what was planned", file=sys.stderr)
    return 1 if wrong else 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The figures as plain values for JSON. Raises TiledsegError where the losses of two runs differ by more than 1e-5
    relative, CommunicationError where a command fails."""
    if options.steps < 2 or min(options.ranks) < 2:
        given = f"--steps {options.steps} and --ranks {' '.join(map(str, options.ranks))}"
        raise ConfigError(f"{given}; give at least 2 of each: the first step is not timed, one rank sends nothing")
    options.folder.mkdir(parents=True, exist_ok=True)
    scene, tiny = the_scene(options), write_scene(options, TINY, 2)
    runs = [train(options, scene, ranks, mode, options.steps) for ranks in options.ranks for mode in MODES]
    worst = check_losses([run.losses for run in runs], [str(run) for run in runs])
    rows = []
    for ranks in options.ranks:
        alike = [run for run in runs if run.ranks == ranks]
        fixed = train(options, tiny, ranks, "read", 1).memory
        machine = measured_machine(options, scene, alike[0], ranks)
        costs = plan(options, scene, ranks, machine)
        rows += [_row(run, costs[run.mode], fixed) | {"machine": machine} for run in alike]
    return {"scene": str(scene), "largest_difference_of_losses": worst, "load": os.getloadavg()[0], "rows": rows}


def the_scene(options: argparse.Namespace) -> Scene:
    """The given one, or one made up."""
    if options.image is None:
        return write_scene(options, options.size, options.grid)
    if options.labels is None or options.classes is None:
        raise ConfigError("--image is given; give --labels and --classes too")
    bands = tuple(options.bands) if options.bands else None
    with open_raster(str(options.image), list(bands) if bands else None, None) as reader:
        shape = reader.info.shape
    return Scene(options.image, options.labels, shape, options.classes, options.grid, bands)


def write_scene(options: argparse.Namespace, size: int, grid: int) -> Scene:
    """A synthetic scene, written where it is not there yet."""
    image, labels = (options.folder / f"{word}-{size}.tif" for word in ("image", "labels"))
    if not (image.exists() and labels.exists()):
        flags = ["--size", str(size), str(size), "--seed", "1", "--image", str(image), "--labels", str(labels)]
        command(["scene", *flags], options.limit)
    return Scene(image, labels, (size, size), CLASSES, grid)


def train(options: argparse.Namespace, scene: Scene, ranks: int, mode: str, steps: int) -> Run:
    """A run of `steps` optimizer steps, each on the whole scene."""
    output = options.folder / f"run-{scene.image.stem}-{mode}-{ranks}"
    shutil.rmtree(output, ignore_errors=True)  # of an earlier call: it would be resumed
    keys = {
        "data.images": scene.image,
        "data.labels": scene.labels,
        "data.classes": scene.classes,
        "tiling.grid": scene.grid,
        "model.levels": options.levels,
        "model.base_channels": options.base_channels,
        "parallel.halo": mode,
        "train.epochs": steps,
        "run.output": output,
        "run.verbosity": 0,
    }
    if scene.bands:
        keys["data.bands"] = list(scene.bands)
    if mode != "read":
        keys["parallel.mesh"] = "[{},{}]".format(*mesh_of(ranks))
    words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    command(["train", *words], options.limit, ranks)
    return Run(ranks, mode, [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()])


def measured_machine(options: argparse.Namespace, scene: Scene, read: Run, ranks: int) -> dict[str, float]:
    """flops of a rank, bandwidth and latency, as `plan` takes them."""
    work = plan(options, scene, ranks, {})["read"]["multiply_adds_rank"]
    answer = json.loads(command(["doctor", "--format", "json"], options.limit, ranks))
    transfers = sorted(answer["transfers"], key=lambda transfer: transfer["bytes"])
    rounds = 2 * math.ceil(math.log2(ranks))  # of an all-reduce: the planner counts them so
    return {
        "flops": 6 * work / statistics.median(read.seconds),  # 2 a multiply-add, backward twice the forward
        "bandwidth": transfers[-1]["bus_bytes_per_second"],
        "latency": transfers[0]["seconds"] / rounds,
    }


def plan(options: argparse.Namespace, scene: Scene, ranks: int, machine: dict[str, float]) -> dict[str, dict[str, Any]]:
    """The planner's row of each mode (layer: with a thin halo at each layer)."""
    flags = {
        "grid": scene.grid,
        "bands": scene.channels,
        "levels": options.levels,
        "base-channels": options.base_channels,
        "classes": scene.classes,
        "format": "json",
        **{key: f"{value:.6g}" for key, value in machine.items()},
    }
    words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    words += ["--size", *map(str, scene.shape), "--mesh", *map(str, mesh_of(ranks))]
    answer = json.loads(command(["plan", *words], options.limit))
    return {row["mode"]: row for row in answer["modes"]["costs"] if row["fusion"] in (None, 1)}


def command(words: Sequence[str], limit: float, ranks: int = 0) -> str:
    """What `python -m tiledseg.COMMAND` prints, under mpirun where `ranks` are given."""
    start = python_ranks(ranks) if ranks else [sys.executable]
    done = run_process([*start, "-m", f"tiledseg.{words[0]}", *words[1:]], limit)
    if done.code:
        raise CommunicationError(f"{words[0]} ended with code {done.code}: {done.reason}")
    return done.out


def _row(run: Run, cost: dict[str, Any], fixed: int) -> dict[str, Any]:
    sent = {(line["halo_bytes"], line["halo_messages"]) for line in run.lines}
    spent = sum(line["seconds"] for line in run.lines)
    return {
        "ranks": run.ranks,
        "mode": run.mode,
        "efficiency_E": cost["efficiency"],
        "losses": run.losses,
        "seconds": Spread.of(run.seconds).to_dict(),
        "planned_seconds": cost["milliseconds"] / 1000,
        "halo_bytes": run.lines[-1]["halo_bytes"],
        "halo_messages": run.lines[-1]["halo_messages"],
        "planned_halo_bytes": cost["bytes"],
        "planned_halo_messages": cost["messages"],
        "traffic_as_planned": sent == {(cost["bytes"], cost["messages"])},
        "memory_bytes": run.memory,
        "fixed_memory_bytes": fixed,
        "planned_memory_bytes": cost["memory_rank"],
        "communication_share": sum(line["communication_seconds"] for line in run.lines) / spent,
        "data_share": sum(line["data_seconds"] for line in run.lines) / spent,
    }


def modes_table(rows: Sequence[dict[str, Any]]) -> str:
    head = (
        "ranks",
        "mode",
        "E",
        "last loss",
        "seconds a step",
        "planned",
        "halo bytes a step",
        "planned",
        "messages",
        "planned",
        "peak memory a rank, MiB (fixed part)",
        "without it",
        "planned",
        "waiting for others",
    )
    return markdown(head, [_cells(row) for row in rows])


def _cells(row: dict[str, Any]) -> list[object]:
    own = row["memory_bytes"] - row["fixed_memory_bytes"]
    seconds = Spread(**row["seconds"])
    return [
        row["ranks"],
        row["mode"],
        f"{row['efficiency_E']:.3f}",
        f"{row['losses'][-1]:.6f}",
        seconds,
        f"{row['planned_seconds']:.3g}{_deviation(row['planned_seconds'], seconds.median)}",
        f"{row['halo_bytes']:,}",
        f"{row['planned_halo_bytes']:,}",
        f"{row['halo_messages']:,}",
        f"{row['planned_halo_messages']:,}",
        f"{row['memory_bytes'] / 2**20:.0f} ({row['fixed_memory_bytes'] / 2**20:.0f})",
        f"{own / 2**20:.0f}",
        f"{row['planned_memory_bytes'] / 2**20:.0f}{_deviation(row['planned_memory_bytes'], own)}",
        f"{row['communication_share']:.1%}",
    ]


def _deviation(planned: float, measured: float) -> str:
    """How far the plan is from what was measured."""
    return f" ({planned / measured - 1:+.0%})" if measured > 0 else ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", type=int, default=4096, help="pixels a side of the scene")
    parser.add_argument("--image", type=Path, help="a scene of your own, in place of a synthetic one")
    parser.add_argument("--labels", type=Path, help="its labels")
    parser.add_argument("--classes", type=int, help="its classes")
    parser.add_argument("--bands", type=int, nargs="+", help="its bands that are data; all unless given")
    parser.add_argument("--grid", type=int, default=8)
    parser.add_argument("--levels", type=int, default=5)
    parser.add_argument("--base-channels", type=int, default=4)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps, the first of which is not timed")
    parser.add_argument("--limit", type=float, default=3600, help="seconds after which a command is ended")
    parser.add_argument("--folder", type=Path, default=Path("runs/whole-scene-modes"))
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser


if __name__ == "__main__":
    sys.exit(main())
