"""All that can be learned on one GPU in nine minutes, on a bare machine without network.

    python -m benchmarks.gpu --out FOLDER [--small] [--seconds 540] [--parts NAME ...]

Each part is a module beside this one; FOLDER/measurements.jsonl gets a line a measurement, FOLDER/battery.log what the
parts have printed. What the machine lacks is installed from the wheels that `make gpu-wheels` has collected. Without a
GPU the same programs run at small sizes. Exit code: 0 where every part is done, 1 where one failed. See README.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.lines import FILE, read_lines, write_line
from benchmarks.gpu.report import table
from benchmarks.gpu.running import Place, Program, run_parts
from benchmarks.gpu.wheels import install_missing

# What is worth most comes first, for where time runs out. The seconds are limits: two thirds of them are expected.
PARTS = (
    Program("versions", 40),
    Program("one_rank_nccl", 45),
    Program("marked_tests", 240),
    Program("training_step", 110),
    Program("shared_gpu", 160),
    Program("waiting", 50),
    Program("memory", 100),
    Program("large_tensors", 60),
    Program("mapping", 50),
    Program("small_costs", 50),
    Program("large_models", 60),
    Program("element_bytes", 45),
)
BUSY = 4  # the small form also runs on machines that others keep busy


def main() -> int:
    options = _parser().parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if (options.out / FILE).exists():
        print(f"error: {options.out / FILE} exists; give another folder", file=sys.stderr)
        return 2
    environ = {**os.environ, "PYTHONUNBUFFERED": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1"}
    environ["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    # The project, which a bare machine has not installed.
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_ROOT), environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory(prefix="battery-") as work:
        failed = _run(options, Path(work), environ)
    print(_summary(read_lines(options.out), failed))
    print(table(read_lines(options.out)))
    return 1 if failed else 0


def _run(options: argparse.Namespace, work: Path, environ: dict[str, str]) -> list[str]:
    """Installs what is missing, and runs the parts; the names of those that failed."""
    installed, seconds = install_missing(options.wheels, work / "site", environ)
    write_line(options.out, "wheels", "installed", "ok", seconds, value=installed, unit=None)
    slower = BUSY if options.small else 1
    chosen = [Program(p.name, p.seconds * slower) for p in PARTS if not options.parts or p.name in options.parts]
    return run_parts(chosen, Place(options.out, work, options.small), options.seconds - seconds, environ)


_ROOT = Path(__file__).resolve().parents[2]


def _summary(lines: list[dict], failed: list[str]) -> str:
    counts = {state: sum(line["state"] == state for line in lines) for state in ("ok", "failed", "skipped")}
    told = ", ".join(f"{number} {state}" for state, number in counts.items())
    return f"{told}; parts that failed: {', '.join(failed) or 'none'}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder without an earlier run's lines")
    parser.add_argument("--small", action="store_true", help="small sizes; chosen by itself where there is no GPU")
    parser.add_argument("--seconds", type=float, default=540, help="for everything together")
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS], help="only these")
    parser.add_argument("--wheels", type=Path, default=_ROOT / ".gpu-wheels", help="where `make gpu-wheels` put them")
    return parser


if __name__ == "__main__":
    sys.exit(main())
