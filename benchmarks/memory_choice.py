"""What a `memory.budget` costs by the clock, beside what the plan says: rebuilt, sent to a disk, and in blocks.

    python -m benchmarks.memory_choice --store FOLDER [--size 1024] [--channels 16] [--levels 4] [--norm instance]
        [--shares 0.8 0.65] [--steps 6] [--repeats 3]

Each run is the command that a user would type, on one rank of one thread: an image, an optimizer step of it all. Runs
take turns; ratios are taken turn by turn, to the run that keeps everything and gives freed memory back, as those with
a budget do. Budgets are shares of what a step needs with everything kept. Losses have to be the same to the last
bit; with blocks that of the first step to 1e-5.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.launching import run_process
from benchmarks.spread import Spread, markdown, ratios
from tiledseg.architecture.unet import UNet
from tiledseg.errors import CommunicationError, TiledsegError
from tiledseg.planning.memory.choice import step_choices

KEPT, RETURNED = "everything kept", "the same, freed memory returned"
CLASSES = 5
BLOCKS_APART = 1e-5  # of a loss in float32, relative: sums come in another order


@dataclass(frozen=True)
class Way:
    """Flags of the group `memory`, and variables of the environment."""

    flags: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    exact: bool = True


@dataclass(frozen=True)
class Run:
    seconds: float
    memory: int
    losses: tuple[float, ...]
    summary: dict[str, Any]

    @property
    def planned(self) -> float:
        """More time, as a share of a step."""
        told = self.summary["blocks"] or self.summary["rebuilt"]
        return float(told["extra_time_share"]) if told else 0.0

    @property
    def what(self) -> str:
        if self.summary["blocks"]:
            return "{} x {} blocks".format(*self.summary["blocks"]["shape"])
        told = self.summary["rebuilt"]
        return f"{len(told['tensors'])} rebuilt, {len(told['away'])} leave" if told else ""


def main() -> int:
    options = _parser().parse_args()
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _scene(options)
        ways = {KEPT: Way(), RETURNED: Way(environ={"TILEDSEG_KEEP_FREED_MEMORY": "0"})}
        first = _train(options, KEPT, ways[KEPT])
        ways |= _ways(options, _needed(options))
        found: dict[str, list[Run]] = {name: [] for name in ways}
        for _ in range(options.repeats):
            for name, way in ways.items():
                found[name].append(_train(options, name, way))
                _check(found[name][-1], first, way)
    except TiledsegError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(_table(found, options))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True, help="a folder on a local disk")
    parser.add_argument("--folder", type=Path, default=Path("runs/memory-choice"))
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--levels", type=int, default=4)
    parser.add_argument("--norm", default="instance")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.8, 0.65])
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 4], help="rows and columns")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of one run")
    return parser


def _needed(options: argparse.Namespace) -> int:
    """Bytes of a step with everything kept."""
    unet = UNet(options.levels, base_channels=options.channels, classes=CLASSES, norm=options.norm)
    return step_choices(unet.graph(), unet.bands, (options.size, options.size), 4).kept


def _ways(options: argparse.Namespace, needed: int) -> dict[str, Way]:
    found = {}
    store = ("--memory.store", str(options.store))
    for share in options.shares:
        budget = ("--memory.budget", str(int(share * needed)), "--memory.blocks", "none")
        found[f"{share:.0%}, rebuilt"] = Way(budget)
        found[f"{share:.0%}, rebuilt or sent away"] = Way((*budget, "--memory.offload", "auto", *store))
    for side in options.blocks:
        cut = ("--memory.blocks", str(side))
        found[f"blocks {side} x {side}, in memory"] = Way(cut, exact=False)
        found[f"blocks {side} x {side}, in a file"] = Way((*cut, *store), exact=False)
    return found


def _scene(options: argparse.Namespace) -> None:
    size = str(options.size)
    files = [
        "--image",
        str(options.folder / f"image-{size}.tif"),
        "--labels",
        str(options.folder / f"labels-{size}.tif"),
    ]
    if not all(map(os.path.exists, files[1::2])):
        _command(["scene", "--size", size, size, "--seed", "1", *files], options.limit)


def _train(options: argparse.Namespace, name: str, way: Way) -> Run:
    output = options.folder / f"run-{name.replace(' ', '-').replace('%', '')}"
    shutil.rmtree(output, ignore_errors=True)  # of an earlier call: it would be resumed
    keys = {
        "data.images": options.folder / f"image-{options.size}.tif",
        "data.labels": options.folder / f"labels-{options.size}.tif",
        "data.classes": CLASSES,
        "tiling.grid": 1,
        "model.levels": options.levels,
        "model.base_channels": options.channels,
        "model.norm": options.norm,
        "parallel.halo": "layer",
        "train.epochs": options.steps,
        "train.validate_every": options.steps + 1,
        "train.checkpoint_every": options.steps + 1,
        "run.output": output,
        "run.verbosity": 0,
    }
    _command(
        ["train", *(word for item in keys.items() for word in (f"--{item[0]}", str(item[1]))), *way.flags],
        options.limit,
        way.environ,
    )
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    seconds = statistics.median(line["seconds"] - line["data_seconds"] for line in lines[2:])
    summary = json.loads((output / "summary.json").read_text())
    return Run(seconds, max(line["memory_bytes"] for line in lines), tuple(line["loss"] for line in lines), summary)


def _command(words: list[str], limit: float, environ: Mapping[str, str] | None = None) -> None:
    done = run_process([sys.executable, "-m", f"tiledseg.{words[0]}", *words[1:]], limit, environ)
    if done.code:
        raise CommunicationError(f"{' '.join(words)} ended with code {done.code}: {done.reason}")


def _check(run: Run, first: Run, way: Way) -> None:
    count = None if way.exact else 1  # rounding grows from step to step
    apart = max(abs(a - b) / abs(b) for a, b in zip(run.losses[:count], first.losses[:count], strict=True))
    if apart > (0.0 if way.exact else BLOCKS_APART):
        raise CommunicationError(f"losses are {apart:.2g} apart with {' '.join(way.flags)}")


def _table(found: Mapping[str, list[Run]], options: argparse.Namespace) -> str:
    base = [run.seconds for run in found[RETURNED]]
    rows = []
    for name, runs in found.items():
        took = ratios([run.seconds for run in runs], base)
        memory = f"{statistics.median(run.memory for run in runs) / 2**20:.0f}"
        rows.append(
            (name, runs[0].what, Spread.of([run.seconds for run in runs]), f"{1 + runs[0].planned:.3f}", took, memory)
        )
    title = (
        f"U-Net L = {options.levels}, {options.channels} channels, norm {options.norm}, {options.size} px, fp32, one "
        f"thread, {options.steps} steps, {options.repeats} turns, load {os.getloadavg()[0]:.1f}"
    )
    head = ("way", "chosen", "seconds a step", "planned", "measured", "peak, MiB")
    return f"{title}\n\n{markdown(head, rows)}"


if __name__ == "__main__":
    sys.exit(main())
