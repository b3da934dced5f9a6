"""Measure the cost of a map's format: one map of a large scene by `tiledseg predict`, in each format, by turns.

`python -m benchmarks.maps --size 4096 --ranks 2`: the plain file that the ranks write is the measure. A line of JSON
has the seconds of each format, by the clock and of the processors (which say more where others use the machine), with
the start of the ranks, and their ratios to it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.launching import mpirun, python, run_process
from tiledseg.errors import CommunicationError

PLAIN = "gtiff none"
FORMATS = {
    PLAIN: ("--format", "gtiff", "--compress", "none"),
    "cog": ("--format", "cog"),
    "cog deflate": ("--format", "cog", "--compress", "deflate"),
    "cog zstd": ("--format", "cog", "--compress", "zstd"),
}
SHARES = {"none": (), "float32": ("--probabilities",), "uint8": ("--probability-type", "uint8", "--probabilities")}
NETWORK = ("--model.levels", "4", "--model.base_channels", "12")  # the demo's


def main() -> int:
    """Print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096, help="side of the scene, pixels (default 4096)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3, help="turns (default 3)")
    parser.add_argument(
        "--shares", choices=tuple(SHARES), default="none", help="write probabilities too (default none)"
    )
    parser.add_argument("--formats", nargs="+", choices=tuple(FORMATS), default=list(FORMATS), help="default: all")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds a process may take (default 600)")
    options = parser.parse_args()
    formats = list(dict.fromkeys([PLAIN, *options.formats]))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        _prepare(root, options.size, options.limit)
        taken: dict[str, list[Taken]] = {name: [] for name in formats}
        for _ in range(options.repeat):
            for name in formats:
                taken[name].append(_map(root, name, options))
    print(json.dumps({**vars(options), **_summary(taken)}))
    return 0


class Taken(NamedTuple):
    """The cost of one map: seconds by the clock and of the processors, and the bytes of its files."""

    seconds: float
    processor_seconds: float
    bytes: int


def _map(root: Path, name: str, options: argparse.Namespace) -> Taken:
    files = ["--checkpoint", f"{root}/run", "--image", f"{root}/scene.tif", "--output", f"{root}/map.tif"]
    shares = [*SHARES[options.shares], f"{root}/p.tif"] if SHARES[options.shares] else []
    begun, used = time.perf_counter(), _processor_seconds()
    _run(mpirun(options.ranks, "tiledseg.predict", *files, *FORMATS[name], *shares), options.limit)
    seconds, processor = time.perf_counter() - begun, _processor_seconds() - used
    made = [path for path in (root / "map.tif", root / "p.tif") if path.exists()]
    return Taken(round(seconds, 2), round(processor, 2), sum(path.stat().st_size for path in made))


def _processor_seconds() -> float:
    """Return the seconds of all processes that have been waited for."""
    times = os.times()
    return times.children_user + times.children_system


def _summary(taken: Mapping[str, Sequence[Taken]]) -> dict[str, object]:
    """Sum up by format; a ratio is the median of those of the turns, each of one map to the plain one of its turn."""
    found: dict[str, object] = {"bytes": {name: turns[-1].bytes for name, turns in taken.items()}}
    for what in ("seconds", "processor_seconds"):
        found[what] = {name: [getattr(turn, what) for turn in turns] for name, turns in taken.items()}
        found[f"{what}_ratio"] = {name: _ratio(turns, taken[PLAIN], what) for name, turns in taken.items()}
    return found


def _ratio(turns: Sequence[Taken], plain: Sequence[Taken], what: str) -> float:
    pairs = zip(turns, plain, strict=True)
    return round(statistics.median(getattr(one, what) / getattr(other, what) for one, other in pairs), 3)


def _prepare(root: Path, size: int, limit: float) -> None:
    """A scene to map, and a network that has seen a small one."""
    for name, side in (("small", 256), ("scene", size)):
        files = ["--image", f"{root}/{name}.tif", "--labels", f"{root}/{name}-labels.tif"]
        _run(python("tiledseg.scene", "--size", str(side), str(side), *files), limit)
    data = ["--data.images", f"{root}/small.tif", "--data.labels", f"{root}/small-labels.tif", "--data.classes", "5"]
    run = ["--train.epochs", "30", "--tiling.grid", "1", "--run.output", f"{root}/run", "--run.verbosity", "0"]
    _run(python("tiledseg.train", *data, *NETWORK, *run), limit)


def _run(command: list[str], limit: float) -> None:
    done = run_process(command, limit)
    if done.code:
        raise CommunicationError(f"a job ended with code {done.code}: {done.reason}")


if __name__ == "__main__":
    raise SystemExit(main())
