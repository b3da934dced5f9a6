"""What a map's format costs: one map of a large scene by `tiledseg predict`, in each format, taken by turns.

`python -m benchmarks.maps --size 4096 --ranks 2`: the plain file that the ranks write is the measure; a line of JSON
has the seconds of each format, by the clock, with the start of the ranks, and their ratio to it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.launching import mpirun, python, run_process
from tiledseg.errors import CommunicationError

PLAIN = "gtiff none"
FORMATS = {
    PLAIN: ("--format", "gtiff", "--compress", "none"),
    "cog deflate": ("--format", "cog", "--compress", "deflate"),
    "cog zstd": ("--format", "cog", "--compress", "zstd"),
}
NETWORK = ("--model.levels", "4", "--model.base_channels", "12")  # the demo's


def main() -> int:
    """Print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096, help="side of the scene, pixels (default 4096)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3, help="turns (default 3)")
    parser.add_argument("--shares", action="store_true", help="write probabilities too (float32)")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds a process may take (default 600)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        _prepare(root, options.size, options.limit)
        seconds: dict[str, list[float]] = {name: [] for name in FORMATS}
        for _ in range(options.repeat):
            for name, flags in FORMATS.items():
                shares = ["--probabilities", f"{root}/p.tif"] if options.shares else []
                files = ["--checkpoint", f"{root}/run", "--image", f"{root}/scene.tif", "--output", f"{root}/map.tif"]
                begun = time.perf_counter()
                _run(mpirun(options.ranks, "tiledseg.predict", *files, *flags, *shares), options.limit)
                seconds[name].append(round(time.perf_counter() - begun, 2))
        sizes = {path.name: path.stat().st_size for path in root.glob("*.tif")}
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    ratios = {name: round(median / medians[PLAIN], 3) for name, median in medians.items()}
    print(json.dumps({**vars(options), "seconds": seconds, "ratio": ratios, "bytes": sizes}))
    return 0


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
