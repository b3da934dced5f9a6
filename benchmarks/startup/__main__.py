"""What does it cost until the work begins? Processor time of start-ups, taken in turn with another version's.

    python -m benchmarks.startup [--against FOLDER] [--turns 5] [--ranks 1 4]

`import`: `import tiledseg`. `help`: `python -m tiledseg.plan --help`. `P ranks have met`: from the start of a rank's
process until it is connected with the others, torch's import included; `step on P ranks`: to the end of its first
optimizer step. Both are means of the ranks (one thread each, a scene of 128 x 128 pixels, a U-Net of two levels);
`first_step.py` says how. Seconds are user and system time of all threads, with files in the system's cache and modules
compiled, as they are from the second start on. FOLDER is a checkout of another version: each turn runs both, the next
in the opposite order, and ratios are taken turn by turn.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.spread import Spread, markdown, ratios

ROOT = Path(__file__).resolve().parents[2]
FIRST_STEP = str(Path(__file__).with_name("first_step.py"))
LIMIT_SECONDS = 200


def main() -> None:
    options = _parser().parse_args()
    roots = [ROOT, *([options.against.resolve()] if options.against else [])]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _run(ROOT, folder, ["-m", "tiledseg.scene", "--size", "128", "128", "--image", "a.tif", "--labels", "b.tif"])
        found: dict[str, list[list[float]]] = {}
        for names, cost in _costs(options.ranks, folder).items():
            found |= {name: [[] for _ in roots] for name in names}
            for root in roots:
                cost(root)  # what is compiled, and read from the disk, for the first time
            for turn in range(options.turns):
                for place in sorted(range(len(roots)), reverse=bool(turn % 2)):
                    for name, seconds in zip(names, cost(roots[place]), strict=True):
                        found[name][place].append(seconds)
    print(_table(found))


def _costs(ranks: list[int], folder: Path) -> dict[tuple[str, ...], Callable[[Path], tuple[float, ...]]]:
    """What is measured, by names: from the root of a version to seconds, one for each name."""
    costs: dict[tuple[str, ...], Callable[[Path], tuple[float, ...]]] = {
        ("import",): lambda root: (_run(root, folder, ["-c", "import tiledseg"]),),
        ("help",): lambda root: (_run(root, folder, ["-m", "tiledseg.plan", "--help"]),),
    }
    steps = {(f"{count} ranks have met", f"step on {count} ranks"): count for count in ranks}
    return costs | {names: partial(_first_step, folder, count) for names, count in steps.items()}


def _first_step(folder: Path, ranks: int, root: Path) -> tuple[float, float]:
    shutil.rmtree(folder / "run", ignore_errors=True)
    flags = ["--data.images", "a.tif", "--data.labels", "b.tif", "--data.classes", "5", "--tiling.grid", "2"]
    flags += ["--model.levels", "2", "--model.base_channels", "4", "--run.output", "run", "--run.verbosity", "0"]
    launcher = [*_mpirun(), "-n", str(ranks)] if ranks > 1 else []
    _run(root, folder, [FIRST_STEP, *flags], launcher)
    reports = [json.loads((folder / f"rank.{rank}").read_text()) for rank in range(ranks)]
    met, step = (sum(report[key] for report in reports) / ranks for key in ("met", "cpu"))
    return met, step


def _mpirun() -> list[str]:
    beside = Path(sys.executable).with_name("mpirun")
    return [str(beside) if beside.exists() else "mpirun", "--oversubscribe"]


def _run(root: Path, folder: Path, words: list[str], launcher: list[str] | None = None) -> float:
    """Processor time of a Python process that imports the version at `root`. RuntimeError where it fails."""
    environ = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "FIRST_STEP_OUTPUT": str(folder / "rank")}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # with it each process compiles all that it imports of a checkout
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [*(launcher or []), sys.executable, *words]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-500:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _table(found: dict[str, list[list[float]]]) -> str:
    rows = []
    for name, (ours, *others) in found.items():
        more = [(Spread.of(other), ratios(ours, other)) for other in others]
        rows.append([name, Spread.of(ours), *(cell for pair in more for cell in pair)])
    head = [
        "until",
        "CPU s a rank",
        *(["the other version, CPU s", "time over the other's"] if len(rows[0]) > 2 else []),
    ]
    return markdown(head, rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="a checkout of another version")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4])
    return parser


if __name__ == "__main__":
    main()
